"""Fixes as edits of the source: each is made in a copy, and the copy is run."""

import ast
import functools
import importlib.util
import io
import linecache
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

import scalewise as sw
from arrays import normal
from cases import nightly
from scalewise.auditing._report import _report, _terminal
from scalewise.auditing._report._conversions import converted, operands
from scalewise.auditing._report._edits import Edit, _imports, _replaced, edits
from scalewise.auditing._report._patterns import (
    PATTERNS,
    expressions,
    replacement,
    scaled_gradient,
)
from scalewise.auditing._search._rewrites import DIFFERENCES, HYPOTENUSES, TWO_EXPONENTIALS
from scalewise.auditing._search._rewrites import PATTERNS as REWRITES
from scalewise.auditing._thresholds import unusable

SOURCE = """import jax
import jax.numpy as jnp
import jax.numpy as np
import optax
import scalewise as sw
from flax import linen as nn

EPS = 1e-9
OPTIMIZER = optax.adam(1e-3)
NORM = nn.LayerNorm(epsilon=1e-8)


def masked(x):
    return jax.nn.softmax(jnp.where(x > 0, x, -1e9))


def named(x):
    return x / (x * x + EPS)


def adam(w):
    g = jax.tree.map(lambda w: 0.1 * w, w)
    return OPTIMIZER.update(g, OPTIMIZER.init(w), w)[0]


def layer(x):
    return NORM.apply({"params": {"scale": jnp.ones(8), "bias": jnp.zeros(8)}}, x)


def logistic(x):
    e = np.exp(x)
    return np.log(1 + e)


def root(x):
    return x / np.sqrt(np.sum(np.square(x), -1, keepdims=True))


def norm(x):
    n = np.sqrt(np.sum(x * x, -1, keepdims=True))
    return x / n


def lengths(x):
    return x / np.linalg.norm(x, 2, 1)[:, None]


def volume(x):
    return np.log(np.prod(x, -1))


def average(rows):
    def body(total, row):
        total = total + row
        return total, None

    return jax.lax.scan(body, np.zeros_like(rows[0]), rows)[0] / rows.shape[0]


def stepped(w, g):
    return jax.tree.map(lambda w, d: w - 0.1 * d, w, g), g


def applied(w, g):
    return optax.apply_updates(w, jax.tree.map(lambda d: -0.1 * d, g)), g


def optimized(w, g):
    size = np.sum(300 * w["a"] * w["a"])
    moved, state = OPTIMIZER.update(g, OPTIMIZER.init(w), w)
    return moved, size / 1024


def beside(x):
    y = x * x; z = (3 * x) * (3 * x)
    return (y + z) / (y + z + 1)


def small(w, x):
    return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)) / 2.0**14)(w)


def cubed(x):
    cube = lambda y: y * y * y
    return {"a": cube(x) / 8}, {"x": x}


def narrow(x):
    return (x.astype(np.float8_e4m3fn).astype(x.dtype)) * 2


def distance(x, y):
    return jnp.sum(x * x, -1) + jnp.sum(y * y, -1) - 2 * jnp.sum(
        x * y, -1
    )
"""
ZERO = jnp.zeros((2, 8)).at[1].set(jnp.arange(8.0))
NORMAL = normal(0, (4, 64)) + 8
W = {"a": NORMAL[0], "b": NORMAL[1]}
G = {"a": NORMAL[2] * 1e-4, "b": NORMAL[3] * 1e-4}
ROWS = jnp.arange(1.0, 17.0).reshape(2, 8) * 90
CASES = {
    "masked": ("fp16", (-jnp.ones((2, 4)),), "-32752"),
    "named": ("fp16", (jnp.arange(3.0),), "EPS = 6.1"),
    "adam": ("fp16", (jnp.arange(4.0),), "optax.adam(1e-3, eps=6.1"),
    "layer": ("fp16", (ZERO,), "nn.LayerNorm(epsilon="),
    "logistic": ("fp16", (jnp.arange(4.0) * 8,), "jax.nn.softplus(x)"),
    "root": ("fp16", (ROWS,), "sw.ops.l2_norm(x, axis=-1, keepdims=True)"),
    "norm": ("fp16", (ROWS,), "n = sw.ops.l2_norm(x, axis=-1, keepdims=True)"),
    "lengths": ("fp16", (ROWS,), "sw.ops.l2_norm(x, axis=1)[:, None]"),
    "volume": ("fp16", (ROWS,), "return np.sum(np.log(x), -1)"),
    "average": (
        "bf16",
        (jnp.ones((1000, 4)),),
        "scan(body, jnp.float32(np.zeros_like(rows[0])), rows)",
    ),
    "stepped": ("bf16", (W, G), "lambda w, d: jnp.float32(w) - 0.1 * jnp.float32(d), w, g), g"),
    "applied": ("bf16", (W, G), "else x, (w, jax.tree.map(lambda d: -0.1 * d, g))"),
    "optimized": ("fp16", (W, G), "OPTIMIZER.update(*jax.tree.map(lambda x: jnp.float32(x) if"),
    "beside": ("fp16", (NORMAL * 40,), "y = jnp.float32(x) * jnp.float32(x); z = (3 * jnp"),
    "small": ("fp16", ((NORMAL.T - 8) / 64, NORMAL - 8), "jax.grad(lambda *args: 2.0**"),
    "cubed": ("fp16", (NORMAL * 5,), "lambda y: jnp.float32(y) * jnp.float32(y) * jnp.float32(y)"),
    "narrow": ("fp16", (NORMAL * 500,), "return (x.astype(x.dtype)) * 2"),
    "distance": ("bf16", (NORMAL, NORMAL + 0.25), "jnp.float32(x) * jnp.float32(x)"),
}


