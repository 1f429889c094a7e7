"""The low lane is emulation, the shadow the plain run; what is noted is what NumPy counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import programs
import scalewise as sw
from devices import run_on_devices
from programs import scalar
from scalewise.audit._run import _ledger
from scalewise.audit._run._ahead import compile_ahead
from scalewise.audit._run._elementary import ADD, DIV, MUL, SQRT, SUB, product, quotient
from scalewise.audit._run._lanes import Rounded, Wide
from scalewise.audit._run._ledger import Ledger
from scalewise.audit._run._pair import Pair
from scalewise.audit._run._rounding import as_row, narrowed, round_by, scaled
from scalewise.audit._run._session import Session
from scalewise.audit._run._statistics import BINS, LOWEST
from scalewise.autocast import Autocast, Policy
from scalewise.formats import CATALOGUE, E4M3FN, FP16, Format
from scalewise.interpret import trace

MINE = Format("e6m9", exponent_bits=6, mantissa_bits=9)
FORMATS = [f for f in [*CATALOGUE.values(), MINE] if f.mantissa_bits and f.bits < 33]


def in_lane(lane, f, *args, dtype=np.float32):
    return Session(trace(f, lane, args, {}, name="audit"), lane, Wide(np.dtype(dtype)))


def session(f, *args, low="fp16", dtype=np.float32):
    return in_lane(Rounded(sw.format(low)), f, *args, dtype=dtype)


def lanes(s):
    """Both lanes' outputs, floats only, as NumPy arrays."""
    outcome = s.run()
    return [np.asarray(x) for x in outcome.low], [np.asarray(x) for x in outcome.shadow]


def floats(tree):
    leaves = [np.asarray(x) for x in jax.tree.leaves(tree)]
    return [x for x in leaves if np.issubdtype(x.dtype, np.floating)]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("saturate", [False, True, "finite"])
def test_rounding_by_data_is_round_to(fmt, saturate):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 1 << 64, 4000, dtype=np.uint64)
    scale = 2.0 ** rng.integers(fmt.min_exponent - 12, fmt.max_exponent + 3, 4000)
    wild = codes.view(np.float64)
    near = rng.standard_normal(4000) * scale
    ties = np.round(near / scale * 2 ** (fmt.mantissa_bits + 1)) / 2 ** (fmt.mantissa_bits + 1)
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, float(fmt.max), -float(fmt.max)]
    with jax.enable_x64(True):
        wild = wild[~((np.abs(wild) < 1e-300) & (wild != 0))]
        x = jnp.asarray(np.concatenate([wild, near, ties * scale, edges]))
        got = np.asarray(jax.jit(round_by)(x, as_row(fmt, saturate)))
        want = np.asarray(sw.round_to(x, fmt, saturate=saturate))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(want[want == 0]))


def test_a_scaled_format_is_a_scale_around_the_rounding():
    x = np.random.default_rng(1).standard_normal(1000) * 2.0 ** np.arange(1000) ** 0.4
    with jax.enable_x64(True):
        got = round_by(jnp.asarray(x), scaled(as_row(E4M3FN), 5))
        want = sw.round_to(jnp.asarray(x * 32), E4M3FN) / 32
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


NARROW = [f for f in FORMATS if Rounded(f).stored == np.float32]


