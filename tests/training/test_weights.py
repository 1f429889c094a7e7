"""Narrow weights, against float32 training, exact sums, and published results."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from arrays import normal
from cases import nightly
from scalewise.training import (
    apply_updates,
    compensated,
    loss_scaled,
    master_weights,
    stochastic_rounding,
)

WAYS = {"master": master_weights, "stochastic": stochastic_rounding, "compensated": compensated}
NARROW = [jnp.float16, jnp.bfloat16]


pytestmark = pytest.mark.usefixtures("users_promotion")


def walk(optimizer, w, gradients):
    state, step = optimizer.init(w), jax.jit(optimizer.update)
    for g in gradients:
        updates, state = step(g, state, w)
        w = apply_updates(w, updates)
    return w, state


@pytest.mark.parametrize("dtype", NARROW)
def test_masters_equal_float32_training(dtype):
    """To the bit, weight decay included; the narrow weights are the masters, rounded."""
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    w = {"a": normal(0, (7, 5)), "b": jnp.ones(5)}
    gradients = [jax.tree.map(lambda x, s=s: jnp.sin(s * x).astype(dtype), w) for s in range(9)]
    wide, _ = walk(
        optimizer, w, [jax.tree.map(lambda g: g.astype(jnp.float32), g) for g in gradients]
    )
    wrapped = master_weights(optimizer)
    state, narrow = wrapped.init(w), jax.tree.map(lambda x: x.astype(dtype), w)
    step = jax.jit(wrapped.update)
    for g in gradients:
        updates, state = step(g, state, narrow)
        narrow = optax.apply_updates(narrow, updates)
    for k in w:
        np.testing.assert_allclose(state.master[k], wide[k], rtol=1e-6)
        assert narrow[k].dtype == dtype
        np.testing.assert_array_equal(
            np.asarray(narrow[k]), np.asarray(state.master[k].astype(dtype))
        )


def test_plain_narrow_weights_lose_updates_as_published():
    """torchtune #2254 (pure BF16 training stalls): BF16 loses 0.001 at 1; FP16 up to 2^-12."""
    for dtype, u in ((jnp.bfloat16, 0.001), (jnp.float16, 2.0**-12)):
        w, _ = walk(optax.sgd(1.0), jnp.ones(3, dtype), [jnp.full(3, u, dtype)] * 200)
        assert np.all(np.asarray(w) == 1)  # 200 updates, and nothing learnt


@pytest.mark.parametrize("dtype", [jnp.float16, *nightly([jnp.bfloat16])])
@pytest.mark.parametrize("way", WAYS)
def test_small_updates_are_kept(way, dtype):
    """The mean over many weights moves by the exact sum of the updates."""
    n, steps, u = 4096, 64, Fraction(1, 2**13)
    w, _ = walk(WAYS[way](optax.sgd(1.0)), jnp.ones(n, dtype), [jnp.full(n, float(u))] * steps)
    want = float(1 - steps * u)
    got = np.asarray(w, np.float64)
    # one rounding at the end; stochastic: a random walk of half-ulp steps, averaged over n
    eps = float(jnp.finfo(dtype).eps) / 2
    tolerance = eps / 2 if way != "stochastic" else 5 * eps * np.sqrt(steps / n)
    assert abs(got.mean() - want) <= tolerance
    if way == "stochastic":
        assert np.unique(got).size > 1


@pytest.mark.parametrize("scale", [2.0**-12, *nightly([2.0**6])])
@pytest.mark.parametrize("dtype", NARROW)
def test_compensation_keeps_twice_the_bits(dtype, scale):
    """Against the sum in exact arithmetic, at weights where FP16's own remainder would flush."""
    rng = np.random.default_rng(0)
    g = (scale * 2.0**-12 * rng.normal(size=(300, 50))).astype(np.float32)
    start = jnp.asarray(scale * (1 + rng.random(50)), dtype)
    w, state = walk(compensated(optax.sgd(1.0)), start, jnp.asarray(g))
    exact = np.asarray(start, np.float64) - g.astype(np.float64).sum(0)
    magnified = 2.0 ** (jnp.finfo(dtype).nmant + 1)
    both = np.asarray(w, np.float64) + np.asarray(state.lost, np.float64) / magnified
    one = float(jnp.finfo(dtype).eps) / 2
    # each step's remainder is rounded to p bits: 2^-2p of the weight, 300 times at worst
    np.testing.assert_allclose(both, exact, atol=2 * scale * 300 * one**2)
    np.testing.assert_allclose(np.asarray(w, np.float64), exact, atol=2 * scale * one * 1.01)


def test_stochastic_rounding_is_random_and_reproducible():
    w, g = jnp.ones((2, 512), jnp.bfloat16), jnp.full((2, 512), 2.0**-10)
    optimizer = stochastic_rounding(optax.sgd(1.0), seed=3)
    state = optimizer.init({"a": w, "b": w})
    both = {"a": g, "b": g}
    first, after = optimizer.update(both, state, {"a": w, "b": w})
    second, _ = optimizer.update(both, after, {"a": w, "b": w})
    again, _ = optimizer.update(both, state, {"a": w, "b": w})
    np.testing.assert_array_equal(np.asarray(first["a"]), np.asarray(again["a"]))
    assert not np.array_equal(np.asarray(first["a"]), np.asarray(second["a"]))
    assert not np.array_equal(np.asarray(first["a"]), np.asarray(first["b"]))


@pytest.mark.parametrize("way", WAYS)
def test_float32_weights_train_as_without_the_wrapper(way):
    w, g = normal(0, (33,)), [jnp.full(33, 1e-9)] * 3
    want, _ = walk(optax.adam(1e-2), w, g)
    got, _ = walk(WAYS[way](optax.adam(1e-2)), w, g)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=3e-7)


@pytest.mark.parametrize("way", WAYS)
def test_a_skipped_step_keeps_weights_and_state(way):
    optimizer = loss_scaled(WAYS[way](optax.adam(1e-2)))
    w = jnp.ones(5, jnp.float16)
    state = optimizer.init(w)
    updates, after = jax.jit(optimizer.update)(jnp.full(5, jnp.inf, jnp.float16), state, w)
    np.testing.assert_array_equal(np.asarray(apply_updates(w, updates)), np.asarray(w))
    for a, b in zip(jax.tree.leaves(after.inner), jax.tree.leaves(state.inner), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("way", WAYS)
def test_missing_params_are_an_error(way):
    optimizer = WAYS[way](optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"update\(gradients, state, params\) needs the params"):
        optimizer.update(jnp.ones(2), optimizer.init(jnp.ones(2)))