def loaded(path):
    linecache.checkcache()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", nightly(CASES, but=[*CASES][:2]))
def test_an_edit_makes_the_fix(name, tmp_path):
    """The edited program has at most twice the error that the fix was measured with."""
    with jax.numpy_dtype_promotion("standard"):  # as in a user's program
        check_edit(name, tmp_path)


def check_edit(name, tmp_path):
    low, args, text = CASES[name]
    path = tmp_path / f"before_{name}.py"
    path.write_text(SOURCE)
    f = getattr(loaded(path), name)
    dtypes = "all" if name == "layer" else None  # Flax computes the norm in float32
    report = sw.audit(f, low, dtypes=dtypes)(*args)
    finding = next(x for x in report.findings if x.fix)
    found = edits(report, finding)
    assert report.edits or name in ("layer", "narrow")  # they were run
    assert text in "\n".join(line for x in found for line in x.after)
    lines = SOURCE.splitlines()
    for edit in sorted(found, key=lambda x: -x.line):
        at = slice(edit.line - 1, edit.line - 1 + len(edit.before))
        assert tuple(lines[at]) == edit.before
        lines[at] = edit.after
    after = tmp_path / f"after_{name}.py"
    after.write_text("\n".join(lines))
    g = getattr(loaded(after), name)
    dtype = jnp.float16 if low == "fp16" else jnp.bfloat16
    rounded = jax.tree.map(lambda x: x.astype(dtype), args)
    if name == "distance":  # in the program's own dtypes, compared with float64
        exact = [np.asarray(x).astype(np.float64) for x in rounded]
        want = np.sum((exact[0] - exact[1]) ** 2, -1)
        before, got = (np.asarray(h(*rounded)).astype(np.float64) for h in (f, g))
        assert np.max(np.abs(got - want) / want) < 0.02 < 0.5 < np.max(np.abs(before - want) / want)
    else:
        again = sw.audit(g, low, trials=0, dtypes=dtypes)(*args).error
        if "dtype" in text or name == "layer":
            again = min(again, sw.audit(lambda x: g(x.astype(dtype)), low, trials=0)(*args).error)
        assert again.non_finite == 0
        assert again.relative <= max(2 * finding.error_after, 2.0**-8)


