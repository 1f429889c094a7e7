"""Recurrences and long sums."""

import jax
import jax.numpy as jnp

from failures.programs import failing, normal, uniform


@failing(
    "https://github.com/numpy/numpy/issues/24443", "fp16", "swamping",
    "total = total + x", args=lambda: (uniform(6000),),
)  # fmt: skip
def running_totals(xs):
    def body(total, x):
        total = total + x
        return total, total

    return jax.lax.scan(body, jnp.zeros((), xs.dtype), xs)[1]


def running_totals_fixed(xs):
    blocks = xs.reshape(-1, 50)
    sums = jnp.sum(blocks, axis=-1)
    starts = jnp.concatenate([jnp.zeros(1, xs.dtype), jnp.cumsum(sums)[:-1]])
    return (starts[:, None] + jnp.cumsum(blocks, axis=-1)).reshape(-1)


@failing(
    "https://github.com/pytorch/pytorch/issues/180155", "bf16", "precision swamping",
    "product = product * factor", "factor = 1.0 - gap",
    args=lambda: (0.001 * jnp.abs(normal(1000)),),
)  # fmt: skip
def running_product(gaps):
    def body(product, gap):
        factor = 1.0 - gap
        product = product * factor
        return product, product

    return jax.lax.scan(body, jnp.ones((), gaps.dtype), gaps)[1]


@failing(
    "https://github.com/state-spaces/mamba/issues/6", "bf16", "precision swamping",
    "state = decay * state + b * x", "decay = 1.0 - rate",
    args=lambda: (jnp.full(8, 0.0015), uniform(1500, 8, low=0.5, high=1.5), jnp.full(8, 0.25)),
)  # fmt: skip
def slow_states(rate, xs, b):
    decay = 1.0 - rate

    def body(state, x):
        state = decay * state + b * x
        return state, None

    return jax.lax.scan(body, jnp.zeros_like(decay), xs)[0]


@failing(
    "https://github.com/dmlc/dgl/issues/4674", "fp16", "swamping",
    "summed = summed.at[target].add(features[source])",
    args=lambda: (uniform(64, 8, low=0.3, high=1.0), jnp.arange(6000) % 64),
)  # fmt: skip
def messages_one_by_one(features, sources):
    """Adds the features of 6000 neighbours to one node, edge by edge."""

    def body(summed, source):
        target = 0
        summed = summed.at[target].add(features[source])
        return summed, None

    zero = jnp.zeros((1, features.shape[-1]), features.dtype)
    return jax.lax.scan(body, zero, sources)[0]


@failing(
    "https://github.com/pyg-team/pytorch_geometric/issues/1400", "fp16", "overflow",
    "hidden = hidden @ w + hidden",
    args=lambda: (normal(8, 16), normal(16, 16, seed=1, scale=0.6)),
)  # fmt: skip
def deep_recurrence(x, w):
    def body(hidden, _):
        hidden = hidden @ w + hidden
        return hidden, None

    hidden, _ = jax.lax.scan(body, x, None, length=12)
    return jax.nn.softmax(hidden[:, :4] / jnp.max(jnp.abs(hidden), axis=-1, keepdims=True))


@failing(
    "https://github.com/PrimeIntellect-ai/prime-rl/pull/568", "bf16", "swamping",
    "norm = norm + jnp.exp(score)",
    args=lambda: (normal(1024, 4, scale=0.3), normal(1024, 4, seed=1)),
)  # fmt: skip
def weighted_average_loop(scores, values):
    def body(carry, inputs):
        norm, total = carry
        score, value = inputs
        norm = norm + jnp.exp(score)
        total = total + jnp.exp(score) * value
        return (norm, total), None

    zero = jnp.zeros(scores.shape[-1], scores.dtype)
    (norm, total), _ = jax.lax.scan(body, (zero, zero), (scores, values))
    return jnp.stack([jnp.log(norm), total / 64.0])
