"""Layers of Flax, NNX, Haiku and Equinox, policies and recipes."""

import dataclasses

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx

import scalewise as sw
from failures.programs import failing, integers, normal, uniform


class Normed(nn.Module):
    """A layer with its kernel divided by its norm."""

    @nn.compact
    def __call__(self, x):
        return nn.WeightNorm(nn.Dense(4, use_bias=False))(x)


def small_kernel():
    x = normal(8, 6)
    params = Normed().init(jax.random.key(0), x)
    small = jax.tree.map_with_path(
        lambda path, p: 1e-5 * p if "kernel" in str(path[-2:]) and p.ndim == 2 else p, params
    )
    return small, x


@failing(
    "https://github.com/facebookresearch/xformers/issues/96", "fp16", "underflow nan overflow",
    "return nn.WeightNorm(nn.Dense(4, use_bias=False))(x)",
    args=small_kernel, inside=(Normed.__call__,),
)  # fmt: skip
def weight_normalised(params, x):
    return Normed().apply(params, x)


@failing(
    "https://github.com/google-deepmind/dm-haiku/blob/main/haiku/_src/moving_averages.py", "bf16",
    "swamping precision", "lambda old, new: 0.999 * old + 0.001 * new, average, params",
    args=lambda: ({"w": normal(16, 8)}, {"w": normal(16, 8) + 0.3}), change=True,
    limit=0.3,
)  # fmt: skip
def slow_teacher(average, params):
    """The average of a student's weights, in the dtype of the weights."""
    return jax.tree.map(lambda old, new: 0.999 * old + 0.001 * new, average, params)