def test_what_an_edited_line_reads_is_edited_if_its_gradient_overflows(tmp_path):
    """``jnp.float32(squares)`` alone would round the gradient of the squares to FP16 again."""
    path = tmp_path / "root.py"
    path.write_text(
        "import jax\nimport jax.numpy as jnp\n\n\ndef loss(x, w):\n"
        "    squares = jnp.sum(x**2, -1, keepdims=True) / x.shape[-1]\n"
        "    return jnp.sum(w * x / jnp.sqrt(squares + 1e-8)) / 8\n\n\n"
        "def slope(x, w):\n    return jax.grad(loss)(x, w) / 2048\n"
    )
    report = sw.audit(loaded(path).slope, "fp16")(normal(3, (4, 16)) * 2e-3, normal(4, (4, 16)))
    after = [x for edit in report.edits for x in edit.after]
    assert "    squares = jnp.sum(jnp.float32(x)**2, -1, keepdims=True) / x.shape[-1]" in after


def test_two_faults_that_hide_each_other_are_fixed_together(tmp_path):
    """Without the softmax its sum is infinite, and without the constant the logarithm of 0 is."""
    path = tmp_path / "entropy.py"
    path.write_text(
        "import jax\nimport jax.numpy as jnp\n\n\ndef entropy(z):\n    e = jnp.exp(z)\n"
        "    q = e / jnp.sum(e, -1, keepdims=True)\n    return jnp.log(q + 1e-9) / 16\n"
    )
    x = jnp.array([[300.0, 290.0, 100.0], [200.0, 195.0, 0.0]])
    report = sw.audit(loaded(path).entropy, "fp16")(x)
    assert report.findings[0].kind == "overflow"
    assert not report.error_fixed.non_finite
    assert "    q = jax.nn.softmax(z, axis=-1)" in [x for e in report.edits for x in e.after]


LOOPS = """
import jax, jax.numpy as jnp


def variance(rows):
    def body(sums, row):
        total, squares = sums
        total = total + row
        return (total, squares + row * row), None

    zero = jnp.zeros_like(rows[0])
    return jax.lax.scan(body, (zero, zero), rows)[0][0] / rows.shape[0]


def renamed(rows):
    start = (jnp.zeros(4), jnp.zeros(4), 0)

    def body(carry, row):
        mean, size, n = carry
        new = mean + (row - mean) * 0.001
        return (new, size + 1, n + 1), row

    (mean, size, n), _ = jax.lax.scan(body, start, rows)
    return mean / n


def counted(x):
    def body(_, carry):
        a, b = carry
        return a + b * 0.001, b

    return jax.lax.fori_loop(0, 500, body, (x, x))[0]


def until(x):
    def body(carry):
        t, i = carry
        t = t + 0.001
        return t, i + 1

    return jax.lax.while_loop(lambda carry: carry[1] < 500, body, (x, 0))[0]


def output(rows):
    def body(carry, row):
        large = jnp.sum(row * 300 * row)
        return carry + row * 0.5, jnp.sqrt(large)

    return jax.lax.scan(body, jnp.zeros(4), rows)[1]


def another(rows):
    begin = (rows[0], rows[1])
    return begin


def given(rows, begin):
    def body(carry, row):
        return carry + row * 0.001, None

    return jax.lax.scan(body, begin, rows)[0]


def computed(rows):
    def body(carry, row):
        return carry + row * 0.001, None

    return jax.lax.scan(body, rows[0] * 2, rows)[0]


def assigned(x):
    body = lambda i, c: c + 1e-3 * c
    return jax.lax.fori_loop(0, 300, body, x)


def inline(x):
    return jax.lax.fori_loop(0, 300, lambda i, c: c + 1e-3 * c, x)


def tree(rows):
    def body(carry, row):
        return {"mean": carry["mean"] + row * 0.001, "n": carry["n"] + 1}, None

    return jax.lax.scan(body, {"mean": jnp.ones(4), "n": 0}, rows)[0]["mean"]


def accumulated(rows):
    def body(total, row):
        total = jax.tree.map(jnp.add, total, {"w": 0.01 * row})
        return total, None

    return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, {"w": rows[0]}), rows)[0]
"""


