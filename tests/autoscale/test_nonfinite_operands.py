"""NaN and infinities: they stay, and change nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from arrays import normal
from cases import nightly

W = normal(0, (32, 32)) / 6
X = normal(1, (6, 32))
RECIPES = ("fp16", "bf16", "fp8", "fp8_delayed", "mxfp8", "mxfp4_forward", "unit_scaling")


def rows(x, w):
    """A layer whose rows depend on their own inputs alone, and a loss for each."""
    hidden = jax.nn.gelu(x @ w)
    return hidden, jnp.mean(jnp.square(hidden @ w), axis=1)


def step(x, w):
    def total(x):
        hidden, losses = rows(x, w)
        return jnp.sum(losses), (hidden, losses)

    gradient, outs = jax.grad(total, has_aux=True)(x)
    return *outs, gradient


@pytest.mark.parametrize("recipe", nightly(RECIPES, but=["mxfp8"]))
def test_a_row_that_is_not_finite_leaves_the_others_as_they_are(recipe):
    run = jax.jit(sw.autoscale(step, recipe))
    for number in (np.nan, np.inf, -np.inf):
        tainted, clean = X.at[2, 5].set(number), X.at[2, 5].set(0)
        wanted = step(tainted, W)
        for got, same, want in zip(run(tainted, W), run(clean, W), wanted, strict=True):
            others = np.delete(np.arange(len(X)), 2)
            np.testing.assert_array_equal(np.asarray(got)[others], np.asarray(same)[others])
            bad = ~np.isfinite(np.asarray(want)[2])
            assert not np.isfinite(np.asarray(got)[2])[bad].any(), number
    assert np.isfinite(np.asarray(run(X, W)[1])).all()


@pytest.mark.parametrize("recipe", nightly(RECIPES, but=["mxfp8"]))
def test_a_weight_that_is_not_finite_is_seen_in_the_loss(recipe):
    run = jax.jit(sw.autoscale(step, recipe))
    for number in (np.nan, np.inf):
        assert not np.isfinite(np.asarray(run(X, W.at[3, 4].set(number))[1])).any()


@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed"])
def test_an_infinite_gradient_leaves_the_others_as_they_are(recipe):
    def scaled(x, w, factors):
        return jax.grad(lambda x: jnp.sum(rows(x, w)[1] * factors))(x)

    run = jax.jit(sw.autoscale(scaled, recipe))
    got = run(X, W, jnp.ones(6).at[2].set(np.inf))
    same = run(X, W, jnp.ones(6).at[2].set(0))
    np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(same, 2, 0))
    assert not np.isfinite(got[2]).any()