class Embedder(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(16, 64, rngs=rngs)
        self.outer = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        hidden = jax.nn.relu(self.inner(x)) ** 2
        return self.outer(hidden / 64.0)


@failing(
    "https://arxiv.org/abs/2109.08668", "fp16", "overflow nan",
    "hidden = jax.nn.relu(self.inner(x)) ** 2",
    args=lambda: (normal(8, 16, scale=300.0),), inside=(Embedder.__call__,),
    options={"dtypes": "all"},
)  # fmt: skip
def squared_relu_block(x):
    out = Embedder()(x)
    return out / jnp.max(jnp.abs(out))


def contrastive_views():
    first = normal(24, 16)
    return first, first + normal(24, 16, seed=1)


@failing(
    "https://arxiv.org/abs/2002.05709", "fp16", "overflow nan",
    "raised = jnp.exp(similarity)", "return -jnp.mean(jnp.log(jnp.diag(raised)",
    args=contrastive_views,
)  # fmt: skip
def contrastive_batch(first, second):
    first = first / jnp.sqrt(jnp.sum(first**2, axis=-1, keepdims=True))
    second = second / jnp.sqrt(jnp.sum(second**2, axis=-1, keepdims=True))
    similarity = first @ second.T / 0.05
    raised = jnp.exp(similarity)
    return -jnp.mean(jnp.log(jnp.diag(raised) / jnp.sum(raised, axis=-1)))


def contrastive_batch_fixed(first, second):
    first = first / jnp.sqrt(jnp.sum(first**2, axis=-1, keepdims=True))
    second = second / jnp.sqrt(jnp.sum(second**2, axis=-1, keepdims=True))
    similarity = first @ second.T / 0.05
    return jnp.mean(jax.nn.logsumexp(similarity, axis=-1) - jnp.diag(similarity))


def recurrent(x):
    core = hk.GRU(8)
    outs, _ = hk.dynamic_unroll(core, x, core.initial_state(None))
    return jnp.sum(outs[-1])


NETWORK = hk.without_apply_rng(hk.transform(recurrent))


def recurrent_args():
    x = normal(24, 6)
    return NETWORK.init(jax.random.key(0), x), x


@failing(
    "https://arxiv.org/abs/1710.03740", "c=f16", "underflow",
    "return jax.grad(lambda p: 1e-7 * NETWORK.apply(p, x))(params)",
    "outs, _ = hk.dynamic_unroll(core, x, core.initial_state(None))",
    args=recurrent_args, better="c=bf16", inside=(recurrent,),
)  # fmt: skip
def gated_gradients(params, x):
    return jax.grad(lambda p: 1e-7 * NETWORK.apply(p, x))(params)


def structural(image, other):
    """The structural similarity of two images with values up to 255."""
    area = image.size
    mean, mean_other = jnp.sum(image) / area, jnp.sum(other) / area
    variance = jnp.sum(image**2) / area - mean**2
    variance_other = jnp.sum(other**2) / area - mean_other**2
    covariance = jnp.sum(image * other) / area - mean * mean_other
    luminance = (2.0 * mean * mean_other + 6.5) / (mean**2 + mean_other**2 + 6.5)
    return luminance * (2.0 * covariance + 58.5) / (variance + variance_other + 58.5)


@failing(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/6383", "bf16",
    "cancellation precision",
    "variance = jnp.sum(image**2) / area - mean**2",
    "variance_other = jnp.sum(other**2) / area - mean_other**2",
    "covariance = jnp.sum(image * other) / area - mean * mean_other",
    args=lambda: (normal(16, 16, mean=200.0, scale=12.0), normal(16, 16, mean=200.0, scale=12.0)
                  + normal(16, 16, seed=1, scale=8.0)), inside=(structural,),
)  # fmt: skip
def bright_images(image, other):
    return structural(image, other)


def bright_images_fixed(image, other):
    mean, mean_other = jnp.mean(image), jnp.mean(other)
    dark, dark_other = image - mean, other - mean_other
    luminance = (2.0 * mean * mean_other + 6.5) / (mean**2 + mean_other**2 + 6.5)
    return (
        luminance
        * (2.0 * jnp.mean(dark * dark_other) + 58.5)
        / (jnp.mean(dark**2) + jnp.mean(dark_other**2) + 58.5)
    )


POLICY, STATIC = eqx.partition(eqx.nn.MLP(8, 6, 32, 2, key=jax.random.key(0)), eqx.is_array)


def policy_logits(policy, x):
    return jax.vmap(eqx.combine(policy, STATIC))(x)


@failing(
    "https://github.com/huggingface/trl/issues/454", "c=bf16", "cancellation precision",
    "new = jnp.sum(jax.nn.log_softmax(policy_logits(policy, x)) * chosen, axis=-1)",
    "ratio = jnp.exp(jnp.sum(new) - jnp.sum(old))",
    "return jax.vmap(eqx.combine(policy, STATIC))(x)",
    args=lambda: (POLICY,
                  normal(512, 8, scale=6.0), jax.nn.one_hot(integers(512, high=6), 6),
                  old_log_probabilities()),
    better="p=f32,c=f32,o=f32", inside=(policy_logits,),
)  # fmt: skip
def sequence_ratio(policy, x, chosen, old):
    """The importance ratio of a whole sequence."""
    new = jnp.sum(jax.nn.log_softmax(policy_logits(policy, x)) * chosen, axis=-1)
    ratio = jnp.exp(jnp.sum(new) - jnp.sum(old))
    return ratio


def old_log_probabilities():
    logits = policy_logits(POLICY, normal(512, 8, scale=6.0))
    chosen = jax.nn.one_hot(integers(512, high=6), 6)
    return jnp.sum(jax.nn.log_softmax(logits) * chosen, axis=-1)


@failing(
    "https://arxiv.org/abs/2309.17453", "nvfp4", "underflow precision swamping",
    "return probabilities @ values",
    args=lambda: (sink_scores(), sink_values()),
    better=dataclasses.replace(sw.recipes.nvfp4, keep={"mix": "bf16"}),
)  # fmt: skip
def attention_sink(scores, values):
    """Attention that mostly looks at a first token whose value is zero."""
    with jax.named_scope("mix"):
        probabilities = jax.nn.softmax(scores)
        return probabilities @ values


def sink_scores():
    scores = normal(16, 16, scale=0.5)
    scores[:, 0] = 7.0
    return scores


def sink_values():
    values = normal(16, 8, seed=1)
    values[0] = 0.0
    return values


@failing(
    "https://github.com/google-deepmind/optax/issues/1754", "fp16", "overflow nan",
    "total = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))",
    args=lambda: ({"w": normal(64, 64, scale=30.0), "b": normal(64, seed=1)},),
)  # fmt: skip
def clipped_by_global_norm(gradients):
    total = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / total), gradients)


def token_losses():
    return normal(40, 32, scale=8.0), integers(40, high=32), uniform(40, seed=3)


@failing(
    "https://arxiv.org/abs/1708.02002", "fp16", "underflow nan overflow cancellation",
    "probability = jnp.take_along_axis(", "return -jnp.mean(",
    args=token_losses,
)  # fmt: skip
def focal_loss(logits, labels, weight):
    probability = jnp.take_along_axis(jax.nn.softmax(logits), labels[:, None], axis=-1)[:, 0]
    return -jnp.mean(weight * (1.0 - probability) ** 2 * jnp.log(probability))


def focal_loss_fixed(logits, labels, weight):
    log_probability = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)
    log_probability = log_probability[:, 0]
    return -jnp.mean(weight * (1.0 - jnp.exp(log_probability)) ** 2 * log_probability)


@failing(
    "https://arxiv.org/abs/2104.09864", "bf16", "precision",
    "angles = positions[:, None] * frequencies", "positions = jnp.arange(512",
    args=lambda: (normal(512, 16), normal(512, 16, seed=1)),
)  # fmt: skip
def rotated_scores(query, key):
    """Scores of the last query, by rotary positions up to 511 in the format of the model."""
    frequencies = 10000.0 ** (-jnp.arange(8, dtype=query.dtype) / 8.0)
    positions = jnp.arange(512, dtype=query.dtype)
    angles = positions[:, None] * frequencies

    def rotate(x):
        first, second = x[:, :8], x[:, 8:]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    return rotate(query)[-1] @ rotate(key).T / 4.0
