"""Attention: scores, softmax, positions."""

import jax
import jax.numpy as jnp

from failures.programs import failing, normal, uniform


def attend(scores, values):
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), values)


@failing(
    "https://github.com/ultralytics/ultralytics/pull/24990", "fp16", "overflow nan",
    '"qhd,khd->hqk", q, k',
    args=lambda: (normal(8, 2, 64, scale=60.0), normal(8, 2, 64, seed=1, scale=80.0),
                  normal(8, 2, 64, seed=2)),
)  # fmt: skip
def unscaled_scores(q, k, v):
    scores = jnp.einsum("qhd,khd->hqk", q, k)
    return attend(scores * q.shape[-1] ** -0.5, v)


def unscaled_scores_fixed(q, k, v):
    return attend(jnp.einsum("qhd,khd->hqk", q * q.shape[-1] ** -0.5, k), v)


@failing(
    "https://github.com/idiap/fast-transformers/issues/32", "fp16", "overflow nan",
    '"qhd,hd->qh", queries, summed', "/ norm[..., None]",
    args=lambda: (normal(512, 2, 16), normal(512, 2, 16, seed=1, scale=40.0),
                  normal(512, 2, 16, seed=2)),
)  # fmt: skip
def linear_attention(q, k, v):
    queries, keys = jax.nn.elu(q) + 1.0, jax.nn.elu(k) + 1.0
    summed = jnp.sum(keys, axis=0)
    norm = jnp.einsum("qhd,hd->qh", queries, summed)
    context = jnp.einsum("khd,khm->hdm", keys, v)
    return jnp.einsum("qhd,hdm->qhm", queries, context) / norm[..., None]


def linear_attention_fixed(q, k, v):
    queries, keys = jax.nn.elu(q) + 1.0, (jax.nn.elu(k) + 1.0) / 64.0
    norm = jnp.einsum("qhd,hd->qh", queries, jnp.sum(keys, axis=0))
    context = jnp.einsum("khd,khm->hdm", keys, v)
    return jnp.einsum("qhd,hdm->qhm", queries, context) / norm[..., None]


@failing(
    "https://github.com/NVIDIA/kvpress/issues/268", "fp16", "overflow nan",
    "-1e5 * mean",
    args=lambda: (normal(8, 16, scale=0.6), normal(8, 16, seed=1), normal(8, 16, seed=2)),
)  # fmt: skip
def masked_by_fake_key(q, k, v):
    """Puts a key in place of the first one that no query attends to."""
    mean = jnp.mean(q, axis=0)
    fake = -1e5 * mean / jnp.sum(mean * mean)
    scores = q @ k.at[0].set(fake).T * 0.25
    return jax.nn.softmax(jnp.where(jnp.arange(8) == 0, -jnp.abs(scores), scores)) @ v


def masked_by_fake_key_fixed(q, k, v):
    mean = jnp.mean(q, axis=0)
    fake = -1e3 * mean / jnp.sum(mean * mean)
    scores = q @ k.at[0].set(fake).T * 0.25
    return jax.nn.softmax(jnp.where(jnp.arange(8) == 0, -jnp.abs(scores), scores)) @ v


@failing(
    "https://github.com/EleutherAI/gpt-neox/issues/1003", "fp16", "precision cancellation",
    "angles = jnp.outer(positions, frequencies)", "jnp.cos(angles)", "jnp.sin(angles)",
    args=lambda: (normal(32, 16), jnp.arange(2016.0, 2048.0)),
)  # fmt: skip
def rotary_tables(x, positions):
    frequencies = 10000.0 ** (-jnp.arange(8.0) / 8.0)
    angles = jnp.outer(positions, frequencies)
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


@failing(
    "https://github.com/NVIDIA/Megatron-LM/issues/535", "bf16", "precision decision cancellation",
    "places = offset + jnp.arange(16.0)", "phases = places[:, None] * rates",
    "jnp.sin(phases), jnp.cos(phases)",
    args=lambda: (jnp.float32(1000.0), normal(16, 16)),
)  # fmt: skip
def offset_positions(offset, x):
    rates = 10000.0 ** (-jnp.arange(8.0) / 8.0)
    places = offset + jnp.arange(16.0)
    phases = places[:, None] * rates
    return x + jnp.concatenate([jnp.sin(phases), jnp.cos(phases)], axis=-1)


@failing(
    "https://github.com/RosettaCommons/foundry/pull/236", "bf16", "decision cancellation precision",
    "gaps = placed[:, None, :] - placed[None, :, :]", "placed = centre + offsets",
    args=lambda: (normal(3, scale=2500.0), normal(24, 3, scale=4.0), normal(24, 8, seed=1)),
)  # fmt: skip
def nearest_atoms_attention(centre, offsets, x):
    placed = centre + offsets
    gaps = placed[:, None, :] - placed[None, :, :]
    distances = jnp.sum(gaps**2, axis=-1)
    return jax.nn.softmax(-distances / 32.0) @ x


def nearest_atoms_attention_fixed(centre, offsets, x):
    gaps = offsets[:, None, :] - offsets[None, :, :]
    distances = jnp.sum(gaps**2, axis=-1)
    return jax.nn.softmax(-distances / 32.0) @ x


@failing(
    "https://github.com/karpathy/nanoGPT/issues/137", "bf16", "swamping precision",
    "total = total * shrink + jnp.sum(weights", "out = out * shrink[:, None]",
    args=lambda: (normal(4, 16, scale=0.2), normal(2048, 16, seed=1, scale=0.2),
                  uniform(2048, 16, seed=2)),
)  # fmt: skip
def tiled_softmax(q, k, v):
    """Goes over the keys in tiles of four, as a fused kernel does."""
    keys, values = k.reshape(-1, 4, 16), v.reshape(-1, 4, 16)

    def body(carry, tile):
        top, total, out = carry
        scores = q @ tile[0].T
        new = jnp.maximum(top, jnp.max(scores, axis=-1))
        shrink, weights = jnp.exp(top - new), jnp.exp(scores - new[:, None])
        total = total * shrink + jnp.sum(weights, axis=-1)
        out = out * shrink[:, None] + weights @ tile[1] / 512.0
        return (new, total, out), None

    start = (jnp.full(4, -1e4, q.dtype), jnp.zeros(4, q.dtype), jnp.zeros((4, 16), q.dtype))
    (_, total, out), _ = jax.lax.scan(body, start, (keys, values))
    return out / total[:, None] * 512.0


def tiled_softmax_fixed(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


@failing(
    "https://github.com/pytorch/pytorch/issues/119131", "c=f16", "overflow nan",
    "scores = queries @ jnp.swapaxes(keys",
    args=lambda: (outlier_states(), normal(32, 3 * 32, seed=1, scale=32**-0.5)),
    better="c=bf16",
)  # fmt: skip
def attention_under_autocast(x, w):
    queries, keys, values = jnp.split(x @ w, 3, axis=-1)
    scores = queries @ jnp.swapaxes(keys, -1, -2)
    return jax.nn.softmax(scores / 32**0.5, axis=-1) @ values


def outlier_states():
    x = normal(2, 12, 32)
    x[:, 3] *= 250.0
    return x
