"""Softmax, sums and moments where there is one format and nothing wider, against float64."""

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
X = RNG.standard_normal((6, 35)) * 3


def logs(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


# how many ulps (of the largest number on the way) the roundings on the way can come to
ORACLES = {
    "softmax": (ops.softmax, lambda x: np.exp(logs(x)), 3, lambda x, y: y),
    "log_softmax": (ops.log_softmax, logs, 2, lambda x, y: y),
    "logsumexp": (
        ops.logsumexp, lambda x: np.log(np.exp(x).sum(-1)), 2,
        lambda x, y: np.maximum(np.abs(x.max(-1)), np.abs(y - x.max(-1)))
    ),
    "sum": (partial(ops.sum, axis=-1), lambda x: x.sum(-1), 1, lambda x, y: np.abs(x).sum(-1)),
    "mean": (partial(ops.mean, axis=-1), lambda x: x.mean(-1), 2, lambda x, y: np.abs(x).mean(-1)),
    "var": (partial(ops.var, axis=-1), lambda x: x.var(-1), 4, lambda x, y: y),
    "var, ddof": (
        partial(ops.var, axis=-1, ddof=1), lambda x: x.var(-1, ddof=1), 4, lambda x, y: y
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", nightly(["fp16", "bf16", "e4m3"]))
def test_each_is_float64s_to_its_few_roundings_and_a_number_of_the_format(name):
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
def test_nothing_overflows_or_is_swamped_on_the_way():
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
def test_what_is_defined_of_the_undefined():
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
def test_axes_and_gradients_are_the_wide_ones():
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


def test_invalid_arguments_are_rejected():
    with pytest.raises(ValueError, match="softmax: compute, arithmetic and accumulator exclude"):
        ops.softmax(jnp.ones(2), compute=jnp.float32, arithmetic="fp16")
    with pytest.raises(ValueError, match="mean: e8m0 has no sign or no zero; expected a signed"):
        ops.mean(jnp.ones(2), arithmetic="e8m0")
    with pytest.raises(ValueError, match="fp64 has 53 significant bits; expected up to 25"):
        ops.var(jnp.ones(2), arithmetic="fp64")
