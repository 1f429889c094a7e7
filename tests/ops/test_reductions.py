"""Softmax, reductions and contractions on narrow types, against float64 and published figures."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalewise import ops
from scalewise.formats import format as format_

RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 33)) * 4
DTYPES = [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2]


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


ORACLES = {
    "softmax": (lambda x: ops.softmax(x), lambda x: np.exp(log_softmax(x))),
    "log_softmax": (lambda x: ops.log_softmax(x), log_softmax),
    "logsumexp": (lambda x: ops.logsumexp(x), lambda x: np.log(np.exp(x).sum(-1))),
    "sum": (lambda x: ops.sum(x, axis=1), lambda x: x.sum(1)),
    "mean": (lambda x: ops.mean(x, axis=1), lambda x: x.mean(1)),
    "var": (lambda x: ops.var(x, axis=1), lambda x: x.var(1)),
    "var, ddof": (lambda x: ops.var(x, axis=1, ddof=1), lambda x: x.var(1, ddof=1)),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_is_float64s_rounded_once_or_its_neighbour(dtype):
    fmt = format_(dtype)
    x = fmt.decode(fmt.encode(X))
    every = jax.jit(lambda x: {name: ours(x) for name, (ours, _) in ORACLES.items()})
    for name, got in every(jnp.asarray(x.astype(dtype))).items():
        assert got.dtype == dtype
        want, got = ORACLES[name][1](x), np.asarray(got).astype(np.float64)
        binade = np.floor(np.log2(np.abs(want) + 1e-300))
        ulp = np.exp2(np.maximum(binade, fmt.min_exponent)) * float(fmt.eps)
        assert (np.abs(got - want) <= 0.502 * ulp + 1e-6).all(), name


def test_the_classic_failures():
    sixteens = jnp.full(4096, 16.0, jnp.float16)
    assert float(ops.mean(jnp.full(1000, 65504, jnp.float16))) == 65504
    assert float(ops.sum(jnp.ones(5000, jnp.bfloat16))) == 4992  # 5000 to 8 bits
    assert float(ops.mean(jnp.full(1 << 20, 1e-5, jnp.float16))) == float(jnp.float16(1e-5))
    assert jnp.isinf(ops.matmul(sixteens, sixteens))  # 2^20 is no number of FP16
    assert float(ops.matmul(sixteens, sixteens, out=jnp.float32)) == 2.0**20
    # N(100, 1) has variance 0 in one FP16 pass
    x = (RNG.standard_normal(4096) + 100).astype(np.float16)
    assert float(ops.var(jnp.asarray(x))) == pytest.approx(x.astype(np.float64).var(), rel=1e-3)


def test_masks():
    low = jnp.finfo(jnp.float16).min
    row = jnp.asarray([1.0, 1.0, low, -jnp.inf], jnp.float16)
    assert ops.softmax(row).tolist() == [0.5, 0.5, 0, 0]
    gone = jnp.full(4, -jnp.inf, jnp.float16)
    assert ops.softmax(gone).tolist() == [0] * 4
    assert ops.log_softmax(gone).tolist() == [-math.inf] * 4
    assert float(ops.logsumexp(gone)) == -math.inf
    assert jax.grad(lambda v: ops.softmax(v)[0].astype(jnp.float32))(gone).tolist() == [0] * 4
    assert jnp.isnan(ops.softmax(jnp.asarray([1.0, jnp.nan], jnp.float16))).all()


def test_of_nothing():
    empty = jnp.zeros((2, 0), jnp.float16)
    assert ops.sum(empty, axis=1).tolist() == [0, 0]
    assert ops.softmax(empty).shape == (2, 0)
    assert ops.logsumexp(empty).tolist() == [-math.inf] * 2
    assert ops.matmul(empty, empty.T, accumulator="fp16").tolist() == [[0, 0]] * 2


def test_cross_entropy_keeps_the_computing_type():
    logits, labels = jnp.asarray(X, jnp.bfloat16), jnp.asarray([0, 5, 32, 7, 33])
    got = ops.cross_entropy(logits, labels)
    assert got.dtype == jnp.float32
    want = -log_softmax(np.asarray(logits, np.float64))
    np.testing.assert_allclose(got[:4], want[np.arange(4), np.asarray(labels[:4])], rtol=1e-5)
    assert jnp.isnan(got[4])
    slope = jax.grad(lambda v: ops.cross_entropy(v, labels[:4]).sum())(logits[:4])
    want = np.exp(-want[:4])
    want[np.arange(4), np.asarray(labels[:4])] -= 1
    np.testing.assert_allclose(np.asarray(slope, np.float64), want, rtol=2.0**-8, atol=1e-6)


def test_sums_one_after_the_other():
    ones = jnp.ones((2, 4096), jnp.float16)
    fp16 = ops.Accumulator("fp16")
    assert fp16 == ops.Accumulator(format_("fp16"))
    assert ops.sum(ones, axis=1, accumulator=fp16).tolist() == [2048, 2048]
    chunked = ops.Accumulator(format_("fp16"), chunk=1024)
    assert ops.sum(ones, axis=-1, keepdims=True, accumulator=chunked).tolist() == [[4096], [4096]]
    bf16 = ops.Accumulator(format_("bf16"))
    assert float(ops.sum(jnp.ones(1000, jnp.bfloat16), accumulator=bf16)) == 256


def test_fp16_accumulation_is_numpys_halves():
    """Exact products added in halves: NumPy's sum of float64s cut to float16 at each step."""
    a, b = (RNG.standard_normal(s).astype(np.float16) for s in ((3, 50), (50, 4)))
    want = np.zeros((3, 4), np.float16)
    for k in range(50):
        exact = want.astype(np.float64) + np.outer(*(v.astype(np.float64) for v in (a[:, k], b[k])))
        want = exact.astype(np.float16)
    got = ops.matmul(jnp.asarray(a), jnp.asarray(b), accumulator="fp16")
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_shapes_are_matmuls_and_gradients_the_exact_ones():
    shapes = [
        ((3,), (3,)),
        ((2, 3), (3,)),
        ((3,), (3, 4)),
        ((5, 1, 2, 3), (6, 3, 4)),
        ((3,), (5, 3, 4)),
    ]
    for a, b in shapes:
        x, y = (jnp.asarray(RNG.standard_normal(s), jnp.float32) for s in (a, b))
        for accumulator in (None, "fp32"):
            got = ops.matmul(x, y, accumulator=accumulator)
            np.testing.assert_allclose(got, jnp.matmul(x, y), rtol=1e-5, atol=1e-6)
    x, y = (jnp.asarray(RNG.standard_normal(s), jnp.float32) for s in ((2, 3), (3, 4)))
    ours, plain = (
        jax.grad(lambda a, b, f=f: jnp.sum(jnp.sin(f(a, b))), (0, 1))(x, y)
        for f in (lambda a, b: ops.matmul(a, b, accumulator="fp32"), jnp.matmul)
    )
    np.testing.assert_allclose(ours[0], plain[0], rtol=1e-4)
    np.testing.assert_allclose(ours[1], plain[1], rtol=1e-4)


def test_invalid_arguments_are_rejected():
    half, single = jnp.ones(3, jnp.float16), jnp.ones(3)
    with pytest.raises(TypeError, match="one dtype, not float16 and float32"):
        ops.matmul(half, single)
    with pytest.raises(ValueError, match=r"shapes \(3,\) and \(2,\) don't match"):
        ops.matmul(half, half[:2])
    with pytest.raises(ValueError, match="Accumulator: chunk is 0"):
        ops.Accumulator("fp16", chunk=0)
    with pytest.raises(ValueError, match="rounding is 'nearest'; expected"):
        ops.Accumulator("fp16", rounding="nearest")
    with pytest.raises(ValueError, match="no key"):
        ops.Accumulator("fp16", rounding="stochastic")
    with pytest.raises(ValueError, match="Accumulator: fp64 is refused"):
        ops.Accumulator(format_("fp64"))
    with pytest.raises(TypeError, match="softmax takes real floating-point arrays, not int32"):
        ops.softmax(jnp.arange(3))
    with pytest.raises(ValueError, match=r"labels have shape \(2,\); expected \(5,\)"):
        ops.cross_entropy(jnp.asarray(X), jnp.zeros(2, jnp.int32))
