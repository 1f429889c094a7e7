"""Programs with modules of Flax, Equinox and Optax."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from failures.programs import failing, normal, uniform


class Attention(eqx.Module):
    query: jax.Array
    key: jax.Array

    def __call__(self, x):
        scores = (x @ self.query) @ (x @ self.key).T
        return jax.nn.softmax(scores / 64.0) @ x


@failing(
    "https://github.com/pytorch/pytorch/issues/60939", "fp16", "overflow nan",
    "scores = (x @ self.query) @ (x @ self.key).T",
    args=lambda: (Attention(normal(16, 64, scale=3.0), normal(16, 64, seed=1, scale=3.0)),
                  normal(8, 16, seed=2, scale=8.0)),
    inside=(Attention.__call__,),
)  # fmt: skip
def equinox_attention(model, x):
    return model(x)


@failing(
    "https://github.com/keras-team/keras/issues/11860",
    "fp16",
    "underflow nan overflow",
    "updates, state = optimizer.update(gradients, state)",
    args=lambda: (
        {"w": normal(8, 4)},
        normal(16, 8, seed=1) * (jnp.arange(8) > 2),
        normal(16, 4, seed=2),
    ),
)
def adam_on_dead_inputs(params, x, y):
    """A step of Adam on a layer of which some inputs are always zero."""
    optimizer = optax.adam(1e-2)
    state = optimizer.init(params)
    gradients = jax.grad(lambda p: jnp.mean((x @ p["w"] - y) ** 2))(params)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(params, updates)


def adam_on_dead_inputs_fixed(params, x, y):
    optimizer = optax.adam(1e-2, eps=1e-6)
    gradients = jax.grad(lambda p: jnp.mean((x @ p["w"] - y) ** 2))(params)
    updates, _ = optimizer.update(gradients, optimizer.init(params))
    return optax.apply_updates(params, updates)


@failing(
    "https://github.com/tensorflow/tensorflow/issues/8535", "bf16", "cancellation",
    "y = nn.LayerNorm()(x)",
    args=lambda: ({"params": {"LayerNorm_0": {"scale": uniform(64), "bias": normal(64)}}},
                  normal(8, 64, mean=16.0, scale=0.5)),
)  # fmt: skip
def flax_norm_of_offset(params, x):
    """Flax's LayerNorm computes E[x^2] - E[x]^2 by default."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm()(x)
            return y

    return Model().apply(params, x)


def flax_norm_of_offset_fixed(params, x):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.LayerNorm(use_fast_variance=False)(x)

    return Model().apply(params, x)


@failing(
    "https://github.com/karpathy/llm.c/pull/772", "bf16", "swamping precision",
    "params = optax.apply_updates(params, updates)",
    args=lambda: ({"w": 1.0 + uniform(16, 4)}, normal(32, 16, seed=1), normal(32, 4, seed=2)),
    steps=40, change=True,
)  # fmt: skip
def plain_descent(params, x, y):
    gradients = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p["w"] - y)))(params)
    updates = jax.tree.map(lambda g: -3e-3 * jnp.sign(g), gradients)
    params = optax.apply_updates(params, updates)
    return params
