"""Random draws under ``emulate``: float32's, rounded once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from cases import nightly

KEY = jax.random.key(0)
SAMPLERS = ("normal", "uniform", "gumbel", "exponential", "logistic", "laplace")


@pytest.mark.parametrize("fmt", ["fp16", *nightly(["e4m3fn"])])
def test_a_draw_is_float32s_rounded_once(fmt):
    def draws(key):
        return [getattr(jax.random, name)(key, (1 << 14,)) for name in SAMPLERS]

    emulated = jax.jit(sw.emulate(draws, fmt))(KEY)
    for name, got, wide in zip(SAMPLERS, emulated, draws(KEY), strict=True):
        want = sw.round_to(wide, fmt)
        assert np.isfinite(got).all(), name
        # float32's own functions err by a few ulps, which seldom decides a rounding
        assert np.mean(np.asarray(got) != np.asarray(want)) < 2e-3, name


def test_a_draw_is_rounded_where_it_meets_an_argument():
    def noisy(x):
        return x + 0.125 * jax.random.normal(KEY, x.shape)

    x = jnp.zeros(512)
    want = sw.round_to(0.125 * jax.random.normal(KEY, x.shape), "fp16")
    got = sw.emulate(noisy, "fp16")(x)
    np.testing.assert_allclose(got, want, rtol=2**-10)
    np.testing.assert_array_equal(got, sw.round_to(got, "fp16"))


def test_constants_are_rounded_step_by_step_elsewhere():
    def f(x):
        return x * (jnp.float32(1) + jnp.float32(2**-12)) + jnp.arange(4.0)

    got = sw.emulate(f, "fp16")(jnp.ones(4))
    np.testing.assert_array_equal(got, np.arange(4.0) + 1)
