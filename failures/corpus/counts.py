"""Sums at indices: counts, segments, gradients of tables."""

import jax
import jax.numpy as jnp

from failures.programs import failing, normal


def skewed(n, size):
    """Indices of which half are 3."""
    return jnp.where(jnp.arange(n) % 2 == 0, 3, jnp.arange(n) * 7 % size)


@failing(
    "https://github.com/jax-ml/jax/issues/18440", "fp16", "swamping",
    "counts = jnp.zeros(8).at[bins].add(weights)",
    args=lambda: (jnp.abs(normal(40000)) % 1.0, jnp.ones(40000)),
)  # fmt: skip
def weighted_histogram(values, weights):
    bins = (values * 8).astype(jnp.int32)
    counts = jnp.zeros(8).at[bins].add(weights)
    return counts / jnp.sum(counts)


@failing(
    "https://github.com/apache/mxnet/issues/17703", "fp16", "swamping",
    "return jnp.sum(table[ids] * scale)",
    args=lambda: (normal(8, 2), jnp.arange(40000) % 8, jnp.float32(0.01)),
)  # fmt: skip
def table_gradient(table, ids, scale):
    def total(table):
        return jnp.sum(table[ids] * scale)

    return jax.grad(total)(table)


@failing(
    "https://github.com/tenstorrent/tt-metal/pull/53386", "bf16", "swamping",
    "hidden = table[tokens]",
    args=lambda: (normal(35, 16), normal(16, 35, scale=0.2), skewed(2048, 35)),
)  # fmt: skip
def character_model(table, head, tokens):
    def loss(table):
        hidden = table[tokens]
        logits = jax.nn.log_softmax(hidden @ head)
        return -jnp.sum(jnp.take_along_axis(logits, tokens[:, None], 1))

    return jax.grad(loss)(table)


@failing(
    "https://github.com/jax-ml/jax/issues/39949", "bf16", "swamping",
    "totals = jax.ops.segment_sum(messages, receivers, 5)",
    args=lambda: (jnp.exp(normal(4000, 3)), jnp.arange(4000) % 5),
)  # fmt: skip
def mean_of_neighbours(messages, receivers):
    totals = jax.ops.segment_sum(messages, receivers, 5)
    return totals / 800.0


@failing(
    "https://github.com/microsoft/onnxruntime/pull/32025", "bf16", "swamping",
    "degree = jnp.zeros(39).at[receivers].add(1.0)",
    args=lambda: (normal(39, 4), skewed(3000, 39)),
)  # fmt: skip
def normalised_by_degree(x, receivers):
    degree = jnp.zeros(39).at[receivers].add(1.0)
    scale = jax.lax.rsqrt(degree)
    return x * scale[:, None]
