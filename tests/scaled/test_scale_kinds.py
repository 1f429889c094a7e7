"""Every scaled operation on every kind of scale, jitted and not, beside float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy import special

import scalewise as sw
from arrays import normal
from cases import nightly
from scalewise import scaled
from scalewise.scaled import RULES

SHAPE = (4, 16)
AXIS = np.float32([[0.5], [-3], [0], [40]])
BLOCKS = np.float32([[1, -2], [0.25, 0], [3, 7], [-0.5, 16]])
POWERS = [[1, 2], [0.25, 8], [4, 0.5], [2.0**-6, 16]]
KINDS = {  # scale, block
    "none": (None, None),
    "zero": (0, None),
    "negative": (-2.5, None),
    "integer": (3, None),
    "int32": (np.int32(-5), None),
    "integers": (np.array([[1], [-2], [3], [0]]), None),
    "float": (0.75, None),
    "axis": (AXIS, None),
    "power": (2.0**-3, None),
    "far power": (2.0**-40, None),
    "blocks": (BLOCKS, (1, 8)),
    "e8m0 blocks": (jnp.array(POWERS, jnp.float8_e8m0fnu), (1, 8)),
}
ROWS = np.random.default_rng(3).permutation(SHAPE[0])


def exact_scale(kind):
    scale, block = KINDS[kind]
    scale = np.float64(1 if scale is None else np.asarray(scale).astype(np.float64))
    return np.repeat(scale, block[1], block[0]) if block else scale


def operand(kind, data):
    scale, block = KINDS[kind]
    with np.errstate(invalid="ignore"):  # infinity times zero
        value = data * exact_scale(kind)
    return sw.ScaledArray(jnp.asarray(data), scale, block), value


def softmax(x):
    return special.softmax(x, axis=-1)


def gelu(x):
    return x * (0.5 + 0.5 * np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def convolution(x, k):
    """SAME, one channel, as a product of shifted windows."""
    padded = np.pad(x, ((0, 0), (1, 1)))
    windows = np.stack([padded[:, i : i + x.shape[1]] for i in range(3)], -1)
    return windows @ k


def conv(a, b):
    a, b = (scaled.as_scaled(x) if not scaled.is_scaled(x) else x for x in (a, b))
    kernel = sw.ScaledArray(b.value()[:1, None, :3])
    data = sw.ScaledArray(a.value()[:, None])
    return scaled.conv(data, kernel, (1,), "SAME")


ONE = {
    "neg": (scaled.neg, np.negative),
    "abs": (scaled.abs, np.abs),
    "relu": (scaled.relu, lambda x: np.maximum(x, 0)),
    "gelu": (scaled.gelu, gelu),
    "square": (scaled.square, np.square),
    "integer_pow": (lambda a: scaled.integer_pow(a, 3), lambda x: x**3),
    "sqrt": (scaled.sqrt, np.sqrt),
    "rsqrt": (scaled.rsqrt, lambda x: 1 / np.sqrt(x)),
    "exp": (scaled.exp, np.exp),
    "log": (scaled.log, np.log),
    "tanh": (scaled.tanh, np.tanh),
    "sigmoid": (scaled.sigmoid, special.expit),
    "sin": (scaled.sin, np.sin),
    "cos": (scaled.cos, np.cos),
    "sum": (lambda a: scaled.sum(a, 1), lambda x: x.sum(1)),
    "mean": (scaled.mean, np.mean),
    "max": (lambda a: scaled.max(a, 0), lambda x: x.max(0)),
    "min": (scaled.min, np.min),
    "softmax": (scaled.softmax, softmax),
    "log_softmax": (scaled.log_softmax, lambda x: special.log_softmax(x, axis=-1)),
    "cumsum": (lambda a: scaled.cumsum(a, 1), lambda x: x.cumsum(1)),
    "erf": (scaled.erf, special.erf),
    "clip": (lambda a: scaled.clip(a, -1.0, 2.0), lambda x: np.clip(x, -1, 2)),
    "cast_data": (lambda a: scaled.cast_data(a, "fp32"), lambda x: x),
}
TWO = {
    "add": (scaled.add, np.add),
    "sub": (lambda a, b: scaled.sub(a, b), np.subtract),
    "mul": (scaled.mul, np.multiply),
    "div": (scaled.div, np.divide),
    "maximum": (scaled.maximum, np.maximum),
    "minimum": (scaled.minimum, np.minimum),
    "where": (lambda a, b: scaled.where(MASK, a, b), lambda x, y: np.where(MASK, x, y)),
    "concatenate": (lambda a, b: scaled.concatenate([a, b]), lambda x, y: np.concatenate([x, y])),
    "matmul": (lambda a, b: scaled.matmul(a, b.T), lambda x, y: x @ y.T),
    "dot_general": (
        lambda a, b: scaled.dot_general(a, b, (((1,), (1,)), ((), ()))),
        lambda x, y: x @ y.T,
    ),
    "conv": (conv, lambda x, y: convolution(x, y[0, :3])[:, None]),
}
MASK = np.asarray(normal(9, SHAPE)) > 0
PAIRS = [*zip(KINDS, [*list(KINDS)[5:], *list(KINDS)[:5]], strict=True), ("axis", "far power")]
# Scales that are no powers of two are rounded when they are multiplied, and data twice.
RTOL = 2e-6


def test_all_operations_are_here():
    assert set(ONE) | set(TWO) == set(RULES)


def check(f, reference, operands):
    """Compares all operands' results, each alone and all in one compiled program."""
    jitted = jax.jit(lambda xs: [f(*x) for x in xs])([[a for a, _ in pair] for pair in operands])
    for pair, compiled in zip(operands, jitted, strict=True):
        with np.errstate(all="ignore"):
            want = reference(*[x for _, x in pair])
            size = max([np.max(np.abs(x), initial=0, where=np.isfinite(x)) for _, x in pair])
        eager = f(*[a for a, _ in pair])
        for y in (eager, compiled):
            assert isinstance(y, sw.ScaledArray)
            scale = np.float64(y.scale)
            assert np.all(scale >= 0)
            got = np.asarray(y.data, np.float64)
            with np.errstate(invalid="ignore", over="ignore"):
                got = got * scale
            same = np.isnan(want) | np.isinf(want)
            np.testing.assert_array_equal(got[same], want[same])
            np.testing.assert_allclose(
                got[~same], want[~same], rtol=20 * RTOL, atol=RTOL * max(size, 1e-30)
            )