def operands(fmt):
    """Pairs of a format's numbers: all of them if there are few, else all with others at random,
    with what makes a quotient close to a tie, and with equal exponents."""
    codes = np.arange(1 << fmt.bits)
    numbers = fmt.decode(codes.astype(np.uint32))
    if fmt.bits <= 8:
        a, b = np.meshgrid(numbers, numbers)
        return a.ravel(), b.ravel()
    rng = np.random.default_rng(0)
    some = rng.permutation(numbers)
    ties = numbers + fmt.decode((codes + 1) % (1 << fmt.bits))  # twice a number between two
    near = np.asarray(sw.round_to(jnp.asarray(ties * some / 2), fmt))
    pairs = [(numbers, some), (near, some), (numbers, numbers[::-1])]
    close = numbers, fmt.decode(np.clip(codes + rng.integers(-40, 40, codes.size), 0, codes[-1]))
    return tuple(np.concatenate(x) for x in zip(*pairs, close, strict=True))


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
def test_float32_rounded_is_float64_rounded(fmt):
    """Figueroa: what emulate does in float64 needs no more than float32 for a narrow format."""
    with jax.enable_x64(True):
        a, b = (jnp.asarray(x) for x in operands(fmt))
        for combine, codes in ((product, (ADD, SUB, MUL)), (quotient, (DIV, SQRT))):
            for code in codes:
                exact = np.asarray(jax.jit(combine)(code, a, b))
                single = [x.astype(jnp.float32) for x in (a, b)]
                row = as_row(fmt)
                got = jax.jit(lambda *x, f=combine, row=row: round_by(f(*x), row))(code, *single)
                want = np.asarray(sw.round_to(jnp.asarray(exact), fmt))
                np.testing.assert_array_equal(np.asarray(got), want.astype(np.float32))
                zeros = want == 0
                np.testing.assert_array_equal(np.signbit(got)[zeros], np.signbit(want)[zeros])


@pytest.mark.parametrize("fmt", ["fp16", "e5m2"])
def test_a_float64_result_narrowed_is_rounded_once(fmt):
    fmt, rng = sw.format(fmt), np.random.default_rng(0)
    numbers = fmt.decode(np.arange(1 << fmt.bits, dtype=np.uint32))
    numbers = np.sort(numbers[np.isfinite(numbers)])
    ties = (numbers[1:] + numbers[:-1]) / 2
    wild = rng.standard_normal(5000) * 2.0 ** rng.integers(-300, 300, 5000)
    with jax.enable_x64(True):
        x = jnp.asarray(np.concatenate([ties, ties * (1 + 2.0**-52), ties * (1 - 2.0**-53), wild]))
        narrow = jax.jit(narrowed, static_argnums=2)(x, as_row(fmt), jnp.float32)
        got, want = (jax.jit(round_by)(y, as_row(fmt)) for y in (narrow, x))
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want).astype(np.float32))
        np.testing.assert_array_equal(np.asarray(narrow == 0), np.asarray(x == 0))
        assert np.isfinite(narrow).all()
        single = jax.jit(narrowed, static_argnums=2)(x, as_row("fp32"), jnp.float32)  # a trial
        np.testing.assert_array_equal(np.asarray(single), np.asarray(x.astype(jnp.float32)))


@pytest.mark.parametrize("name", ["elementwise", "branches", "remat", "while_loop", "indexing"])
def test_low_is_emulation_and_shadow_the_plain_run(name):
    f = getattr(programs, name)
    x = jax.random.normal(jax.random.key(0), (4, 4))
    low, shadow = lanes(session(f, x))
    for got, want in zip(low, floats(jax.jit(sw.emulate(f, "fp16"))(x)), strict=True):
        np.testing.assert_array_equal(got, want.astype(np.float64))
    for got, want in zip(shadow, floats(f(x)), strict=True):
        # one program or two: XLA may contract a product and a sum in one and not in the other
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=0)


