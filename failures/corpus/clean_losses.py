"""Healthy losses, samplers and steps after public examples, whose intermediate values are traps."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from failures.programs import clean, integers, normal, uniform

POLICY = "p=f32,c=bf16,o=f32"


@clean("https://github.com/google-deepmind/rlax", "fp16",
       lambda: (normal(16, 8, scale=300.0), normal(16, 8, seed=1, scale=300.0)),
)  # fmt: skip
def quantile_huber(predicted, target):
    """The square that overflows isn't chosen."""
    away = target - predicted
    size = jnp.abs(away)
    huber = jnp.where(size <= 1.0, 0.5 * away**2, size - 0.5)
    return jnp.mean(jnp.where(away < 0.0, 0.25, 0.75) * huber)


@clean("https://github.com/google-deepmind/rlax", "bf16",
       lambda: (normal(64, scale=0.3), uniform(64, seed=1, low=0.0, high=0.125),
                normal(64, seed=2)),
)  # fmt: skip
def clipped_policy_loss(log_ratio, entropy, advantage):
    ratio = jnp.exp(log_ratio)
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.75, 1.25) * advantage)
    return -jnp.mean(surrogate) - 0.01 * jnp.mean(entropy)


@clean("https://docs.jax.dev/en/latest/notebooks/neural_network_with_tfds_data.html", "fp16",
       lambda: (normal(24, 10, scale=4.0), integers(24, high=10)),
)  # fmt: skip
def smoothed_cross_entropy(logits, labels):
    wanted = optax.smooth_labels(jax.nn.one_hot(labels, 10, dtype=logits.dtype), 0.1)
    return jnp.mean(optax.softmax_cross_entropy(logits, wanted))


@clean("https://arxiv.org/abs/2108.12409", "fp16",
       lambda: (normal(2, 24, 8), normal(2, 24, 8, seed=1), normal(2, 24, 8, seed=2)),
)  # fmt: skip
def causal_alibi(query, key, value):
    """Masked by the smallest float16, with biases by relative positions."""
    away = jnp.arange(24) - jnp.arange(24)[:, None]
    slopes = jnp.asarray([0.5, 0.0625], query.dtype)[:, None, None]
    scores = jnp.einsum("hqd,hkd->hqk", query, key) / 2.8 + slopes * away.astype(query.dtype)
    scores = jnp.where(away <= 0, scores, -65504.0)
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores), value)


@clean("https://arxiv.org/abs/2104.09864", "bf16", lambda: (normal(16, 16), normal(16, 16, seed=1)))
def rotary_attention(query, key):
    angles = jnp.arange(16.0)[:, None] * 100.0 ** (-jnp.arange(8.0) / 8.0)

    def rotate(x):
        first, second = x[:, :8], x[:, 8:]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    return jax.nn.softmax(rotate(query) @ rotate(key).T / 4.0)


@clean("https://github.com/openai/CLIP", "fp16",
       lambda: (normal(12, 32), normal(12, 32, seed=1)),
)  # fmt: skip
def contrastive_loss(image, text):
    image = image / jnp.linalg.norm(image, axis=-1, keepdims=True)
    text = text / jnp.linalg.norm(text, axis=-1, keepdims=True)
    logits = 10.0 * image @ text.T
    labels = jnp.arange(12)
    both = [optax.softmax_cross_entropy_with_integer_labels(x, labels) for x in (logits, logits.T)]
    return 0.5 * jnp.mean(both[0] + both[1])


@clean("https://arxiv.org/abs/2006.11239", "bf16",
       lambda: ({"in": normal(16, 32, scale=0.2), "out": normal(32, 16, seed=1, scale=0.2)},
                normal(24, 16, seed=2), normal(24, 16, seed=3), uniform(24, 1, low=0.1, high=0.9)),
)  # fmt: skip
def denoising_loss_gradient(params, images, noise, kept):
    def loss(params):
        noisy = jnp.sqrt(kept) * images + jnp.sqrt(1.0 - kept) * noise
        predicted = jax.nn.silu(noisy @ params["in"]) @ params["out"]
        return jnp.mean((predicted - noise) ** 2)

    return jax.grad(loss)(params)