@pytest.mark.parametrize(
    "name", nightly(sorted(ONE), but=["clip", "cumsum", "exp", "relu", "softmax", "square"])
)
def test_one_operand(name):
    data = np.array(normal(0, SHAPE))
    check(*ONE[name], [[operand(kind, data)] for kind in KINDS])


@pytest.mark.parametrize("name", nightly(sorted(TWO), but=["add", "div", "matmul"]))
def test_two_operands(name):
    a, b = np.array(normal(0, SHAPE)), np.array(normal(1, SHAPE))
    check(*TWO[name], [[operand(k, a), operand(m, b[ROWS])] for k, m in PAIRS])


@pytest.mark.parametrize(
    "name",
    nightly(["abs", "relu", "sqrt", "log", "square", "add", "where", "mul"], but=["log", "where"]),
)
def test_special_values(name):
    data = np.array(normal(0, SHAPE))
    data[:, :5] = np.inf, -np.inf, np.nan, 0, -0.0
    if name in ONE:
        return check(*ONE[name], [[operand(kind, data)] for kind in KINDS])
    b = np.array(normal(1, SHAPE))
    return check(*TWO[name], [[operand(k, data), operand(m, b)] for k, m in PAIRS])


@pytest.mark.parametrize("kind", ["none", "negative", "power", "far power"])
@pytest.mark.parametrize("number", [0, 1e-20, *nightly([-0.0, 3, -2.5])])
def test_numbers_beside_arrays(kind, number):
    """A number never costs an array its bits: zeros beside 2^-40, and 1e-20 beside 1."""
    a, x = operand(kind, np.array(normal(0, SHAPE)))
    for name in ("maximum", "add", "mul", "where"):
        f, reference = TWO[name]
        y = np.asarray(f(a, number).value(), np.float64)
        np.testing.assert_allclose(
            y, reference(x, np.float64(number)), rtol=20 * RTOL, atol=RTOL * abs(number)
        )
    if number == 0 and kind != "none":
        y = scaled.maximum(a, number)
        np.testing.assert_array_equal(y.scale, 1 if a.scale is None else abs(a.scale))


def test_a_scale_that_is_not_finite_leaves_other_arrays_alone():
    a = sw.ScaledArray(jnp.ones(4), jnp.float32(jnp.nan))
    b = sw.ScaledArray(jnp.arange(4.0), -2.0)
    condition = jnp.array([True, False, True, False])
    np.testing.assert_array_equal(scaled.where(condition, b, a).value(), [0, np.nan, -4, np.nan])


BATCHED = [kind for kind in KINDS if kind not in ("none", "zero", "power")]
OPERATIONS = {**ONE, **TWO}


@pytest.mark.parametrize(
    ("seed", "names"),
    [(0, ["add", "concatenate", "matmul", "softmax", "sum"]),
     *nightly((seed, sorted(OPERATIONS)) for seed in range(3))],
)  # fmt: skip
def test_operations_under_vmap_and_scan_are_those_of_a_loop(seed, names):
    """Each operation on operands of some kinds, each an array of as many as it has rows."""
    random = np.random.default_rng(seed)
    kinds = {name: random.choice(BATCHED, 2) for name in names}

    def one(data):
        """Makes the operands, too: the rows of a batch have scales of their own."""
        outs = {}
        for name in names:
            f, made = OPERATIONS[name][0], []
            for x, kind in zip(data, kinds[name], strict=True):
                scale, block = KINDS[kind]
                if scale is not None:
                    scale = jnp.asarray(scale, jnp.float32) * jnp.exp2(jnp.round(x[0, 0]))
                made.append(sw.ScaledArray(x, scale, block))
            outs[name] = f(*made[: 1 if name in ONE else 2])
        return outs

    batch = tuple(normal(i, (SHAPE[0], *SHAPE)) for i in (2, 3))
    run = jax.jit(one)
    want = [run(tuple(x[i] for x in batch)) for i in range(SHAPE[0])]
    for together in (jax.jit(jax.vmap(one))(batch), jax.jit(lambda b: lax.map(one, b))(batch)):
        for name, y in together.items():
            rows = np.stack([w[name].value() for w in want])
            size = np.max(np.abs(rows), where=np.isfinite(rows), initial=0)
            np.testing.assert_allclose(y.value(), rows, 1e-5, 1e-6 * size, err_msg=name)
            np.testing.assert_array_equal(np.stack([np.asarray(row) for row in y]), y.value())


def test_integer_data_give_float_results():
    a = sw.ScaledArray(jnp.array([-3, 100], jnp.int8), 0.5)
    y = scaled.mul(a, a)
    assert y.data.dtype == jnp.float32
    assert y.value().tolist() == [2.25, 2500]
