"""Gradients of complex parameters: scaled, checked, clipped, averaged and added like real ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from scalewise import training

pytestmark = pytest.mark.usefixtures("users_promotion")

PARAMS = {"z": jnp.array([1 + 1j, 2 - 3j]), "x": jnp.array([0.5, -2.0])}


def loss(p):
    return jnp.sum(jnp.abs(p["z"]) ** 2) + jnp.sum(p["x"] ** 2) * jnp.abs(p["z"][0])


def scaled_gradient(state):
    scale = training.loss_scale_of(state)
    return jax.grad(lambda p: training.scale_loss(loss(p), scale))(PARAMS)


def equal(got, want, rtol=1e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_scaled_loss_updates_like_an_unscaled_one(clip):
    first = optax.identity() if clip is None else optax.clip_by_global_norm(clip)
    plain = optax.chain(first, optax.sgd(1.0))
    want, _ = plain.update(jax.grad(loss)(PARAMS), plain.init(PARAMS))
    optimizer = training.loss_scaled(optax.sgd(1.0), training.StaticLossScale(1024.0), clip=clip)
    state = optimizer.init(PARAMS)
    got, _ = jax.jit(optimizer.update)(scaled_gradient(state), state)
    equal(got, want)


@pytest.mark.parametrize("bad", [complex(np.nan, 0), complex(0, np.inf)])
@pytest.mark.parametrize("transform", [jax.jit])
def test_a_non_finite_part_leaves_the_step_out(bad, transform):
    optimizer = training.loss_scaled(optax.adam(1.0), training.DynamicLossScale(initial=8.0))
    state = optimizer.init(PARAMS)
    gradient = scaled_gradient(state)
    assert bool(training.all_finite(gradient))
    gradient["z"] = gradient["z"].at[1].set(bad)
    assert not bool(training.all_finite(gradient))
    updates, after = transform(optimizer.update)(gradient, state, PARAMS)
    assert not any(jnp.any(u) for u in jax.tree.leaves(updates))
    got, want = (jax.tree.leaves(x)[4:] for x in (after, state))  # without the loss scale's
    equal(got, want)
    assert float(training.loss_scale_of(after).scale) == 4


def test_the_largest_complex_number_is_finite():
    big = jnp.finfo(jnp.float32).max
    assert bool(training.all_finite(jnp.full(3, big + 1j * big, jnp.complex64)))


@pytest.mark.parametrize("fmt", [None, "fp16", "e5m2"])
def test_the_mean_over_devices(fmt):
    x = jnp.array([[1 + 1j, 8.0], [3 - 3j, 4j]], jnp.complex64)
    got = jax.vmap(lambda x: training.mean_over(x, "d", fmt), axis_name="d")(x)
    equal(got, jnp.array([[2 - 1j, 4 + 2j]] * 2, jnp.complex64))


@pytest.mark.parametrize(
    "wrapper", [training.master_weights, training.stochastic_rounding, training.compensated]
)
def test_wrappers_of_narrow_weights_pass_complex_ones(wrapper):
    want = optax.apply_updates(PARAMS, jax.tree.map(lambda g: -g, jax.grad(loss)(PARAMS)))
    optimizer = wrapper(optax.sgd(1.0))
    updates, _ = optimizer.update(jax.grad(loss)(PARAMS), optimizer.init(PARAMS), PARAMS)
    equal(training.apply_updates(PARAMS, updates), want)