def test_an_edit_that_regains_a_lost_change_is_printed(tmp_path):
    """The outputs' error hardly shows the change, and doesn't tell whether the edit helps."""
    path = tmp_path / "step.py"
    path.write_text(
        "import jax\n\n\ndef loss(p, x):\n    return ((x @ p['w']) ** 2).mean()\n\n\n"
        "def step(p, x):\n    g = jax.grad(loss)(p, x)\n"
        "    return jax.tree.map(lambda a, b: a - 1e-4 * b, p, g)\n"
    )
    step, x = loaded(path).step, normal(1, (16, 8))
    report = sw.audit(step, "bf16")({"w": normal(2, (8, 4))}, x)
    with jax.numpy_dtype_promotion("standard"):
        *_, edit = report.edits
    assert edit.after == (
        "    return jax.tree.map(lambda a, b: jnp.float32(a) - 1e-4 * jnp.float32(b), p, g)",
    )


def test_another_function_s_tuple_is_no_loop_s_beginning(tmp_path):
    path = tmp_path / "given.py"
    path.write_text(LOOPS)
    report = sw.audit(loaded(path).given, "bf16")(jnp.ones((1000, 4)), jnp.ones(4))
    found = [line for x in edits(report, report.findings[0]) for line in x.after]
    assert "    return jax.lax.scan(body, jnp.float32(begin), rows)[0]" in found


def test_modules_that_edited_lines_need_are_imported(tmp_path):
    path = tmp_path / "user.py"
    path.write_text(
        '"""A loss."""\nfrom jax import numpy as np\n\n\ndef f(x):\n'
        "    return np.sqrt(np.sum(np.square(x)))\n"
    )
    report = sw.audit(loaded(path).f, "fp16")(jnp.full(4096, 16.0))
    assert [(x.line, x.before, x.after) for x in edits(report, report.findings[0])] == [
        (2, (), ("import scalewise",)),
        (
            6,
            ("    return np.sqrt(np.sum(np.square(x)))",),
            ("    return scalewise.ops.l2_norm(x)",),
        ),
    ]


@pytest.mark.parametrize(
    ("name", "low", "size", "text"),
    [
        ("variance", "bf16", (1000, 4), "(jnp.float32(zero), zero)"),
        ("renamed", "bf16", (1000, 4), "start = (jnp.float32(jnp.zeros(4)), jnp.zeros(4), 0)"),
        ("counted", "bf16", (4,), "(jnp.float32(x), x)"),
        ("until", "bf16", (4,), "(jnp.float32(x), 0)"),
        ("output", "fp16", (9, 4), "jnp.sum(jnp.float32(row) * 300"),  # nothing that is carried
        ("computed", "bf16", (1000, 4), "scan(body, jnp.float32(rows[0] * 2), rows)"),
        ("assigned", "bf16", (4,), "fori_loop(0, 300, body, jnp.float32(x))"),
        ("inline", "bf16", (4,), "jnp.float32(c) + 1e-3 * jnp.float32(c), jnp.float32(x))"),
        ("tree", "bf16", (1000, 4), "if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x"),
        ("accumulated", "bf16", (1000, 4), 'floating) else x, {"w": 0.01 * row})'),
    ],
)
def test_loops_that_carry_several_arrays(name, low, size, text, tmp_path):
    """What the loop begins with is converted where the edited lines make it float32, and only
    there: JAX wants the type of each carry kept."""
    path = tmp_path / f"before_{name}.py"
    path.write_text(LOOPS)
    x = jnp.full(size, 9.0) if name == "output" else jnp.ones(size)
    report = sw.audit(getattr(loaded(path), name), low)(x)
    found = edits(report, report.findings[0])
    with jax.numpy_dtype_promotion("standard"):
        assert report.edits  # they were run
    assert text in "\n".join(line for x in found for line in x.after)
    lines = LOOPS.splitlines()
    for edit in sorted(found, key=lambda x: -x.line):
        lines[edit.line - 1 : edit.line - 1 + len(edit.before)] = edit.after
    after = tmp_path / f"after_{name}.py"
    after.write_text("\n".join(lines))
    with jax.numpy_dtype_promotion("standard"):  # a converted operand widens what it meets
        again = sw.audit(getattr(loaded(after), name), low, dtypes="as_written", trials=0)(x).error
    assert not again.non_finite
    assert again.relative <= max(2 * report.error_fixed.relative, 2.0**-8)


