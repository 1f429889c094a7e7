"""Optimizers and their steps."""

import jax
import jax.numpy as jnp
import optax

from failures.programs import failing, normal, uniform


def squared_error(w, x, y):
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


@failing(
    "https://github.com/google-deepmind/optax/issues/1754", "fp16", "underflow nan overflow",
    "updates, state = optimizer.update(gradient, state)",
    args=lambda: (normal(4, 8), normal(4, 8, seed=1) * (jnp.arange(8) != 3)),
)  # fmt: skip
def adam_of_unused_row(w, gradient):
    """A step of which one column's gradient is exactly zero, an unused row of an embedding."""
    optimizer = optax.adam(1e-2)
    state = optimizer.init(w)
    updates, state = optimizer.update(gradient, state)
    return optax.apply_updates(w, updates)


def adam_of_unused_row_fixed(w, gradient):
    optimizer = optax.adam(1e-2, eps=1e-6)
    updates, _ = optimizer.update(gradient, optimizer.init(w))
    return optax.apply_updates(w, updates)


@failing(
    "https://github.com/keras-team/keras-hub/issues/2629", "bf16", "swamping precision",
    "return w - rate * gradient / (jnp.sqrt(square) + 1e-7)",
    args=lambda: (normal(64, scale=0.3, mean=1.0), normal(64, seed=1)), steps=60, change=True,
)  # fmt: skip
def lora_sign_step(w, gradient):
    square = gradient * gradient
    rate = 5e-4
    return w - rate * gradient / (jnp.sqrt(square) + 1e-7)


@failing(
    "https://github.com/Nerogar/OneTrainer/issues/996", "bf16", "swamping precision",
    "w = w * (1.0 - rate * decay)", "return w + update",
    args=lambda: (normal(64, scale=0.2), jnp.zeros(64)), steps=200, change=True,
)  # fmt: skip
def decoupled_decay(w, update):
    rate, decay = 1e-2, 1e-1
    w = w * (1.0 - rate * decay)
    return w + update


@failing(
    "https://github.com/facebookresearch/fairscale/pull/263", "fp16", "overflow",
    "total = sum(jnp.sum(g * g) for g in gradients.values())",
    args=lambda: ({"in": normal(16, 32, scale=400.0), "out": normal(32, 4, seed=1, scale=50.0)},),
)  # fmt: skip
def clipped_gradients(gradients):
    total = sum(jnp.sum(g * g) for g in gradients.values())
    ratio = jnp.minimum(1.0, 10.0 / jnp.sqrt(total))
    return {name: g * ratio for name, g in gradients.items()}


def clipped_gradients_fixed(gradients):
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(g)) for g in gradients.values()]))
    small = {name: g / largest for name, g in gradients.items()}
    total = sum(jnp.sum(g * g) for g in small.values())
    return {name: g * (10.0 / jnp.sqrt(total)) for name, g in small.items()}


@failing(
    "https://github.com/warner-benjamin/optimi/pull/15", "fp16", "underflow precision",
    "v = 0.9 * v + 0.1 * gradient * gradient",
    args=lambda: (normal(32), jnp.zeros(32), normal(32, seed=1, scale=1e-4)),
)  # fmt: skip
def rms_prop_of_small_gradients(w, v, gradient):
    v = 0.9 * v + 0.1 * gradient * gradient
    return 1e-2 * gradient / (jnp.sqrt(v) + 1e-5)


def rms_prop_of_small_gradients_fixed(w, v, gradient):
    scaled = gradient * 1024.0
    v = 0.9 * (v * 1024.0 * 1024.0) + 0.1 * scaled * scaled
    return 1e-2 * scaled / (jnp.sqrt(v) + 1e-5 * 1024.0)


@failing(
    "https://github.com/workofart/ml-by-hand/pull/85", "bf16", "swamping",
    "return jax.tree.map(lambda p, g: p - 6e-4 * jnp.sign(g), params, gradients)",
    args=lambda: (jnp.ones((16, 4)), normal(32, 16, seed=1), normal(32, 4, seed=2)),
    steps=100, change=True,
)  # fmt: skip
def sign_descent(params, x, y):
    gradients = jax.grad(squared_error)(params, x, y)
    return jax.tree.map(lambda p, g: p - 6e-4 * jnp.sign(g), params, gradients)


@failing(
    "https://github.com/tenstorrent/tt-metal/issues/55935", "bf16",
    "precision nan overflow cancellation",
    "correction = 1.0 - 0.999**count",
    args=lambda: (normal(32, scale=1e-2), uniform(32, seed=1, high=1e-4), jnp.float32(3.0)),
)  # fmt: skip
def corrected_moments(m, v, count):
    correction = 1.0 - 0.999**count
    return (m / (1.0 - 0.9**count)) / (jnp.sqrt(v / correction) + 1e-6)


def corrected_moments_fixed(m, v, count):
    correction = -jnp.expm1(count * -0.0010005003)
    return (m / (1.0 - 0.9**count)) / (jnp.sqrt(v / correction) + 1e-6)


@failing(
    "https://github.com/tracel-ai/burn/issues/5699", "fp16", "overflow",
    "clipped = optax.clip_by_global_norm(1.0).update(gradients",
    args=lambda: ({"w": jnp.float32([0.5, 0.25, 1.0])}, jnp.float32([10.0, -4.0, 2.0]),
                  jnp.float32(-10.0)),
)  # fmt: skip
def clipped_regression_step(params, x, y):
    gradients = jax.grad(lambda p: (jnp.dot(p["w"], x) - y) ** 2)(params)
    clipped = optax.clip_by_global_norm(1.0).update(gradients, optax.EmptyState())[0]
    return optax.apply_updates(params, jax.tree.map(lambda g: -0.5 * g, clipped))


@failing(
    "https://github.com/kyegomez/SingLoRA/issues/6", "bf16", "swamping precision",
    "return a + 0.5 * ramp * gradient",
    args=lambda: (normal(8, 16, mean=2.0, scale=0.3), normal(8, 16, seed=1), jnp.float32(2.0)),
    steps=30, change=True,
)  # fmt: skip
def ramped_adapter(a, gradient, step):
    ramp = jnp.minimum(step / 1000.0, 1.0)
    return a + 0.5 * ramp * gradient
