"""Masks and literals that a format can't hold."""

import jax
import jax.numpy as jnp

from failures.programs import failing, normal, uniform


@failing(
    "https://github.com/ahrefs/ocannl/issues/548", "fp16", "overflow nan",
    "scores - 1e9 * (1.0 - allowed)",
    args=lambda: (normal(2, 6, 6), jnp.tril(jnp.ones((6, 6))), normal(2, 6, 8, seed=1)),
)  # fmt: skip
def causal_sentinel(scores, allowed, values):
    masked = scores - 1e9 * (1.0 - allowed)
    return jax.nn.softmax(masked, axis=-1) @ values


def causal_sentinel_fixed(scores, allowed, values):
    masked = scores - 1e4 * (1.0 - allowed)
    return jax.nn.softmax(masked, axis=-1) @ values


@failing(
    "https://github.com/pyg-team/pytorch_geometric/issues/646",
    "fp16",
    "overflow nan",
    "filled = jnp.where(present, features, -1e9)",
    "shifted = filled - jnp.max(",
    args=lambda: (
        normal(4, 6, 8),
        jnp.arange(6)[None, :, None] < jnp.array([6, 3, 1, 0])[:, None, None],
    ),
)
def masked_neighbours(features, present):
    """Weighs neighbours by a softmax; a node without any weighs all alike."""
    filled = jnp.where(present, features, -1e9)
    shifted = filled - jnp.max(filled, axis=1, keepdims=True)
    weights = jnp.exp(shifted)
    return jnp.sum(weights * features, axis=1) / jnp.sum(weights, axis=1)


@failing(
    "https://github.com/openvinotoolkit/openvino/pull/8676", "fp16", "underflow nan overflow",
    "counts + 1e-9)",
    args=lambda: (normal(5, 8, 4), jnp.arange(8) < jnp.array([[8], [3], [1], [0], [5]])),
)  # fmt: skip
def masked_mean(x, mask):
    weights = mask.astype(x.dtype)
    counts = jnp.sum(weights, axis=1, keepdims=True)
    return jnp.sum(x * weights[..., None], axis=1) / (counts + 1e-9)


def masked_mean_fixed(x, mask):
    weights = mask.astype(x.dtype)
    counts = jnp.sum(weights, axis=1, keepdims=True)
    return jnp.sum(x * weights[..., None], axis=1) / jnp.maximum(counts, 1.0)


@failing(
    "https://github.com/sgl-project/sglang/pull/31017", "fp16", "underflow nan overflow",
    "total = jnp.sum(top, axis=-1, keepdims=True) + 1e-20",
    args=lambda: (jnp.concatenate([normal(3, 8), jnp.full((1, 8), -4.0)]),),
)  # fmt: skip
def renormalised_experts(logits):
    top, _ = jax.lax.top_k(jax.nn.relu(logits), 2)
    total = jnp.sum(top, axis=-1, keepdims=True) + 1e-20
    return top / total


def renormalised_experts_fixed(logits):
    top, _ = jax.lax.top_k(jax.nn.relu(logits), 2)
    return top / (jnp.sum(top, axis=-1, keepdims=True) + 1e-6)


@failing(
    "https://github.com/pyg-team/pytorch_geometric/pull/2106", "fp16", "underflow nan overflow",
    "jnp.log(probabilities + 1e-15)",
    args=lambda: (jnp.concatenate([uniform(4, 6), jnp.zeros((4, 2))], axis=-1),),
)  # fmt: skip
def link_entropy(weights):
    probabilities = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return -jnp.sum(probabilities * jnp.log(probabilities + 1e-15), axis=-1)


def link_entropy_fixed(weights):
    probabilities = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return -jnp.sum(jax.scipy.special.xlogy(probabilities, probabilities), axis=-1)


@failing(
    "https://github.com/tensorflow/tensor2tensor/pull/1424", "fp16", "underflow precision",
    "rate = 1.0 - 1e-4 * jnp.exp(-age)",
    args=lambda: (uniform(16, high=3.0), normal(16)),
)  # fmt: skip
def ageing_weights(age, x):
    rate = 1.0 - 1e-4 * jnp.exp(-age)
    return x * jnp.log(rate) * 1e4