EXPRESSIONS = {
    "jnp.sqrt(sum(jnp.sum(g * g) for g in [x, 2 * x]))": "ops.l2_norm",
    "jnp.sqrt(sum([jnp.sum(g**2) for g in (x, 2 * x)]))": "ops.l2_norm",
    "1 - jnp.exp(x)": "-expm1(x)",
    "jnp.log(1.0 - jnp.exp(-x))": "log(-expm1(x))",
    "2 * jnp.log(jnp.exp(x) - 1)": "x + log(-expm1(-x))",
    "jnp.log(jnp.exp(x + 1) - jnp.exp(x))": "x + log(-expm1(y - x))",
    "3 * jnp.log(2.5 * jnp.exp(x))": "x + log(s)",
    "(1 + x / 9) ** 7.5": "exp(n * log1p(x))",
    "1 - jnp.cos(x)": "2 * sin(x / 2)**2",
    "jnp.arccos(1 - x / 9)": "2 * arcsin(sqrt(x / 2))",
    "jnp.arccosh(1 + x)": "2 * arcsinh(sqrt(x / 2))",
    "1 - jax.nn.sigmoid(x - 1)": "sigmoid(-x)",
    "3 - jnp.log(jnp.cosh(x - 1))": "logaddexp(x, -x) - log(2)",
    "jnp.log(jnp.cumsum(jnp.exp(x)))": "cumlogsumexp(x)",
    "jnp.log(jnp.linalg.det(jnp.diag(x)))": "slogdet(a)",
    "2 * jnp.log(jnp.mean(jnp.exp(x)))": "logsumexp(x) - log(n)",
    "jnp.log(jnp.mean(jnp.exp(x[:, None]), axis=1))": "logsumexp(x) - log(n)",
    "jnp.sqrt((x + 1) ** 2 - x * x)": "sqrt((x - y) * (x + y))",
    "jnp.log(jnp.prod(x))": "sum(log(x))",
    "jnp.linalg.norm(x[:, None], None, 1)": "ops.l2_norm",
    "jnp.sqrt(jnp.sum(jnp.square(x[None]), 1, keepdims=True))": "ops.l2_norm",
    "jnp.sqrt(jnp.sum(x[None] * x[None], axis=-1) + 0.1)": "ops.l2_norm",
    "3 / jnp.sqrt(jnp.mean(jnp.square(x[None]), -1, keepdims=True) + 0.1)": "ops.l2_norm",
    "x / jnp.sqrt(jnp.mean(x[None] ** 2, axis=(0, 1)))": "ops.l2_norm",
    "jnp.sqrt(0.1 + jnp.mean(x * x))": "ops.l2_norm",
    "jnp.sqrt((x**2).mean())": "ops.l2_norm",
    "jnp.sqrt((x**2).sum() / x.size + 0.1)": "ops.l2_norm",
    "jnp.sqrt(jnp.sum(x[None] ** 2, -1) / 9)": "ops.l2_norm",
    "jnp.sqrt(sum(jnp.sum(g[None] ** 2, 1) for g in [x, 2 * x]))": "ops.l2_norm",
    "optax.tree.norm([x, 2 * x])": "ops.l2_norm",
    "jnp.log(jnp.cumsum(jnp.exp(x[None]), -1))": "cumlogsumexp(x)",
    "jnp.log(jnp.cumsum(jnp.exp(x[None]), axis=1))": "cumlogsumexp(x)",
}


@pytest.mark.parametrize("expression", nightly(EXPRESSIONS, but=[*EXPRESSIONS][:2]))
def test_another_way_to_write_an_expression_has_its_value(expression):
    tree, x = ast.parse(expression, mode="eval").body, np.linspace(0.5, 2, 4, dtype=np.float32)
    names = {"jax": jax, "jnp": jnp, "optax": optax, "scalewise": sw, "x": x}
    found = {
        node: replacement(node, (EXPRESSIONS[expression],), tree) for node in expressions(tree)
    }
    ((node, text),) = [(node, text) for node, text in found.items() if text]
    edited = expression[: node.col_offset] + text + expression[node.end_col_offset :]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        np.testing.assert_allclose(eval(edited, names), eval(expression, names), rtol=2e-5)


def entropy(logits, labels):
    p = jax.nn.sigmoid(logits)
    return -jnp.mean(labels * jnp.log(p) + (1.0 - labels) * jnp.log(1.0 - p))


