"""The balance sheet: shares add up, faults come first, and its run is the audit's."""

import dataclasses
import inspect
import json
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import scalewise as sw
from scalewise.auditing import _audit
from scalewise.auditing._run._outcome import in_parts
from scalewise.auditing._sheet._make import make_sheet
from scalewise.auditing._sheet._sheet import Sheet
from scalewise.auditing._tape import _forward
from scalewise.auditing._tape._both import run_both
from scalewise.formats import FP16, format
from scalewise.interpret import is_inexact


def session(f, *args, low="bf16", dtypes=None, steps=1):
    return _audit.traced(f, args, {}, _audit.low_interpretation(low), None, steps, (), dtypes)


def source(f, *args, **options):
    own = session(f, *args, **options)
    return _audit.sheet_source(f, own, own.run())


def sheet(f, *args, **options) -> Sheet:
    """The sheet of the program that an audit runs, without the audit."""
    return make_sheet(source(f, *args, **options))


def numbers(*shape, seed=0, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def first(found: Sheet):
    return found.lines[0]


def line(f, text):
    rows, start = inspect.getsourcelines(f)
    (at,) = [start + i for i, row in enumerate(rows) if row.rstrip().endswith(text)]
    return at


# -- sums ---------------------------------------------------------------------------------------

UNARY = [
    jnp.tanh, jnp.exp, jnp.sin, jnp.square, jnp.floor, jax.nn.sigmoid, jax.nn.relu, jnp.abs,
    lambda x: jnp.log(jnp.abs(x)), lambda x: 1 / x, lambda x: jnp.cumsum(x), lambda x: x[::-1],
    lambda x: jnp.where(x > 0.3, x, -x), lambda x: x / jnp.max(x), lambda x: x - jnp.mean(x),
    lambda x: x * jnp.sum(x * x), lambda x: jnp.clip(x, -0.7, 0.9), lambda x: jnp.sort(x),
    lambda x: x[jnp.argmax(x)] * x, lambda x: jnp.zeros_like(x).at[jnp.arange(4) % 3].add(x),
    lambda x: x.reshape(2, 2).T.reshape(4), lambda x: jnp.round(x * 4) / 4,
    lambda x: jnp.exp(9 * x),
]  # fmt: skip
BINARY = [jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, lambda a, b: a / (b * b)]
BINARY += [lambda a, b: jnp.outer(a, b) @ a, lambda a, b: jnp.where(a > b, a, 2 * b)]
BINARY += [lambda a, b: lax.cond(a[0] > b[1], lambda: a * b, lambda: a + 1), jnp.hypot]


def repeated(f):
    return lambda x: lax.fori_loop(0, 3, lambda i, c: f(c) * 0.5, x)


def scanned(f):
    def run(x):
        last, rows = lax.scan(lambda c, t: (f(c) * 0.5 + t, c * t), x * 0.1, jnp.stack([x, x * 2]))
        return last + jnp.sum(rows, 0)

    return run


def until(f):
    def run(x):
        step = lambda c: (c[0] + jnp.abs(f(c[1])) + 0.3, c[1] * 0.9)  # noqa: E731
        return lax.while_loop(lambda c: jnp.sum(c[0]) < 5.0, step, (jnp.zeros(4), x))[0]

    return run


def gradient(f):
    return lambda x: jax.grad(lambda x: jnp.sum(f(x) ** 2))(x)


def generated(seed):
    """A chain of random operations on an array of four numbers."""
    draw = np.random.default_rng(seed)
    smooth = [jnp.tanh, jnp.sin, jax.nn.sigmoid, lambda x: x / (1 + x * x)]
    wraps = [repeated, scanned, until, gradient, jax.checkpoint, jax.jit]
    steps = []
    for _ in range(draw.integers(2, 6)):
        kind = draw.choice(["unary", "unary", "binary", "wrapped"])
        if kind == "unary":
            steps.append(UNARY[draw.integers(len(UNARY))])
        elif kind == "binary":
            f, g = BINARY[draw.integers(len(BINARY))], UNARY[draw.integers(len(UNARY))]
            steps.append(lambda x, f=f, g=g: f(x, g(x)))
        else:
            steps.append(wraps[draw.integers(len(wraps))](smooth[draw.integers(len(smooth))]))

    def run(x):
        for step in steps:
            x = step(x)
        return x

    return run


@pytest.mark.parametrize("seed", range(20))
def test_shares_add_up(seed):
    f, x, low = generated(seed), numbers(4, seed=seed), ("bf16", "fp16")[seed % 2]
    found = sheet(f, x, low=low, dtypes="all")
    if not found.shares:
        return
    unexplained = sum(abs(x.share) for x in found.shares if x.cause == "unexplained")
    whole = sum(x.share for x in found.shares)
    assert found.residual < 1e-6
    assert whole == pytest.approx(1, abs=1e-6)
    assert unexplained < 1e-6, found.by("operation")


@pytest.mark.parametrize("seed", range(0, 20, 4))
def test_the_error_is_that_of_emulate_beside_float64(seed):
    f, x = generated(seed), numbers(4, seed=seed)
    found = sheet(f, x, dtypes="all")
    low = np.asarray(sw.emulate(f, "bf16")(x), np.float64)
    with jax.enable_x64(True):
        wide = np.asarray(jax.jit(f)(np.asarray(x, np.float64)))
    bad = int(np.sum(~np.isfinite(low) & np.isfinite(wide)))
    assert found.stages[0].non_finite == bad
    if not bad:
        ok = np.isfinite(low) & np.isfinite(wide)
        error = np.linalg.norm((low - wide)[ok]) / (np.linalg.norm(wide[ok]) or 1.0)
        assert found.stages[0].error == pytest.approx(error, rel=1e-4)


def e4m3(x):
    codes = format("float8_e4m3fn").encode(np.float32(float(x)))
    return Fraction(float(format("float8_e4m3fn").decode(codes)))


def shares(f, *args):
    """Returns the shares of operations and of arguments in E4M3."""
    return dict(sheet(f, *map(jnp.float32, args), low="e4m3fn", dtypes="all").by("operation"))


def test_shares_of_an_example_by_hand():
    """The example of docs/concepts/balance-sheet.md, in fractions."""

    def f(x, y):
        p = x * y
        return p + x

    x, y = Fraction(21, 16), Fraction(11, 16)
    low_x = e4m3(x)
    assert low_x == Fraction(5, 4)
    exact_p, p = low_x * y, Fraction(7, 8)
    exact_s, s = p + low_x, Fraction(2)
    error = s - (x * y + x)
    by_hand = {
        "add": s - exact_s,
        "mul": p - exact_p,
        # x reaches the result by the sum and by the product, whose slope is y
        "[0]": (low_x - x) * (1 + y),
    }
    assert error == sum(by_hand.values()) == Fraction(-55, 256)
    found = shares(f, float(x), float(y))
    assert found == {name: pytest.approx(float(part / error)) for name, part in by_hand.items()}


def test_shares_of_the_operands_of_a_product_by_hand():
    """The difference of each counts at the mean of the other's values in both runs."""
    x, y = Fraction(21, 16), Fraction(23, 32)
    low_x, low_y = e4m3(x), e4m3(y)
    error = low_x * low_y - x * y
    by_hand = {"[0]": (low_x - x) * (low_y + y) / 2, "[1]": (low_y - y) * (low_x + x) / 2}
    assert sum(by_hand.values()) == error
    found = shares(lambda x, y: x @ y, [[float(x)]], [[float(y)]])
    assert found == {name: pytest.approx(float(part / error)) for name, part in by_hand.items()}


def test_shares_of_three_factors_by_hand():
    """Each derivative is integrated on the line between the runs, on which it isn't linear."""
    x, y, z = exact = Fraction(21, 16), Fraction(23, 32), Fraction(17, 16)
    dx, dy, dz = (e4m3(v) - v for v in exact)

    def share(d, v, dv, w, dw):
        return d * (v * w + (v * dw + w * dv) / 2 + dv * dw / 3)

    by_hand = share(dx, y, dy, z, dz), share(dy, x, dx, z, dz), share(dz, x, dx, y, dy)
    error = math.prod(map(e4m3, exact)) - x * y * z
    assert sum(by_hand) == error
    f = lambda *parts: jnp.prod(jnp.concatenate(parts))  # noqa: E731
    found = shares(f, *([float(v)] for v in exact))
    want = {f"[{i}]": pytest.approx(float(part / error)) for i, part in enumerate(by_hand)}
    assert found == want


def test_shares_of_the_largest_of_each_row_by_hand():
    """In the last row another element is the largest in each run: both make the difference."""
    a, b = (np.array([42, 16, 53]) / 32, np.array([192, 146, 151]) / 64)
    d_a, d_b = (np.array([float(e4m3(x) - Fraction(x)) for x in v]) for v in (a, b))
    error = np.maximum(a + d_a, 4 - b - d_b) - np.maximum(a, 4 - b)
    made = {"[0]": d_a * [1, 0, 1 / 9], "[1]": -d_b * [0, 1, 8 / 9]}
    np.testing.assert_allclose(sum(made.values()), error)
    found = shares(lambda a, b: jnp.max(jnp.stack([a, 4 - b], 1), 1), a, b)
    assert found == {k: pytest.approx(part @ error / (error @ error)) for k, part in made.items()}


def test_an_inverse_that_is_exact_in_the_format_is_charged_to_its_argument():
    """1 / 0.26 beside 1 / 0.5 in E2M1: six derivatives between them miss 6e-9 of the difference."""
    found = sheet(jnp.linalg.inv, jnp.full((1, 1), 0.26), low="e2m1fn", dtypes="all")
    assert found.by("operation") == (("[0]", pytest.approx(1, abs=1e-12)),)


def test_an_overflow_before_a_product_is_charged_to_it():
    def f(x, w):
        a = x * x  # fault
        return a @ w

    found = sheet(f, jnp.full((2, 2), 300.0), numbers(2, 2), low="fp16", dtypes="all")
    assert first(found).line == line(f, "# fault")
    assert first(found).share == pytest.approx(1)


def test_the_share_of_a_line_is_the_error_that_it_alone_makes():
    """Of a sum of terms, whose roundings don't meet before the sum."""
    x = numbers(64)
    rounded = lambda y: sw.round_to(y, "bf16").astype(jnp.float32)  # noqa: E731
    x = rounded(x)

    def f(x):
        return jnp.sum(jnp.exp(x)) + jnp.sum(jnp.sin(x) * 16)

    found = dict(sheet(f, x, dtypes="all").by("operation"))
    exact = np.asarray(x, np.float64)
    error = lambda y: np.sum(np.asarray(rounded(jnp.float32(y)), np.float64) - np.float32(y))  # noqa: E731
    assert found["exp"] / found["sin"] == pytest.approx(
        error(np.exp(exact)) / (16 * error(np.sin(exact))), rel=1e-2
    )


# -- the run ------------------------------------------------------------------------------------


def mixed(x):
    h = x.astype(jnp.float32) * 1.1
    return (h / jnp.sum(h * h)).astype(x.dtype) * 0.3


def drawn(x):
    return x * jax.random.normal(jax.random.key(3), (4,)) + jax.random.uniform(jax.random.key(4))


def scattered(x):
    return jnp.zeros(3).at[jnp.array([0, 1, 1, 1])].add(x + 0.1)


def product(x):
    w = jnp.outer(x, x + 0.2)
    return jnp.tanh(w @ x), w @ (w * 0.3)


RUNS = {
    "chain": (generated(3), "bf16"), "gradient": (gradient(jnp.tanh), "fp16"),
    "loop": (scanned(jnp.tanh), "fp16"), "until": (until(jnp.sin), "bf16"),
    "as written": (mixed, "fp16"), "draws": (drawn, "bf16"), "scatter": (scattered, "bf16"),
    "policy": (product, "p=f32,c=bf16,o=f32"), "recipe": (product, sw.recipes.fp8),
    "blocks": (product, sw.recipes.mxfp8), "float32": (product, "float32"),
    "saturating": (lambda x: jnp.exp(x * 9), "float8_e4m3fn"),
    "update": (lambda x: lax.dynamic_update_slice(x, x[:2] * 0.3, (1,)), "bf16"),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_the_low_run_is_the_audits(name):
    f, low = RUNS[name]
    own = session(f, numbers(4, seed=1), low=low)
    outcome = own.run()
    made = run_both(own.program, own.low)
    outputs = made.outputs
    floats = [x for x, a in zip(outputs, own.program.out_avals, strict=True) if is_inexact(a)]
    for mine, audits in zip(floats, outcome.low, strict=True):
        np.testing.assert_array_equal(in_parts(mine.cell.low), np.asarray(audits, np.float64))


def test_the_report_makes_it_when_it_is_read():
    report = sw.audit(lambda x: jnp.sum(x * x), "fp16", trials=0)(jnp.full(4, 300.0))
    assert "sheet" not in report.as_dict()
    found = report.sheet
    assert report.sheet is found
    assert first(found).causes[0][0] == "overflow"
    assert json.loads(report.json())["sheet"]["sentence"] == found.sentence
    assert found.error.non_finite == report.error.non_finite
    with pytest.raises(ValueError, match="is a copy, which has no program"):
        _ = dataclasses.replace(report, make_sheet=None).sheet


def test_it_is_the_same_each_time():
    own = source(gradient(jnp.tanh), numbers(4))
    assert make_sheet(own) == make_sheet(own)


def test_a_program_of_too_many_operations_is_refused(monkeypatch):
    monkeypatch.setattr(_forward, "LONGEST", 7)
    with pytest.raises(ValueError, match="more than 7 operations, loops unrolled"):
        sheet(scanned(jnp.tanh), numbers(4))


def test_a_program_is_refused_before_its_results_fill_the_memory(monkeypatch):
    monkeypatch.setattr(_forward, "CHECKED_EVERY", 2)
    assert sheet(scanned(jnp.tanh), numbers(4)).operations
    monkeypatch.setattr(_forward, "LEAST_FREE", 1.0)
    with pytest.raises(ValueError, match=r"GB of memory are free, since .* a smaller batch"):
        sheet(scanned(jnp.tanh), numbers(4))


# -- planted faults -----------------------------------------------------------------------------


def small_epsilon(x):
    y = jnp.zeros(4) * x
    return x / (jnp.sqrt(y) + 1e-9)  # fault


def counter(x):
    def count(total, t):
        return total + t, None  # fault

    return lax.scan(count, jnp.float32(0), jnp.ones(600) + 0 * x[0])[0]


def unscaled(x):
    scores = jnp.outer(x * 300, x * 300) * 90  # fault
    return jax.nn.softmax(scores / 1e6)


def average(x):
    return x * 0.9999 + 0.0001 * x[::-1]  # fault


FAULTS = [
    (small_epsilon, "fp16", 1.0), (counter, "bf16", 1.0), (unscaled, "fp16", 1.0),
    (average, "bf16", 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("f", "low", "scale"), FAULTS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_planted_fault_is_first(f, low, scale):
    found = sheet(f, numbers(4, seed=2, scale=scale), low=low, dtypes="all")
    inner = line(f, "# fault")
    assert first(found).line == inner, found.by("line")
    assert f"Line {inner} makes" in found.sentence or len(found.cancelling) > 1


def test_a_planted_epsilon_in_a_training_step():
    """Adam's moments of small gradients vanish in FP16, and so does its epsilon."""

    def step(state, x, y):
        def loss(w):
            return jnp.mean(jnp.square(jnp.tanh(x @ w) - y)) * 1e-3

        value, g = jax.value_and_grad(loss)(state["w"])
        m = 0.9 * state["m"] + 0.1 * g
        v = 0.99 * state["v"] + 0.01 * g * g
        w = state["w"] - 1e-2 * m / (jnp.sqrt(v) + 1e-9)  # fault
        return {"w": w, "m": m, "v": v}, value

    zeros = jnp.zeros((5, 1))
    state = {"w": numbers(5, 1), "m": zeros, "v": zeros}
    args = state, numbers(8, 5, seed=1), numbers(8, 1, seed=2)
    found = sheet(step, *args, low="fp16", dtypes="all")
    assert found.stages[0].name == "loss and gradients"
    assert not found.stages[0].fails
    assert found.explained in ("[0]['w']", "[0]['v']")
    assert {x.line for x in found.lines[:2]} & {line(step, "# fault"), line(step, "# fault") - 1}


def test_the_library_comes_below_the_users_line():
    optimizer = optax.adam(1e-3, eps=1e-12)

    def step(w, state, x):
        g = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        updates, state = optimizer.update(g, state, w)  # fault
        return optax.apply_updates(w, updates), state

    w = numbers(5)
    args = w, optimizer.init(w), numbers(3, 5, seed=1) * 0.03
    with jax.numpy_dtype_promotion("standard"):
        found = sheet(step, *args, low="fp16", dtypes="all")
    assert first(found).line == line(step, "# fault")
    assert all(where.startswith("optax/") for where, _ in first(found).libraries)


def test_a_hidden_branch_is_told():
    """Every sum of squares overflows, so that the norm is zero; the residual hides it."""

    def block(x, w):
        scale = lax.rsqrt(jnp.sum(x * x, -1, keepdims=True))
        return x + jax.nn.gelu(x * scale @ w)

    args = numbers(4, 8, seed=3, scale=300.0), numbers(8, 8, seed=4)
    found = sheet(block, *args, low="fp16", dtypes="all")
    assert not found.stages[0].fails
    assert any("wrong by half or more; the outputs don't show it" in x for x in found.hidden)
    assert not sheet(block, args[0] / 300, args[1], low="fp16", dtypes="all").hidden


# -- rules --------------------------------------------------------------------------------------


def causes(f, *args, **options):
    return dict(sheet(f, *args, **options).by("cause"))


def test_a_flipped_decision_is_charged_to_the_roundings_that_flipped_it():
    def f(x):
        y = x * 1.01  # rounds to the left or to the right of the bound
        return jnp.where(y > 1.013, 5.0, 1.0)

    x = jnp.linspace(0.99, 1.02, 64)
    found = sheet(f, x, low="bf16", dtypes="all")
    assert found.stages[0].error > 0.1
    assert dict(found.by("cause")).keys() <= {"decision", "argument", "constant"}
    integers = sheet(lambda x: jnp.floor(x * 100).astype(jnp.int32), x, low="bf16", dtypes="all")
    assert integers.explained == "decisions"
    assert integers.error.error == pytest.approx(
        sum(x.share for x in integers.shares) * integers.error.error
    )
    assert sum(x.share for x in integers.shares) == pytest.approx(1)


def test_a_nan_is_charged_to_the_operands_that_make_it():
    def f(x):
        a = x * x
        b = x * x * 2
        return a - b

    found = sheet(f, jnp.full(4, 300.0), low="fp16", dtypes="all")
    lines = {row.line: row.share for row in found.lines}
    start = f.__code__.co_firstlineno
    assert lines[start + 1] == pytest.approx(0.5, abs=0.01)
    assert lines[start + 2] == pytest.approx(0.5, abs=0.01)


def test_bits_of_an_argument_are_no_random_draw():
    def f(x):
        bits = lax.bitcast_convert_type(x, jnp.int32)
        return lax.bitcast_convert_type(bits + (1 << 23), jnp.float32)  # times 2

    found = sheet(f, numbers(4), low="bf16", dtypes="all")
    assert sum(x.share for x in found.shares) == pytest.approx(1)
    assert found.stages[0].error > 0


def test_an_output_that_is_a_constant_keeps_its_share():
    def f(x):
        return jnp.sin(jnp.float32(0.3)) * jnp.ones(2), x * 0.0

    found = sheet(f, numbers(2), low="bf16", dtypes="all")
    assert found.stages[0].error > 0
    assert sum(x.share for x in found.shares) == pytest.approx(1)


def test_cancelling_shares_are_shown_together():
    def f(x):
        up = x * 1.007  # FP16 has 1.0068: 0.00016 less
        down = x * 1.0148  # 1.0146: 0.00015 less
        return up - down

    found = sheet(f, jnp.ones(3), low="fp16", dtypes="all")
    start = f.__code__.co_firstlineno
    assert {x.line for x in found.cancelling} >= {start + 1, start + 2}
    assert min(x.share for x in found.cancelling) < -0.5
    assert found.table().rows[0][0].endswith("together")
    assert "cancel one another; together they make" in found.sentence


# -- output -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example():
    return sheet(scanned(jnp.tanh), numbers(4), low="bf16", dtypes="all")


def test_tables_add_up_alike(example):
    for by in ("line", "operation", "scope", "direction", "cause"):
        assert sum(share for _, share in example.by(by)) == pytest.approx(1)
        assert len(example.table(by).rows) >= len(example.by(by))
    assert {name.split(", ")[1] for name, _ in example.by("iteration")} == {"0", "1"}
    with pytest.raises(ValueError, match="by='module'; expected 'line', 'operation'"):
        example.by("module")


def test_it_is_saved(example, tmp_path):
    data = json.loads(example.save(tmp_path / "x.json").read_text())
    assert data["sentence"] == example.sentence
    assert sum(x["share"] for x in data["lines"]) == pytest.approx(1)
    assert example.to_dict() == example.as_dict()
    assert "Line" in example.save(tmp_path / "x.csv").read_text()
    assert "makes" in example.save(tmp_path / "x.html").read_text()
    assert example.sentence in str(example)


def test_the_flame_graph_follows_speedscopes_schema(example, tmp_path):
    """https://www.speedscope.app/file-format-schema.json, type SampledProfile."""
    data = json.loads(example.save(tmp_path / "x.speedscope.json").read_text())
    assert data["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames = data["shared"]["frames"]
    assert all(isinstance(x["name"], str) and set(x) <= {"name", "file", "line"} for x in frames)
    total = 0.0
    for profile in data["profiles"]:
        assert profile.keys() == {
            "type", "name", "unit", "startValue", "endValue", "samples", "weights",
        }  # fmt: skip
        assert profile["type"] == "sampled"
        assert profile["unit"] == "none"
        assert len(profile["samples"]) == len(profile["weights"])
        assert all(0 <= i < len(frames) for stack in profile["samples"] for i in stack)
        assert all(weight > 0 for weight in profile["weights"])
        assert profile["endValue"] == pytest.approx(sum(profile["weights"]))
        sign = 1 if profile["name"].startswith("error") else -1
        total += sign * profile["endValue"]
    assert total == pytest.approx(100)
    assert any("test_sheet.py" in x.get("file", "") for x in frames)


def test_a_run_without_error_says_so():
    found = sheet(lambda x: x + x, jnp.ones(3), low=FP16, dtypes="all")
    assert found.sentence == "The low-precision run has no error."
    assert found.shares == ()


def test_an_operation_without_a_derivative_is_charged_by_size():
    def f(x):
        return jnp.sum(x.at[jnp.array([2, 0])].apply(jnp.sin) ** 2, 1)

    found = sheet(f, numbers(4, 4), low="bf16")
    assert found.residual < 1e-9
    assert found.lines
