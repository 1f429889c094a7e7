"""Attention whose masks and rotary angles leave a 16-bit format's range or precision."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.random import key, normal, split

HEADS, WIDTH = 2, 16
LOWEST = float(np.finfo(np.float16).min)


def layer_norm(x):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + 1e-3)


def heads(x, weight):
    batch, length, width = x.shape
    return (x @ weight).reshape(batch, length, HEADS, width // HEADS).swapaxes(1, 2)


def block(params, x, attend, memory=None):
    """Attention, then a feed-forward layer, each behind a norm and with a residual connection."""
    inputs = layer_norm(x)
    memory = inputs if memory is None else memory
    keys, value = (heads(memory, params[name]) for name in ("key", "value"))
    mixed = attend(heads(inputs, params["query"]), keys, value)
    x = x + mixed.swapaxes(1, 2).reshape(x.shape) @ params["out"]
    return x + jax.nn.gelu(layer_norm(x) @ params["up"]) @ params["down"]


def block_params(seed, width=WIDTH):
    shapes = dict.fromkeys(("query", "key", "value", "out"), (width, width))
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    keys = split(key(seed), len(shapes))
    return {n: normal(k, s) * s[0] ** -0.5 for k, (n, s) in zip(keys, shapes.items(), strict=True)}


def padded_encoder(params, x, lengths, fill=-1e9):
    """Averages an encoder's outputs over each sequence's own tokens; a sequence may be empty."""
    valid = jnp.arange(x.shape[1])[None, :] < lengths[:, None]

    def attend(query, keys, value):
        scores = jnp.einsum("bhqd,bhkd->bhqk", query, keys) * query.shape[-1] ** -0.5
        scores = jnp.where(valid[:, None, None, :], scores, fill)  # <- here
        return jax.nn.softmax(scores) @ value

    x = block(params, x, attend)
    share = valid.astype(x.dtype) / jnp.maximum(lengths, 1).astype(x.dtype)[:, None]
    return jnp.sum(x * share[:, :, None], axis=1)


def padded_encoder_arguments():
    return block_params(0), normal(key(1), (3, 8, WIDTH)), jnp.array([8, 5, 0])


def padded_encoder_fixed(params, x, lengths):
    return padded_encoder(params, x, lengths, fill=-1e4)


def two_masks(valid, dropped):
    padding = jnp.where(valid, 0.0, LOWEST)
    condition = jnp.where(dropped, LOWEST, 0.0)
    return padding[:, None, None, :] + condition[:, None, None, None]  # <- here


def one_mask(valid, dropped):
    seen = valid & ~dropped[:, None]
    return jnp.where(seen, 0.0, LOWEST / 2)[:, None, None, :]


def guided_decoder(params, x, text, lengths, dropped, mask=two_masks):
    """Two layers that attend to a prompt, which is dropped now and then, and may be empty."""
    bias = mask(jnp.arange(text.shape[1])[None, :] < lengths[:, None], dropped)
    conditioned = ((lengths > 0) & ~dropped).astype(x.dtype)[:, None, None, None]

    def attend(query, keys, value):
        scores = jnp.einsum("bhqd,bhkd->bhqk", query, keys) * query.shape[-1] ** -0.5
        return jax.nn.softmax(scores + bias) @ value * conditioned

    for layer in params:
        x = block(layer, x, attend, text)
    return x


def guided_decoder_arguments():
    params = [block_params(0), block_params(1)]
    x, text = normal(key(2), (2, 3, 8, WIDTH))
    return params, x, text, jnp.array([8, 5, 0]), jnp.array([False, False, True])


def guided_decoder_fixed(params, x, text, lengths, dropped):
    return guided_decoder(params, x, text, lengths, dropped, one_mask)


def rotary_angles(positions, size):
    frequencies = 10000.0 ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)  # <- here
    return positions.astype(jnp.float32)[:, None] * frequencies[None, :]  # <- here


def rotate(x, angles):
    even, odd = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles)[None, None], jnp.sin(angles)[None, None]
    return jnp.concatenate([even * cos - odd * sin, odd * cos + even * sin], axis=-1)


def rotary_decoder(params, x, start):
    """Two causal layers with rotary position embeddings, deep in a long context."""
    length = x.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    angles = rotary_angles(start + jnp.arange(length), x.shape[-1] // HEADS)

    def attend(query, keys, value):
        query, keys = rotate(query, angles), rotate(keys, angles)
        scores = jnp.einsum("bhqd,bhkd->bhqk", query, keys) * query.shape[-1] ** -0.5
        scores = jnp.where(causal[None, None], scores, -1e4)
        return jax.nn.softmax(scores) @ value

    for layer in params:
        x = block(layer, x, attend)
    return x


def rotary_decoder_arguments():
    sharp = [p | {"query": 4 * p["query"]} for p in (block_params(0), block_params(1))]
    return sharp, normal(key(2), (2, 16, WIDTH)), jnp.array(3000)