def gradient_norm(gradients):
    return jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))


@pytest.mark.parametrize("f", [entropy, jax.grad(entropy)])
def test_expressions_that_share_an_operation_are_one_edit(f):
    report = sw.audit(f, "bf16")(jnp.linspace(-12, 12, 50), np.float32(np.arange(50) % 2))
    (finding,) = report.findings
    assert str(finding.fix).startswith("log_sigmoid(-x) and log_sigmoid(x) in place of ")
    (edit,) = report.edits
    assert "jax.nn.log_sigmoid(logits) + " in edit.after[0]
    assert "jax.nn.log_sigmoid(-logits)" in edit.after[0]


def test_the_norm_of_a_tree_is_edited():
    report = sw.audit(gradient_norm, "fp16")({"a": jnp.full(4096, 16.0), "b": jnp.ones((3, 3))})
    (edit,) = report.edits
    assert edit.after[0].lstrip() == (
        "return sw.ops.l2_norm(jnp.stack([sw.ops.l2_norm(g) for g in jax.tree.leaves(gradients)]))"
    )


def test_a_number_is_replaced_wherever_it_stands():
    text = "    y = log(-log(x + 1e-20) + 1e-20) * 20"
    assert _replaced(text, 1e-20, 0.5) == "    y = log(-log(x + 0.5) + 0.5) * 20"
    kept = _replaced("y = maximum(x, -1e-12)", -1e-12, -1e-12, "jnp.float32({})")
    assert kept == "y = maximum(x, -jnp.float32(1e-12))"


def test_each_way_that_the_audit_finds_is_known():
    """Of those of `_rewrites.py` which have no pattern, the source can't be edited."""
    texts = [*HYPOTENUSES.values(), *TWO_EXPONENTIALS.values()]
    texts += [text for *_, text in (*REWRITES, *DIFFERENCES)]
    assert {x.partition(" in place of")[0] for x in texts} <= set(PATTERNS)


STATEMENTS = {
    "y = x * x + 1e-3": "y = jnp.float32(x) * jnp.float32(x) + 1e-3",
    "y = x.astype(w.dtype) * 2": "y = x.astype(jnp.float32) * 2",
    "y = s * jnp.arange(9, dtype=x.dtype)": "y = jnp.float32(s) * jnp.arange(9, dtype=jnp.float32)",
    "y = jnp.sum(x * x, dtype=x.dtype)": None,
    "y = x * jnp.asarray(0.1, w.dtype)": "y = jnp.float32(x) * jnp.asarray(0.1, jnp.float32)",
    "y = {'a': x, 'b': s + t}": "y = {'a': x, 'b': jnp.float32(s) + jnp.float32(t)}",
    "y = t.at[i].add(x)": "y = jnp.float32(t).at[i].add(jnp.float32(x))",
    "y = relu(self.inner(x)) ** 2": "y = relu(jnp.float32(self.inner(x))) ** 2",
    "y = x.sum() / self.mean": "y = jnp.float32(x).sum() / jnp.float32(self.mean)",
    "y = gammaln(a + b) - a": "y = gammaln(jnp.float32(a) + jnp.float32(b)) - jnp.float32(a)",
    "y = f(a + b) - a": None,  # it isn't known what f does
    "y = f(a)[0] - a": "y = jnp.float32(f(a)[0]) - jnp.float32(a)",
    "y = jax.ops.segment_sum(x * x, i, 8)": (
        "y = jax.ops.segment_sum(jnp.float32(x) * jnp.float32(x), i, 8)"
    ),
    "y = jnp.where(m, x, 0.0) / n": "y = jnp.where(m, jnp.float32(x), 0.0) / jnp.float32(n)",
    "y = jnp.sum(x * x), state": "y = jnp.sum(jnp.float32(x) * jnp.float32(x)), state",
    "y = f(x), jnp.sum(x * x)": None,  # f may return a tree
    "y = jnp.linalg.solve(a, b)": "y = jnp.linalg.solve(jnp.float32(a), jnp.float32(b))",
    "y = jnp.log(jax.scipy.stats.norm.cdf(x))": (
        "y = jnp.log(jax.scipy.stats.norm.cdf(jnp.float32(x)))"
    ),
    "y = jnp.sum(x, 1).astype(jnp.int32)": "y = jnp.sum(jnp.float32(x), 1).astype(jnp.int32)",
    "y = jnp.argmin(a - 2 * x @ w, 1)": (
        "y = jnp.argmin(jnp.float32(a) - 2 * jnp.float32(x) @ jnp.float32(w), 1)"
    ),
    "y = (a - b).argmin(0)": "y = (jnp.float32(a) - jnp.float32(b)).argmin(0)",
    "y = x * x > m": "y = jnp.float32(x) * jnp.float32(x) > jnp.float32(m)",
}
IMPORTS = """import jax
import jax.numpy as jnp
from jax.nn import relu
from jax.scipy.special import gammaln
def g(self, x, w, s, t, i, a, b, m, n, f, state, table, p):
    """


