"""Positions, angles, indices and routes that are computed in floats of few digits."""

import math

import jax
import jax.numpy as jnp
from jax.random import gumbel, key, normal, split, uniform

WIDTH = 16


def layer_norm(x):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + 1e-3)


def feed_forward(params, x):
    return x + jax.nn.gelu(layer_norm(x) @ params["up"]) @ params["down"]


def weights(seed, **shapes):
    keys = split(key(seed), len(shapes))
    return {n: normal(k, s) * s[0] ** -0.5 for k, (n, s) in zip(keys, shapes.items(), strict=True)}


def timestep_embedding(t, size):
    exponents = jnp.arange(size // 2, dtype=jnp.float32) / (size // 2)
    frequencies = jnp.exp(-math.log(10000.0) * exponents)  # <- here
    angles = t.astype(jnp.float32)[:, None] * frequencies[None, :]  # <- here
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def denoiser(params, x, t):
    """Predicts a diffusion's noise from a noisy sample and the number of its time step."""
    condition = jax.nn.silu(timestep_embedding(t, 32) @ params["time"])
    scale, shift = jnp.split(condition @ params["modulation"], 2, axis=-1)
    x = layer_norm(x) * (1.0 + scale) + shift
    return feed_forward(params, x) @ params["out"]


def denoiser_arguments():
    params = weights(
        0,
        time=(32, 32),
        modulation=(32, 2 * WIDTH),
        up=(WIDTH, 64),
        down=(64, WIDTH),
        out=(WIDTH, WIDTH),
    )
    return params, normal(key(1), (8, WIDTH)), jnp.array([11, 133, 267, 401, 555, 703, 871, 999])


def counted_positions(params, tokens, attended):
    """Embeds tokens, whose positions count the tokens before them that aren't padding."""
    position = (jnp.cumsum(attended, axis=-1) * attended).astype(jnp.int32)  # <- here
    x = params["tokens"][tokens] + params["positions"][position]
    return (feed_forward(params, x) @ params["head"])[:, -16:]


def counted_positions_arguments():
    params = weights(
        0, up=(WIDTH, 64), down=(64, WIDTH), head=(WIDTH, 8), tokens=(32, WIDTH)
    )  # fmt: skip
    params["positions"] = normal(key(1), (321, WIDTH))
    tokens = jax.random.randint(key(2), (2, 320), 0, 32)
    attended = jnp.arange(320)[None, :] >= jnp.array([[0], [7]])
    return params, tokens, attended.astype(jnp.float32)


def mixture(params, x):
    """Sends each token to two of eight experts, by logits that have a large common part."""
    logits = layer_norm(x) @ params["router"] + params["bias"][None, :]  # <- here
    best, chosen = jax.lax.top_k(logits, 2)
    gates = jax.nn.softmax(best)
    picked = jax.nn.one_hot(chosen, 8, dtype=x.dtype) * gates[:, :, None]
    inner = jax.nn.gelu(jnp.einsum("td,edh->teh", x, params["up"]))
    return jnp.einsum("teh,ehd,tke->td", inner, params["down"], picked)


def mixture_arguments():
    params = weights(0, router=(WIDTH, 8), up=(8, WIDTH, 16), down=(8, 16, WIDTH))
    params["bias"] = 100.0 + 0.5 * jnp.round(normal(key(1), (8,)))
    return params, normal(key(2), (32, WIDTH))


def quantiser(params, image):
    """Replaces each pixel by the code of its grey level, and decodes the codes."""
    mean, deviation = params["mean"], params["deviation"]
    index = jnp.floor((image - mean) / deviation * 64.0 + 256.0).astype(jnp.int32)  # <- here
    codes = params["codes"][jnp.clip(index, 0, 511)]
    hidden = jax.nn.relu(codes @ params["up"])
    return hidden @ params["down"]


def quantiser_arguments():
    params = weights(0, up=(8, 32), down=(32, 4)) | {"codes": normal(key(1), (512, 8))}
    params |= {"mean": jnp.array(0.5), "deviation": jnp.array(0.25)}
    return params, uniform(key(2), (8, 8)).astype(jnp.bfloat16).astype(jnp.float32)


def linear_biases(query, keys, value, slopes, start):
    """Attention with a bias linear in the distance (ALiBi), deep in a long context."""
    length = query.shape[1]
    positions = (start + jnp.arange(length)).astype(jnp.float32)  # <- here
    distance = positions[:, None] - positions[None, :]
    scores = jnp.einsum("hqd,hkd->hqk", query, keys) * query.shape[-1] ** -0.5
    scores = scores - slopes[:, None, None] * distance[None]
    scores = jnp.where(distance[None] >= 0, scores, -1e4)
    return jax.nn.softmax(scores) @ value


def linear_biases_arguments():
    query, keys, value = normal(key(0), (3, 4, 32, 8))
    return query, keys, value, 2.0 ** -jnp.arange(4.0), jnp.array(3000)


def sampler(params, hidden, noise):
    """Draws the next tokens at a low temperature and embeds them for the next step."""
    logits = layer_norm(hidden) @ params["head"] + params["bias"][None, :]  # <- here
    token = jnp.argmax(logits / 0.1 + noise, axis=-1)  # <- here
    return feed_forward(params, params["tokens"][token])


def sampler_arguments():
    params = weights(0, head=(WIDTH, 32), up=(WIDTH, 64), down=(64, WIDTH))
    params |= {"tokens": normal(key(1), (32, WIDTH)), "bias": jnp.full(32, 30.0)}
    params["head"] = 0.2 * params["head"]
    return params, normal(key(3), (32, WIDTH)), gumbel(key(4), (32, 32))