def test_so_it_is_for_a_gradient_through_a_loop_in_another_format():
    x = jax.random.normal(jax.random.key(0), (4, 4))
    g = jax.grad(scalar(programs.fori_loop))
    low, shadow = lanes(session(g, x, low="e5m2"))
    for got, want in zip(low, floats(jax.jit(sw.emulate(g, "e5m2"))(x)), strict=True):
        np.testing.assert_array_equal(got, want.astype(np.float64))
    for got, want in zip(shadow, floats(g(x)), strict=True):  # XLA fuses loops in its own ways
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("top", [10, 4])  # with and without overflow: counted in two ways
def test_counts_are_those_of_numpy(top):
    x = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    x = (x * 2.0 ** np.random.default_rng(1).integers(-14, top, 5000)).astype(np.float32)
    (row,) = session(lambda x: x * x, jnp.asarray(x)).run().rows
    low = x.astype(np.float16).astype(np.float64)
    exact = low * low
    with np.errstate(over="ignore"):
        rounded = exact.astype(np.float16)
    assert row["elements"] == 5000
    assert row["overflowed"] == np.isinf(rounded).sum()
    assert (row["overflowed"] > 0) == (top == 10)
    assert row["flushed"] == ((rounded == 0) & (exact != 0)).sum() > 0
    small = (np.abs(rounded) < 2.0**-14) & (rounded != 0)
    assert row["subnormal"] == small.sum() > 0
    assert row["amax"] == exact.max()
    assert (row.primitive, row.line > 0) == ("mul", True)


def test_a_histogram_is_of_the_shadows_exponents():
    x = np.float32(2.0) ** np.random.default_rng(0).integers(-20, 20, 700).astype(np.float32)
    x[:50] = 0
    (row,) = session(lambda x: x * 1.5, jnp.asarray(x)).run().rows
    exponents = np.log2(x[x != 0]).astype(int) - LOWEST
    np.testing.assert_array_equal(row.histogram, np.bincount(exponents, minlength=BINS))


@pytest.mark.parametrize(("fmt", "stored"), [("fp16", np.float32), ("bf16", np.float64)])
def test_subnormals_of_a_format_stay_however_values_wait(fmt, stored):
    def f(x):
        return jnp.where(x * 0.5 > 0, x * 0.5, 1.0) + 0.0

    x = np.float32(sw.format(fmt).smallest_subnormal) * np.arange(9, dtype=np.float32)
    (low,), _ = lanes(session(f, jnp.asarray(x), low=fmt))
    with jax.enable_x64(True):
        want = np.asarray(jax.jit(sw.emulate(f, fmt))(jnp.asarray(x, jnp.float64)))
    assert low.dtype == stored
    assert 0 < low[2] == x[1]
    np.testing.assert_array_equal(low, want)


@pytest.mark.parametrize(
    "low", [Rounded(FP16), Autocast(Policy(compute="float16"))], ids=["format", "policy"]
)
def test_what_a_run_needs_is_compiled_before_it_begins(low):
    compiled = []

    def listen(event, _, **about):
        if event.endswith("backend_compile_duration"):
            compiled.append(str(about.get("fun_name")).removeprefix("jit(").removesuffix(")"))

    def f(x, n):
        seen = jnp.arange(7)[None] < (n + jnp.arange(7))[:, None]
        return jnp.where(seen, jnp.cosh(x @ x.T) - x[:, :1], jnp.full((7, 7), -9.0)) ** 2.5

    in_lane(low, jnp.sin, jnp.ones(3)).run()  # what every run needs, whatever the program
    jax.monitoring.register_event_duration_secs_listener(listen)
    s = in_lane(low, f, jnp.ones((7, 7)), jnp.int32(1))
    with jax.enable_x64(True):
        compile_ahead(s.program, s.lockstep, Ledger(s.formats()))
        assert len(compiled) > 3
        assert compiled.count("without_floats") == 1  # comparisons, sums: one program
        assert not {"lt", "add", "iota"} & set(compiled)
        compiled.clear()
        s.lockstep.plans.clear()
        s.run()
    jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


def test_integers_are_those_of_each_steps_batch():
    def step(x, n):
        return jnp.where(jnp.arange(4) % 3 == n * 2, x * 0.5, x)

    lane, x = Rounded(FP16), jnp.ones(4)
    program = trace(step, lane, (x, jnp.int32(0)), {}, name="audit")
    batches = [[jnp.int32(n)] for n in (0, 1, 0)]
    (low,), _ = lanes(Session(program, lane, Wide(np.dtype(np.float32)), 3, batches))
    np.testing.assert_array_equal(low, [0.25, 1, 0.5, 0.25])