@pytest.mark.parametrize("before", STATEMENTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_statement_in_a_wider_dtype(before, dtype):
    tree, after = ast.parse(IMPORTS + before), STATEMENTS[before]
    node, names = tree.body[-1].body[0], _imports(tree)
    parts = operands(node, names, gathers=False)
    got = converted(f"    {before}", parts, node.lineno, names, dtype) if parts else None
    assert got == (after and "    " + after.replace("float32", dtype))


def test_a_loop_whose_body_names_no_parameter_is_edited(tmp_path):
    path = tmp_path / "unnamed.py"
    path.write_text(
        "import jax\nimport jax.numpy as jnp\ndef f(x):\n    def body(*both):\n"
        "        total = both[0] + both[1]\n        return total, None\n"
        "    return jax.lax.scan(body, jnp.zeros(4), x)[0]\n"
    )
    report = sw.audit(loaded(path).f, "bf16")(jnp.ones((1000, 4)))
    assert report.findings[0].kind == "swamping"
    assert "jax.lax.scan(body, jax.tree.map(lambda x: " in report.edits[1].after[0]


def test_an_array_is_converted_before_its_gradient_is_added_up():
    tree = ast.parse(IMPORTS + "y = jnp.sum(table[ids] * p['scale'])")
    parts = operands(tree.body[-1].body[0], _imports(tree), gathers=True)
    assert [ast.unparse(x) for x in parts] == ["table", "p['scale']"]


def test_an_argument_that_may_be_given_twice_is_not_added():
    """``**options`` may have it."""

    def step(w, **options):
        tx = optax.adam(1e-3, **options)
        return tx.update({"w": 0.1 * w}, tx.init({"w": w}))[0]

    with jax.numpy_dtype_promotion("standard"):
        report = sw.audit(step, "fp16")(jnp.arange(4.0))
    assert str(report.findings[0].fix).endswith("in place of 1e-08")
    assert not edits(report, report.findings[0])


def test_a_gradient_with_a_loss_scale_is_the_gradient():
    """The edit scales the loss, and divides the gradients in float32."""
    text = "jax.value_and_grad(lambda w: 8e-3 * jnp.sum(jnp.tanh(w) ** 2), argnums=0)"
    node = ast.parse(text, mode="eval").body
    edited = scaled_gradient(node, "2.0**15", text)
    assert "2.0**15 *" in edited
    with jax.numpy_dtype_promotion("standard"):
        plain, scaled = eval(text), eval(edited)
        for want, got in zip(plain(ZERO), scaled(ZERO), strict=True):
            np.testing.assert_array_equal(want, got)
        small = jnp.full(4, 1e-6, jnp.float16)
        assert not plain(small)[1].any()  # flushed
        assert (scaled(small)[1] > 1.5e-8).all()
    assert scaled_gradient(ast.parse("jnp.sum(x)", mode="eval").body, "2.0", "") is None


def test_an_edit_that_is_not_known_is_none():
    report = sw.audit(lambda x: jnp.sum(x, dtype=x.dtype), "fp16")(jnp.full(64, 6e4))
    assert all(isinstance(edits(report, x), list) for x in report.findings)


@pytest.mark.parametrize("known", [True, False])
def test_an_edit_in_a_notebook_whose_imports_are_in_another_cell(known, tmp_path, monkeypatch):
    path = tmp_path / f"cell_{known}.py"
    path.write_text("def f(x):\n    return jnp.sum(x * x, -1)\n")
    if known:  # as in a notebook
        monkeypatch.setattr(sys.modules["__main__"], "jnp", jnp, raising=False)
    cell = {"jnp": jnp}
    exec(compile(path.read_text(), path, "exec"), cell)
    report = sw.audit(cell["f"], "fp16")(NORMAL * 50)
    lines = [line for edit in edits(report, report.findings[0]) for line in edit.after]
    wide = "    return jnp.sum(jnp.float32(x) * jnp.float32(x), -1)"
    assert lines == ([wide] if known else [])


def shown(report):
    stream = io.StringIO()
    report.show(Console(file=stream, width=200))
    return stream.getvalue()


LIVE = """
import functools
import jax
import jax.numpy as jnp

EPS = 1e-8

def softmax(scores, fill=-1e9):
    scores = scores + jnp.where(jnp.arange(4) < 4, fill, 0)
    return jax.nn.softmax(scores)

@functools.partial(jax.jit, static_argnames="n")
def mean_square(x, *, n):
    return jnp.sum(x * x) / n

def divided(x):
    def by(y):
        return x / (y + EPS)
    return by(jnp.zeros_like(x))

def of_class(x):
    class Of:
        def __call__(self, x):
            return jnp.sum(x * x, -1)
    return Of()(x)
"""


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [
        ("softmax", (NORMAL[0, :4],), "fill=-32752"),
        ("mean_square", (jnp.full(4096, 16.0),), "jnp.float32(x) * jnp.float32(x)"),
        ("divided", (0 * NORMAL,), "EPS = 6.1"),
        ("of_class", (50 * NORMAL,), "jnp.float32(x) * jnp.float32(x)"),
    ],
)
def test_edits_that_are_printed_were_run(name, args, text, tmp_path):
    """Defaults, decorated functions, the module's constants, classes within functions; the
    program computes what it did afterwards."""
    path = tmp_path / f"live_{name}.py"
    path.write_text(LIVE)
    f = functools.partial(
        getattr(loaded(path), name), **({"n": 64} if name == "mean_square" else {})
    )
    before = f(*args)
    report = sw.audit(f, "fp16")(*args)
    assert text in str([edit.after for edit in report.edits])
    assert text in shown(report)
    assert jnp.array_equal(f(*args), before, equal_nan=True)
    assert linecache.getlines(str(path)) == LIVE.splitlines(keepends=True)


