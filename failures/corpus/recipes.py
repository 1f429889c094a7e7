"""Recipes of narrow products, with scales."""

import dataclasses

import jax
import jax.numpy as jnp

import scalewise as sw
from failures.programs import failing, normal, uniform


def kept(recipe, **formats):
    return dataclasses.replace(recipe, keep=formats)


def outlier_inputs(rows=16, width=32, size=4000.0):
    x = normal(rows, width)
    x[2, 7] = size
    return x


@failing(
    "https://arxiv.org/abs/2211.10438", "fp8_current", "underflow precision swamping",
    "return hidden @ params",
    args=lambda: ({"up": normal(32, 64, scale=0.2), "down": spared(64, 16, 5)},
                  normal(16, 32, seed=2)),
    better=kept(sw.recipes.fp8_current, projection="bf16"),
)  # fmt: skip
def outlier_feature(params, x):
    """A feed-forward layer of which one feature is large, and hardly read."""
    hidden = jax.nn.relu(x @ params["up"])
    hidden = hidden * jnp.where(jnp.arange(64) == 5, 3e5, 1.0)
    with jax.named_scope("projection"):
        return hidden @ params["down"]


def spared(rows, columns, row):
    w = normal(rows, columns, seed=1, scale=0.2)
    w[row] *= 1e-7
    return w


@failing(
    "https://arxiv.org/abs/2402.17762", "fp8_current", "underflow precision swamping",
    "scores = jnp.einsum(",
    args=lambda: (outlier_inputs(size=3e5), sparing_weights(), normal(16, 8, seed=2)),
    better=kept(sw.recipes.fp8_current, scores="bf16"),
)  # fmt: skip
def massive_token(x, w, values):
    """Scores of tokens, one of which has a massive feature that the weights read as zero."""
    with jax.named_scope("scores"):
        scores = jnp.einsum("bd,dk->bk", x, w)
    return jax.nn.softmax(scores) @ jnp.ones((8, 4)) + scores[:, :4] + values[:, :4]


def sparing_weights():
    w = normal(32, 8, seed=1, scale=0.3)
    w[7] = 0.0
    return w


@failing(
    "https://arxiv.org/abs/2506.20752", "mxfp8_floor", "saturation precision",
    "read = memory @ gates",
    args=lambda: (uniform(8, 32, low=0.47, high=0.499), normal(32, 16, seed=1)),
    better=kept(sw.recipes.mxfp8_floor, memory="bf16"), limit=0.05,
)  # fmt: skip
def clustered_weights(memory, gates):
    """Weights of a layer norm's kind, all just below a power of two: they become equal."""
    with jax.named_scope("memory"):
        read = memory @ gates
    return read - jnp.mean(read, axis=0, keepdims=True)


@failing(
    "https://arxiv.org/abs/2509.23202", "mxfp4_forward", "underflow precision swamping saturation",
    "return activations @ params",
    args=lambda: ({"out": spared(64, 16, 9)}, normal(16, 64)),
    better=kept(sw.recipes.mxfp4_forward, readout="bf16"), limit=0.3,
)  # fmt: skip
def fp4_outlier_channel(params, x):
    activations = x * jnp.where(jnp.arange(64) == 9, 500.0, 1.0)
    with jax.named_scope("readout"):
        return activations @ params["out"]


@failing(
    "https://github.com/NVIDIA/TransformerEngine/issues/1169",
    "fp8_current",
    "cancellation precision",
    "value = positive @ w",
    args=lambda: (10.0 + uniform(16, 64), normal(64, 8, seed=1)),
    better=kept(sw.recipes.fp8_current, critic="bf16"),
)
def offset_features(positive, w):
    """A product of features with a large mean, which is taken out of the result."""
    with jax.named_scope("critic"):
        value = positive @ w
    return value - jnp.mean(value, axis=0, keepdims=True)
