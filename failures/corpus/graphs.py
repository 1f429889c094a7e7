"""Graph networks and segments."""

import jax
import jax.numpy as jnp

from failures.programs import failing, integers, normal, uniform


def edges(count, nodes, seed=0):
    return integers(count, seed=seed, high=nodes), integers(count, seed=seed + 1, high=nodes)


@failing(
    "https://github.com/pyg-team/pytorch_geometric/issues/53", "fp16", "overflow nan",
    "weights = jnp.exp(scores)", "total = jax.ops.segment_sum(", "weights / total[segments]",
    args=lambda: (normal(40, scale=8.0), normal(40, 4, seed=1), jnp.sort(integers(40, high=6))),
)  # fmt: skip
def edge_softmax(scores, values, segments):
    weights = jnp.exp(scores)
    total = jax.ops.segment_sum(weights, segments, 6)
    return jax.ops.segment_sum(values * (weights / total[segments])[:, None], segments, 6)


def edge_softmax_fixed(scores, values, segments):
    top = jax.ops.segment_max(scores, segments, 6)
    weights = jnp.exp(scores - top[segments])
    total = jax.ops.segment_sum(weights, segments, 6)
    return jax.ops.segment_sum(values * (weights / total[segments])[:, None], segments, 6)


@failing(
    "https://github.com/JuliaGraphs/GraphNeuralNetworks.jl/issues/246", "fp16", "overflow nan",
    "powers = jnp.exp(attention)", "at[receivers].add(powers)", "at[receivers].add(powers[:, None]",
    "return mixed / (total",
    args=lambda: (normal(8, 6), normal(6, scale=6.0, seed=1), *edges(24, 8)),
)  # fmt: skip
def graph_attention(x, a, senders, receivers):
    attention = jax.nn.leaky_relu((x[senders] + x[receivers]) @ a, 0.2)
    powers = jnp.exp(attention)
    total = jnp.zeros(8, x.dtype).at[receivers].add(powers)
    mixed = jnp.zeros_like(x).at[receivers].add(powers[:, None] * x[senders])
    return mixed / (total[:, None] + 1e-3)


@failing(
    "https://github.com/rusty1s/pytorch_scatter/issues/269", "bf16", "swamping",
    "summed = summed + jnp.where(",
    args=lambda: (uniform(2000, 4), integers(2000, high=2)),
)  # fmt: skip
def scatter_mean(source, index):
    """Adds rows to two bins one at a time, as atomic additions do."""

    def body(summed, one):
        row, place = one
        summed = summed + jnp.where(jnp.arange(2)[:, None] == place, row[None, :], 0.0)
        return summed, None

    summed, _ = jax.lax.scan(body, jnp.zeros((2, 4), source.dtype), (source, index))
    return summed / 1000.0


def scatter_mean_fixed(source, index):
    member = (index[:, None] == jnp.arange(2)).astype(source.dtype)
    return (member.T / 1000.0) @ source


@failing(
    "https://github.com/dmlc/dgl/issues/809", "fp16", "underflow overflow nan",
    "jax.lax.rsqrt(degree + 1e-9)",
    args=lambda: (normal(8, 6), jnp.float32(isolated_adjacency())),
)  # fmt: skip
def symmetric_norm(x, adjacency):
    degree = jnp.sum(adjacency, axis=1)
    inverse = jax.lax.rsqrt(degree + 1e-9)
    inverse = jnp.where(degree > 0.0, inverse, inverse * 1e-4)
    return inverse[:, None] * (adjacency @ x) + inverse[:, None]


def symmetric_norm_fixed(x, adjacency):
    degree = jnp.sum(adjacency, axis=1)
    inverse = jnp.where(degree > 0.0, jax.lax.rsqrt(jnp.maximum(degree, 1.0)), 3.1622777)
    return inverse[:, None] * (adjacency @ x) + inverse[:, None]


def isolated_adjacency():
    adjacency = uniform(8, 8) > 0.6
    adjacency[3] = False
    return adjacency


@failing(
    "https://github.com/facebookresearch/SparseConvNet/issues/133", "fp16", "overflow",
    "pooled = jax.ops.segment_sum(squares, segments, 4)", "squares = jnp.square(features)",
    args=lambda: (normal(120, 8, scale=90.0), jnp.sort(integers(120, high=4))),
)  # fmt: skip
def segment_norms(features, segments):
    squares = jnp.square(features)
    pooled = jax.ops.segment_sum(squares, segments, 4)
    return jnp.sqrt(pooled)


def segment_norms_fixed(features, segments):
    squares = jnp.square(features / 128.0)
    return 128.0 * jnp.sqrt(jax.ops.segment_sum(squares, segments, 4))