def test_memory_is_given_back_now_and_then(monkeypatch):
    asked = []
    monkeypatch.setattr(_ledger, "_trim", lambda: asked.append)
    with jax.enable_x64(True):
        ledger, note = Ledger(as_row(FP16)[None]), jax.device_put(_ledger._idle(np.int32))
        for _ in range(5):
            ledger.add(0, note, _ledger.UNUSED // 2)
    assert asked == [0]  # pads that it keeps


def test_measures_are_their_definitions():
    """trouble.md section 2: one rounding of N(0, 1) has 73.7 dB in fp16, 55.6 in bf16."""
    x = jax.random.normal(jax.random.key(0), (1000,))
    for fmt, decibels in (("fp16", 73.7), ("bf16", 55.6), ("e5m2", 25.5)):
        rows = session(lambda x: x + 0.0, x, low="fp32").run().rows
        assert rows[0].introduced == 0
        s = session(lambda x: x * 1.0, x, low="fp32")
        (row,) = s.run(np.tile(as_row(fmt), (1, 1))).rows
        assert abs(row.sqnr - decibels) < 1
        assert row.introduced == pytest.approx(row.inherited)
        assert abs(row.drift) < 0.2
        assert 0.45 < row["ulps"] <= 0.5  # one rounding


def test_ones_swamp_from_2048_on_and_the_error_has_one_sign():
    """trouble.md, "Swamping, measured"."""

    def total(x):
        return jax.lax.scan(lambda c, v: (c + v, None), jnp.float32(0), x)[0]

    (row,) = session(total, jnp.ones(4096)).run().rows
    assert row["visits"] == 4096
    assert row["swamped"] == 2048
    assert row.share("swamped") == pytest.approx(2048 / 4095)  # the first addend is no addition
    assert row.drift == -1
    assert row["ulps"] == (4095 - 2048) / 2  # 2048 where it should be 4095, whose unit is 2
    assert row.looped


def test_what_is_made_here_and_what_came_in():
    def f(x):
        y = x * 1.001  # makes an error
        return y * 2.0  # hands it on

    first, second = session(f, jnp.linspace(1, 2, 100)).run().rows
    assert first.introduced > 1e-5
    assert second.introduced == 0
    assert second.inherited == pytest.approx(first.inherited)


def test_the_first_origin_of_a_nan_not_its_carriers():
    def f(x):
        y = x * x  # inf in fp16
        z = y - y  # NaN is born of infinities
        return z * 2.0 + 1.0  # carried on

    rows = session(f, jnp.full(3, 300.0)).run().rows
    assert [row["overflowed"] for row in rows] == [3, 0, 0, 0]
    assert [row["nan"] for row in rows] == [0, 0, 0, 0]  # none from finite inputs

    def g(x):
        y = x * 1e-4
        return y / (y * y) * (y * y)

    rows = session(g, jnp.full(3, 1e-3)).run().rows
    assert [r.primitive for r in rows if r["overflowed"]] == ["div"]


def test_the_iteration_and_the_branch():
    def f(x):
        def body(c, i):
            return jax.lax.cond(i < 3, lambda c: c * 1.0, lambda c: c * c, c), None

        return jax.lax.scan(body, x, jnp.arange(8))[0]

    rows = session(f, jnp.float32(8)).run().rows
    squares = [r for r in rows if r["overflowed"]]
    # turn 3: 64, turn 4: 4096, turn 5: 2^24 (the branch's own third turn)
    assert [(r.primitive, r["first"]) for r in squares] == [("mul", 2.0)]


def test_formats_by_row_change_only_their_rows():
    x = jnp.linspace(1, 2, 64)
    s = session(lambda x: (x * 1.001) * 1.001, x)
    table = s.formats()
    table[0] = as_row("fp32")
    first, second = s.run(table).rows
    assert first.introduced < 1e-7 < second.introduced


def test_a_pair_is_a_pytree():
    pair = Pair(jnp.ones(2), jnp.zeros(2), jnp.asarray(False))
    assert len(jax.tree.leaves(pair)) == 3


def test_the_low_lane_can_be_another_interpretation():
    def f(x, w):
        return jnp.max(x @ w)

    x, w = jnp.full((4, 8), 301.7), jnp.full((8, 4), 1e-3)
    for low, want in (
        (sw.recipes.fp8, sw.autoscale(f, sw.recipes.fp8)(x, w)),
        ("p=f32,c=bf16,o=f32", sw.autocast(f, "p=f32,c=bf16,o=f32")(x, w)),
    ):
        report = sw.audit(f, low, trials=0)(x, w)
        relative = abs(float(want) - float(f(x, w))) / abs(float(f(x, w)))
        assert report.error.relative == pytest.approx(relative, rel=1e-3, abs=1e-9)
        assert any(row.primitive == "dot_general" for row in report.rows)


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda f: f, id="forward"),
        pytest.param(jax.grad, id="backward", marks=pytest.mark.slow),
    ],
)
def test_a_policys_lane_is_autocast_to_the_bit(wrap):
    """Its arrays are kept flat, zeros behind them, of which nothing may come in."""

    def f(w, x):
        def turn(c, row):
            return c * 0.9 + row, jnp.exp(-c)

        y = jax.nn.softmax(x @ w) / (1.0 + jnp.abs(x @ w)).mean(axis=0, keepdims=True)
        carry, seen = jax.lax.scan(turn, y[0], y)
        return jnp.where(seen > 0.5, seen, 2.0 * y).reshape(-1)[3:].sum() + carry.max()

    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((5, 3), (7, 5)))
    lane = Autocast(Policy(compute="float16"))
    low, shadow = lanes(in_lane(lane, wrap(f), w, x))
    np.testing.assert_array_equal(low[0], sw.autocast(wrap(f), lane.policy)(w, x))
    np.testing.assert_allclose(shadow[0], wrap(f)(w, x), rtol=1e-5)


