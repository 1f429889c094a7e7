"""Healthy programs after JAX's own tutorials."""

import jax
import jax.numpy as jnp

from failures.programs import clean, integers, normal, uniform

TUTORIALS = "https://docs.jax.dev/en/latest/"


@clean(TUTORIALS + "quickstart.html", "fp16", lambda: (normal(32),))
def selu_activation(x):
    return 1.05 * jnp.where(x > 0, x, 1.67 * jnp.exp(x) - 1.67)


@clean(TUTORIALS + "automatic-differentiation.html", "bf16",
       lambda: (normal(3), normal(8, 3, seed=1), jnp.float32(integers(8, high=2))))  # fmt: skip
def logistic_loss(w, x, targets):
    logits = x @ w
    return -jnp.mean(jax.nn.log_sigmoid(jnp.where(targets > 0, logits, -logits)))


@clean(
    TUTORIALS + "automatic-vectorization.html", "bf16", lambda: (uniform(4, 16), uniform(3, seed=1))
)
def batched_convolution(x, w):
    return jax.vmap(lambda row: jnp.convolve(row, w, mode="valid"))(x)


@clean(TUTORIALS + "notebooks/neural_network_with_tfds_data.html", "p=f32,c=bf16,o=f32",
       lambda: ([normal(12, 8, scale=0.3), normal(8, 5, seed=1, scale=0.4)], normal(6, 12, seed=2),
                integers(6, high=5)))  # fmt: skip
def tutorial_network_update(params, x, labels):
    def loss(params):
        logits = jax.nn.relu(x @ params[0]) @ params[1]
        return -jnp.mean(jnp.sum(jax.nn.one_hot(labels, 5) * jax.nn.log_softmax(logits), axis=-1))

    return [p - 0.125 * g for p, g in zip(params, jax.grad(loss)(params), strict=True)]
