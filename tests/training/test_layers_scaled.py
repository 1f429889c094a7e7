"""A loss scale for each layer, for gradients that no single scale can represent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arrays import normal
from scalewise import autocast
from scalewise.training import DynamicLossScale, layer_scaled

APART = (2.0**-34, 2.0**14)  # by what the layers' gradients shrink and grow: 48 binades


def half(x):
    """Through FP16 and back: forward and, as JAX differentiates a cast, backward."""
    return x.astype(jnp.float16).astype(jnp.float32)


def layer(w, x):
    return half(half(x) * half(w))


def net(call):
    """The second layer's gradients are 2^14, the first one's 2^-20 of it."""

    def loss(scales, weights, x):
        low = call(scales[0], weights[0], x)
        high = call(scales[1], weights[1], x)
        return jnp.sum(low) * APART[0] + jnp.sum(high) * APART[1]

    return loss


def plain(scale, w, x):
    return layer(w, x)


W, X = jnp.linspace(0.5, 2.0, 8), jnp.linspace(1.0, 3.0, 8)
WEIGHTS = (W, W)


def exact():
    return [np.asarray(X, np.float64) * by for by in APART]


def train(steps):
    """The scales that both layers find; gradients of the last step that was good throughout."""
    scaling = DynamicLossScale(initial=2.0**10, interval=2, max_scale=2.0**60)
    state, good = scaling.init(2), None
    loss = net(layer_scaled(layer))

    @jax.jit
    def step(state):
        counts, gradients = jax.grad(loss, argnums=(0, 1))(state.scale, WEIGHTS, X)
        return scaling.update(state, counts == 0), counts, gradients

    for _ in range(steps):
        state, counts, gradients = step(state)
        good = good if counts.any() else gradients
    return state, good


def test_a_single_scale_overflows_or_underflows():
    for exponent in range(-24, 40):
        scale = 2.0**exponent
        loss = lambda w, s=scale: s * net(plain)((1.0, 1.0), w, X)  # noqa: E731
        low, high = (np.asarray(g) / scale for g in jax.grad(loss)(WEIGHTS))
        right = np.allclose(low, exact()[0], rtol=1e-2, atol=0) and np.allclose(
            high, exact()[1], rtol=1e-2, atol=0
        )
        assert not right


def test_each_layer_finds_its_own_scale():
    state, gradients = train(120)
    low, high = (np.log2(float(s)) for s in state.scale)
    assert low - high > 30
    assert gradients is not None
    for got, want in zip(gradients, exact(), strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=2e-3)


def test_non_finite_gradients_do_not_reach_layers_below():
    def loss(scales, weights):
        inner = layer_scaled(layer)(scales[0], weights[0], X)
        return jnp.sum(layer_scaled(layer)(scales[1], weights[1], inner))

    scales = jnp.array([1.0, 2.0**17])  # beyond FP16 in the second layer alone
    counts, gradients = jax.grad(loss, argnums=(0, 1))(scales, WEIGHTS)
    assert counts[0] == 0
    assert counts[1] > 0
    assert all(np.all(np.isfinite(np.asarray(g))) for g in gradients)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, lambda f: autocast(f, "f32")])
def test_a_power_of_two_changes_no_bit_in_float32(transform):
    def dense(w, x):
        return jnp.tanh(x @ w)

    w, x = normal(0, (4, 4)), jnp.ones((2, 4))
    scaled = lambda w: jnp.sum(layer_scaled(dense)(jnp.float32(2.0**12), w, x))  # noqa: E731
    got = jax.grad(transform(scaled))(w)
    want = jax.grad(lambda w: jnp.sum(dense(w, x)))(w)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=2e-6)


def test_invalid_arguments_are_errors():
    with pytest.raises(ValueError, match="layers is 0; expected a positive integer"):
        DynamicLossScale().init(0)