def test_a_lane_of_exponents_at_run_time():
    x, recipe = jnp.linspace(1.0, 3.0, 8) * 1e-3, sw.recipes.scalify
    want = jax.jit(sw.autoscale(jnp.tanh, recipe))(x)
    error = float(jnp.linalg.norm(want - jnp.tanh(x)) / jnp.linalg.norm(jnp.tanh(x)))
    report = sw.audit(jnp.tanh, recipe, trials=0)(x)
    assert report.error.relative == pytest.approx(error, rel=1e-2)
    assert 0 < error < 1e-3


def test_float64_shadow_and_a_training_step():
    def loss(w, x):
        return jnp.mean(jnp.square(x @ w - 1.0))

    def step(w, x):
        return w - 0.1 * jax.grad(loss)(w, x)

    rows = session(step, jnp.ones(4), jnp.ones((8, 4)), dtype=np.float64).run().rows
    assert {r.direction for r in rows} == {"forward", "backward", "optimizer"}
    assert FP16.precision == 11


MESH = """
    import jax, jax.numpy as jnp, numpy as np, scalewise as sw
    from jax.sharding import NamedSharding, PartitionSpec as P
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    w = jax.random.normal(jax.random.key(0), (8, 4))
    x = jax.device_put(300.0 * jnp.ones((4, 8)), NamedSharding(mesh, P("d")))

    def f(w, x):
        def body(w, x):
            return jax.lax.psum(jnp.max(x @ w), "d")
        return jax.shard_map(body, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())(w, x)

    report = sw.audit(f, "bf16", trials=0)(w, x)
    want = f(w, x)
    error = abs(sw.emulate(f, "bf16")(w, x) - want) / want
    np.testing.assert_allclose(report.error.relative, error, rtol=1e-3)
    dot, total = report.rows
    assert dot["elements"] == 2 * 4 and dot["visits"] == total["visits"] == 1  # of one device
    assert dot.introduced > 0 and report.outputs[0][1] == report.error
"""


@pytest.mark.slow
def test_a_mesh_of_devices():
    run_on_devices(2, MESH)
