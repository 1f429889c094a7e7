"""The models and optimizers that the training steps share, which are healthy in 16 bits.

A step with a fault passes its own function for a part: ``attend``, ``norm``, ``embed``.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from failures.programs import integers, normal

VOCABULARY, WIDTH, LENGTH, BATCH, CLASSES = 32, 16, 12, 4, 6


def attention(query, key, value):
    """Causal attention over axis 1; the query is scaled before the product."""
    scores = jnp.einsum("bqd,bkd->bqk", query * query.shape[-1] ** -0.5, key)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(causal, scores, -1e4)) @ value


def layer_norm(x):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + 1e-3)


def embedding(params, tokens):
    return params["tokens"][tokens] + params["positions"][: tokens.shape[1]]


def features(params, tokens, attend=attention, norm=layer_norm, embed=embedding):
    """A transformer of one layer, to the features below its head."""
    x = embed(params, tokens)
    query, key, value = jnp.split(norm(x) @ params["qkv"], 3, axis=-1)
    x = x + attend(query, key, value) @ params["out"]
    x = x + jax.nn.gelu(norm(x) @ params["up"]) @ params["down"]
    return norm(x)


def language_model(params, tokens, **parts: Callable):
    return features(params, tokens, **parts) @ params["head"]


def cross_entropy(logits, targets):
    logs = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(logs, targets[..., None], axis=-1))


def language_params(seed=0):
    """Returns the parameters of :func:`features`, and a head."""
    shapes = {
        "tokens": (VOCABULARY, WIDTH),
        "positions": (LENGTH, WIDTH),
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 2 * WIDTH),
        "down": (2 * WIDTH, WIDTH),
        "head": (WIDTH, VOCABULARY),
    }
    params = weights(seed, shapes)
    return params | {name: params[name] * 2.0 for name in ("tokens", "positions")}


def weights(seed, shapes):
    return {
        name: normal(*shape, seed=seed + i, scale=float(np.prod(shape[:-1])) ** -0.5)
        for i, (name, shape) in enumerate(shapes.items())
    }


def text(seed=50, batch=BATCH, length=LENGTH):
    """Returns a batch of tokens, and the tokens that follow them."""
    tokens = integers(batch, length + 1, seed=seed, high=VOCABULARY)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def convolution(x, kernel, stride=1):
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=dimensions
    )


def convolutional(params, images, head=True):
    """Two convolutions and the mean over the image; features, or the logits of a head."""
    x = jax.nn.relu(convolution(images, params["first"]) + params["shift"])
    x = jax.nn.relu(convolution(x, params["second"], stride=2))
    pooled = jnp.mean(x, axis=(1, 2))
    return pooled @ params["head"] if head else pooled


def image_params(seed=0):
    shapes = {"first": (3, 3, 3, 8), "second": (3, 3, 8, WIDTH), "head": (WIDTH, CLASSES)}
    params = weights(seed, shapes)
    return params | {"shift": normal(8, seed=seed + 9, scale=0.1), "head": params["head"] * 2.0}


def pictures(seed=50, batch=8):
    images = normal(batch, 8, 8, 3, seed=seed)
    return {"images": images, "labels": integers(batch, seed=seed + 1, high=CLASSES)}


def recurrent_cell(params, hidden, x):
    """A gated recurrent unit."""
    inputs, states = jnp.split(x @ params["inputs"], 3, -1), hidden @ params["states"]
    reset, keep, new = jnp.split(states, 3, -1)
    keep = jax.nn.sigmoid(inputs[1] + keep)
    new = jnp.tanh(inputs[2] + jax.nn.sigmoid(inputs[0] + reset) * new)
    return keep * hidden + (1.0 - keep) * new


def recurrent_params(seed=0):
    shapes = {"inputs": (4, 3 * WIDTH), "states": (WIDTH, 3 * WIDTH), "head": (WIDTH, CLASSES)}
    return weights(seed, shapes)


def sequences(seed=50, batch=8, length=10):
    return {
        "series": normal(batch, length, 4, seed=seed),
        "labels": integers(batch, seed=seed + 1, high=CLASSES),
    }


def descend(params, gradients, rate):
    """Plain gradient descent."""
    return jax.tree.map(lambda p, g: p - rate * g, params, gradients)


def with_momentum(state, gradients, rate):
    """Gradient descent with momentum; returns the new state."""
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], gradients)
    return {"params": descend(state["params"], velocity, rate), "velocity": velocity}


def zeros(params):
    return jax.tree.map(np.zeros_like, params)


def at_rest(params):
    """Returns the state of :func:`with_momentum` before the first step."""
    return {"params": params, "velocity": zeros(params)}