def test_an_edit_without_the_error_predicted_is_not_printed(monkeypatch):
    def f(x):
        return jnp.sum(x * x, -1)

    line = f.__code__.co_firstlineno + 1
    for other in ("jnp.sum(x * x, axis=-1)", "jnp.sum(x * x, -1) / 0", "x.nothing", "jnp.sum("):
        own = "        return jnp.sum(x * x, -1)"
        edit = Edit(__file__, line, (own,), (f"        return {other}",))
        for module in (_report, _terminal):
            monkeypatch.setattr(module, "edits", lambda *_, edit=edit, **__: [edit])
        report = sw.audit(f, "fp16")(50 * NORMAL)
        assert report.edits == ()
        assert _terminal.NO_EDIT in shown(report)
    monkeypatch.setattr(_report, "edits", lambda *_, **__: [Edit(__file__, line, ("gone",), ("",))])
    assert sw.audit(f, "fp16")(50 * NORMAL).edits == ()


def test_a_covered_line_is_not_latent():
    def f(x):
        e = jnp.exp(x)
        return e / jnp.sum(e)

    report = sw.audit(f, "fp16")(jnp.array([11.5, 10.5, 9.8]))
    lines = {x.line for x in report.findings}
    assert report.findings
    assert not any(f":{n}:" in text for n in lines for text in report.latent)


def test_the_limit_of_a_verdict_depends_on_the_format():
    """A tenth in formats of 8 bits of precision; in wider ones about half of the digits."""
    assert unusable(8) == pytest.approx(0.1)
    assert unusable(4) == 0.25
    assert 2.0**-12 < unusable(24) < 2.0**-11 < 2.0**-5.5 < unusable(11) < 2.0**-4
