"""Softmax, reductions and contractions on narrow types, or in one format alone, against float64."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import nightly
from scalewise import ops
from scalewise.formats import format as format_

RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 33)) * 4
DTYPES = [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2]


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


# and how many ulps (of the largest number on the way) roundings in one format can come to
ORACLES = {
    "softmax": (ops.softmax, lambda x: np.exp(log_softmax(x)), 3, lambda x, y: y),
    "log_softmax": (ops.log_softmax, log_softmax, 2, lambda x, y: y),
    "logsumexp": (
        ops.logsumexp, lambda x: np.log(np.exp(x).sum(-1)), 2,
        lambda x, y: np.maximum(np.abs(x.max(-1)), np.abs(y - x.max(-1))),
    ),
    "sum": (partial(ops.sum, axis=-1), lambda x: x.sum(-1), 1, lambda x, y: np.abs(x).sum(-1)),
    "mean": (partial(ops.mean, axis=-1), lambda x: x.mean(-1), 2, lambda x, y: np.abs(x).mean(-1)),
    "var": (partial(ops.var, axis=-1), lambda x: x.var(-1), 4, lambda x, y: y),
    "var, ddof": (
        partial(ops.var, axis=-1, ddof=1), lambda x: x.var(-1, ddof=1), 4, lambda x, y: y,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_is_float64s_rounded_once_or_its_neighbour(dtype):
    fmt = format_(dtype)
    x = fmt.decode(fmt.encode(X))
    every = jax.jit(lambda x: {name: ours(x) for name, (ours, *_) in ORACLES.items()})
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
    with pytest.raises(ValueError, match="softmax: compute, arithmetic and accumulator exclude"):
        ops.softmax(jnp.ones(2), compute=jnp.float32, arithmetic="fp16")
    with pytest.raises(ValueError, match="mean: e8m0 has no sign or no zero; expected a signed"):
        ops.mean(jnp.ones(2), arithmetic="e8m0")
    with pytest.raises(ValueError, match="fp64 has 53 significant bits; expected up to 25"):
        ops.var(jnp.ones(2), arithmetic="fp64")


# -- one format and nothing wider


@pytest.mark.parametrize("name", nightly(["fp16", "bf16", "e4m3"]))
def test_in_one_format_each_is_float64s_to_its_few_roundings_and_a_number_of_it(name):
    fmt = format_(name)
    x = fmt.decode(fmt.encode(X))
    run = jax.jit(lambda v: [f(v, arithmetic=fmt) for f, *_ in ORACLES.values()])
    for got, (which, (_, oracle, ulps, size)) in zip(
        run(jnp.asarray(x, jnp.float32)), ORACLES.items(), strict=True
    ):
        got, want = np.asarray(got, np.float64), oracle(x)
        np.testing.assert_array_equal(got, fmt.decode(fmt.encode(got)), which)
        binade = np.floor(np.log2(np.abs(size(x, want)) + 1e-300))
        ulp = np.exp2(np.maximum(binade, fmt.min_exponent)) * float(fmt.eps)
        if "var" in which:  # differences from the mean err by an ulp of the largest of them
            ulp = ulp + np.abs(x).max(-1) * float(fmt.eps) * np.sqrt(want) / 4
        assert (np.abs(got - want) <= ulps * ulp).all(), which


@pytest.mark.slow
def test_in_one_format_nothing_overflows_or_is_swamped_on_the_way():
    fp16 = partial(jnp.full, dtype=jnp.float16)
    assert float(ops.mean(fp16(1000, 65504), arithmetic="fp16")) == 65504
    assert float(ops.sum(fp16(4096, 1.0), arithmetic="fp16")) == 4096  # 2048 one after the other
    assert ops.softmax(fp16(4096, 7.0), arithmetic="fp16").tolist() == [2.0**-12] * 4096
    assert float(ops.logsumexp(fp16(4096, 0.0), arithmetic="fp16")) == float(
        jnp.float16(math.log(4096))
    )
    # 300 is beyond E4M3's largest number: as a sum it isn't
    row = ops.softmax(jnp.zeros(300), arithmetic="e4m3")
    assert row.tolist() == [2.0**-8] * 300
    x = (RNG.standard_normal(4096) + 100).astype(np.float16)
    got = float(ops.var(jnp.asarray(x), arithmetic="fp16"))  # 0 in one pass
    assert got == pytest.approx(x.astype(np.float64).var(), rel=2e-3)


@pytest.mark.slow
def test_in_one_format_what_is_defined_of_the_undefined():
    inf, nan = math.inf, math.nan
    half = lambda *x: jnp.asarray(x, jnp.float16)  # noqa: E731
    rows = half([-inf, -inf], [0, -inf], [0, nan], [1, inf])
    for f in (ops.softmax, ops.log_softmax, ops.logsumexp):
        got, want = f(rows, arithmetic="fp16"), f(rows)
        np.testing.assert_array_equal(got[:3], want[:3])
        assert bool(jnp.isposinf(got[3]) if f is ops.logsumexp else jnp.isnan(got[3]).all())
    for f in (ops.sum, ops.mean, ops.var):
        x = half([1, inf], [inf, -inf], [1, nan], [-inf, 2])
        np.testing.assert_array_equal(f(x, axis=1, arithmetic="fp16"), f(x, axis=1))
        empty = jnp.zeros((2, 0), jnp.float16)
        np.testing.assert_array_equal(f(empty, axis=1, arithmetic="fp16"), f(empty, axis=1))
    assert jnp.isnan(ops.var(half(3), ddof=1, arithmetic="fp16"))
    assert jnp.isnan(ops.softmax(jnp.asarray([0, -inf]), arithmetic="e4m3fn")).all()
    assert ops.softmax(jnp.zeros((2, 0), jnp.float16), arithmetic="fp16").shape == (2, 0)
    assert ops.logsumexp(jnp.zeros((2, 0)), arithmetic="fp16").tolist() == [-inf] * 2


@pytest.mark.slow
def test_in_one_format_axes_and_gradients_are_the_wide_ones():
    x = jnp.asarray(RNG.standard_normal((2, 3, 4)), jnp.float32)
    for f, axes in (
        (ops.softmax, [(0, 2)]),
        (ops.mean, [(1, -1)]),
    ):
        for axis in axes:
            got, want = f(x, axis=axis, arithmetic="fp32"), f(x, axis=axis)
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, rtol=1e-6)
    assert ops.sum(x, axis=1, keepdims=True, arithmetic="fp32").shape == (2, 1, 4)
    ours, plain = (
        jax.grad(lambda v, k=k: (ops.softmax(v, axis=1, **k) * x).sum())(x)
        for k in ({"arithmetic": "fp16"}, {})
    )
    np.testing.assert_allclose(ours, plain, rtol=1e-6)
