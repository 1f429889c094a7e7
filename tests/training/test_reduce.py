"""Gradients averaged in narrow formats, and two processes that train like one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from arrays import normal
from cases import nightly
from scalewise import formats
from scalewise.training import mean_over, step


def over(x, fmt=None):
    return jax.vmap(lambda x: mean_over(x, "data", fmt), axis_name="data")(x)


SHAPES = [(), (1,), (7,), (5, 3), (64, 8)]


@pytest.mark.parametrize("fmt", ["e5m2", *nightly(["fp16", "bf16", "e4m3fn"])])
def test_the_mean_is_right_to_two_roundings_and_the_same_on_all(fmt):
    rng = np.random.default_rng(0)
    given = [rng.normal(size=(4, *s)) * 2.0 ** rng.integers(-6, 7) for s in SHAPES]
    means = jax.jit(lambda x: over(x, fmt))([jnp.asarray(x, jnp.float32) for x in given])
    eps = 2.0 ** -(formats.format(fmt).mantissa_bits + 1)
    for x, got in zip(given, means, strict=True):
        got = np.asarray(got, np.float64)
        assert got.shape == x.shape
        assert all(np.array_equal(row, got[0]) for row in got)
        size = np.abs(x).mean(axis=0)  # cancellation doesn't make an error larger
        tiny = np.abs(x).max() * 2.0**-15
        assert np.all(np.abs(got[0] - x.mean(axis=0)) <= 2.1 * eps * size + tiny)


def test_devices_with_different_magnitudes_share_one_scale():
    """Behind scales of their own, codes could not be summed; behind one, the small one is lost."""
    x = jnp.stack([jnp.full(4, 2.0**20), jnp.full(4, 2.0**-20)])
    np.testing.assert_allclose(np.asarray(over(x, "fp16")), 2.0**19, rtol=1e-6)
    x = jnp.stack([jnp.full(4, 3.0e30), jnp.full(4, -1.0e30)])  # far beyond the format
    np.testing.assert_allclose(np.asarray(over(x, "e5m2")), 1e30, rtol=0.2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("fmt", [None, "e4m3fn", *nightly(["fp16", "e5m2"])])
def test_overflow_on_one_device_is_seen_by_all(fmt, bad):
    x = jnp.ones((2, 6)).at[1, 4].set(bad)
    got = np.asarray(over({"g": x, "n": jnp.arange(2)}, fmt)["g"])
    assert not np.isfinite(got[0, 4])
    assert not np.isfinite(got[1, 4])


def test_without_a_format_it_is_pmean():
    x = normal(0, (4, 9)).astype(jnp.float16)
    want = x.astype(jnp.float32).mean(axis=0)
    np.testing.assert_allclose(np.asarray(over(x)[2]), np.asarray(want), rtol=1e-6)


def test_invalid_arguments_are_errors():
    with pytest.raises(ValueError, match="mean_over: fp32 isn't stored in one or two bytes"):
        over(jnp.ones((2, 2)), "fp32")
    with pytest.raises(ValueError, match="step: comm_format needs axis_name"):
        step(lambda p, b: p, optax.sgd(1.0), comm_format="fp16")