@clean("https://arxiv.org/abs/1805.08913", "fp16", lambda: (normal(20, 6, scale=2.0),))
def viterbi_scores(emissions):
    """Sums of logarithms stay within range; the best path is followed."""

    def body(best, emitted):
        best = emitted + jnp.max(
            best[:, None] - 0.25 * jnp.abs(jnp.arange(6) - jnp.arange(6)[:, None]), axis=0
        )
        return best - jnp.max(best), None

    return jnp.exp(jax.lax.scan(body, emissions[0], emissions[1:])[0])


@clean("https://arxiv.org/abs/1706.02515", "fp16", lambda: (uniform(64), uniform(64, seed=1)))
def soft_dice(predicted, mask):
    both = jnp.sum(predicted * mask)
    return 1.0 - (2.0 * both + 1.0) / (jnp.sum(predicted) + jnp.sum(mask) + 1.0)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(16, rngs=rngs)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


GRAPH, STATE = nnx.split(Block(nnx.Rngs(0)))


@clean("https://flax.readthedocs.io/en/latest/nnx_basics.html", POLICY,
       lambda: (STATE, normal(12, 16), normal(12, 16, seed=1)),
)  # fmt: skip
def nnx_block_step(state, x, y):
    def loss(state):
        return jnp.mean((nnx.merge(GRAPH, state)(x) - y) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.relu(nn.GroupNorm(num_groups=2)(nn.Conv(8, (3, 3), use_bias=False)(x)))
        hidden = nn.GroupNorm(num_groups=2)(nn.Conv(8, (3, 3), use_bias=False)(hidden))
        return nn.relu(x + hidden)


def residual_args():
    x = normal(2, 8, 8, 8)
    return Residual().init(jax.random.key(0), x), x


@clean("https://github.com/google/flax/tree/main/examples/imagenet", "bf16", residual_args)
def linen_residual_block(params, x):
    return jnp.mean(Residual().apply(params, x), axis=(1, 2))


@clean("https://github.com/google-deepmind/optax", "p=f32,c=f16,o=f32",
       lambda: ({"w": normal(8, 4, scale=0.3)}, normal(32, 8, seed=1), normal(32, 4, seed=2)),
)  # fmt: skip
def clipped_momentum_step(params, x, y):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    gradients = jax.grad(lambda p: jnp.mean((x @ p["w"] - y) ** 2))(params)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    return optax.apply_updates(params, updates)


@clean("https://docs.kidger.site/equinox/examples/", "bf16",
       lambda: (eqx.filter(eqx.nn.LSTMCell(4, 8, key=jax.random.key(0)), eqx.is_array),
                normal(12, 4), normal(8, seed=1)),
)  # fmt: skip
def equinox_lstm(params, xs, readout):
    static = eqx.filter(eqx.nn.LSTMCell(4, 8, key=jax.random.key(0)), eqx.is_array, inverse=True)
    cell = eqx.combine(params, static)
    zeros = jnp.zeros(8, xs.dtype)
    state, _ = jax.lax.scan(lambda s, x: (cell(x, s), None), (zeros, zeros), xs)
    return jax.nn.sigmoid(state[0] @ readout)


@clean("https://num.pyro.ai/en/stable/examples/baseball.html", "fp16",
       lambda: (uniform(18, low=0.2, high=0.4), uniform(18, seed=1, low=0.2, high=0.4)),
)  # fmt: skip
def batting_averages(rate, prior):
    hits, misses = 12.0, 33.0
    fit = hits * jnp.log(rate) + misses * jnp.log1p(-rate)
    return jnp.mean(fit + 2.0 * jnp.log(prior) + 4.0 * jnp.log1p(-prior))


@clean("https://keras.io/examples/vision/semantic_image_clustering/", "fp8_current",
       lambda: ({"in": normal(32, 32, scale=0.2), "out": normal(32, 8, seed=1, scale=0.2)},
                normal(48, 32, seed=2)),
)  # fmt: skip
def fp8_classifier(params, x):
    hidden = jax.nn.gelu(x @ params["in"])
    return jax.nn.log_softmax(hidden @ params["out"])
