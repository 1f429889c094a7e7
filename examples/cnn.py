"""A small convolutional network on scikit-learn's handwritten digits, in plain JAX and optax.

This file doesn't deal with low precision. It defines what `scalewise compare` and train.py
read from any file: init, loss_of, OPTIMIZER, train_step and batches (see gpt.py). Its data are
the 1,797 digits that come with scikit-learn; `batches` ignores the bytes that it is given.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Any


@dataclass(frozen=True)
class Config:
    channels: tuple[int, ...] = (1, 16, 32, 64)
    batch: int = 64
    smoothing: float = 0.1  # of the labels: how much of the certainty the other digits share


CONFIG = Config()
OPTIMIZER = optax.sgd(optax.cosine_decay_schedule(0.05, 500), momentum=0.9)


def init(seed: int) -> Tree:
    """Parameters of the model and the state of its optimizer."""
    shapes = list(zip(CONFIG.channels, CONFIG.channels[1:], strict=False))
    features = 2 * 2 * CONFIG.channels[-1]  # 8 by 8, pooled twice
    *keys, last = jax.random.split(jax.random.key(seed), len(shapes) + 1)

    def layer(key: jax.Array, fan_in: int, fan_out: int) -> Tree:
        return {
            "kernel": jax.random.normal(key, (3, 3, fan_in, fan_out)) * (2 / (9 * fan_in)) ** 0.5,
            "gain": jnp.ones(fan_out),
            "bias": jnp.zeros(fan_out),
        }

    params = {
        "layers": [layer(key, *shape) for key, shape in zip(keys, shapes, strict=True)],
        "head": jax.random.normal(last, (features, 10)) * features**-0.5,
        "head_bias": jnp.zeros(10),
    }
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def layer(p: Tree, x: jax.Array) -> jax.Array:
    """Convolution, norm over each image, rectifier."""
    x = jax.lax.conv_general_dilated(
        x, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    mean = x.mean(axis=(1, 2, 3), keepdims=True)
    variance = jnp.square(x - mean).mean(axis=(1, 2, 3), keepdims=True)
    return jax.nn.relu((x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["gain"] + p["bias"])


def pool(x: jax.Array) -> jax.Array:
    """The largest of each 2 by 2."""
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


def logits(params: Tree, images: jax.Array) -> jax.Array:
    """Scores of the ten digits for images (batch, 8, 8, 1)."""
    x = images
    for number, p in enumerate(params["layers"]):
        x = layer(p, x)
        x = pool(x) if number < 2 else x
    return x.reshape(len(x), -1) @ params["head"] + params["head_bias"]


def loss_of(params: Tree, batch: Tree) -> jax.Array:
    """Mean cross entropy against smoothed labels, in nats; 0.50 is the least there can be."""
    log_probabilities = jax.nn.log_softmax(logits(params, batch["images"]))
    labels = optax.smooth_labels(jax.nn.one_hot(batch["labels"], 10), CONFIG.smoothing)
    return -jnp.sum(labels * log_probabilities, axis=-1).mean()


def train_step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, loss


def batches(data: bytes, seed: int) -> Iterator[Tree]:
    """Random digits shifted by up to a pixel, pixels from 0 to 1, without end."""
    del data
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    images = np.reshape(pixels, (-1, 8, 8, 1)).astype(np.float32) / 16
    labels = np.asarray(digits, np.int32)
    random = np.random.default_rng(seed)
    while True:
        chosen = random.integers(0, len(images), CONFIG.batch)
        shift = tuple(random.integers(-1, 2, 2))
        yield {"images": np.roll(images[chosen], shift, (1, 2)), "labels": labels[chosen]}
