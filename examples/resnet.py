"""A small residual network with batch norm on scikit-learn's digits, in plain JAX and optax.

This file doesn't deal with low precision. It defines what `scalewise compare` and train.py
read from any file (see gpt.py), and for `python -m experiments.parity` digits that it
doesn't train on, `held_out`, and `evaluate`, the loss of a trained state on them, with the running
statistics that `train_step` keeps beside the parameters.
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
    width: int = 24
    blocks: int = 2
    batch: int = 64
    momentum: float = 0.9  # of the running mean and variance
    smoothing: float = 0.1  # of the labels: how much of the certainty the other digits share
    held: int = 297  # digits that are held out


CONFIG = Config()
OPTIMIZER = optax.adamw(optax.cosine_decay_schedule(2e-3, 400), weight_decay=0.01)


def init(seed: int) -> Tree:
    """Parameters, running statistics of each norm, and the state of the optimizer."""
    keys = iter(jax.random.split(jax.random.key(seed), 2 + 2 * CONFIG.blocks))

    def layer(fan_in: int) -> Tree:
        shape = (3, 3, fan_in, CONFIG.width)
        return {
            "kernel": jax.random.normal(next(keys), shape) * (2 / (9 * fan_in)) ** 0.5,
            "gain": jnp.ones(CONFIG.width),
            "bias": jnp.zeros(CONFIG.width),
        }

    params = {
        "layers": [layer(1)] + [layer(CONFIG.width) for _ in range(2 * CONFIG.blocks)],
        "head": jax.random.normal(next(keys), (CONFIG.width, 10)) * CONFIG.width**-0.5,
    }
    fresh = {"mean": jnp.zeros(CONFIG.width), "variance": jnp.ones(CONFIG.width)}
    statistics = [fresh for _ in params["layers"]]
    return {"params": params, "statistics": statistics, "optimizer": OPTIMIZER.init(params)}


def layer(p: Tree, x: jax.Array, running: Tree | None) -> tuple[jax.Array, Tree]:
    """Convolution and batch norm, by the running statistics or (None) by the batch's own."""
    x = jax.lax.conv_general_dilated(
        x, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    if running is None:
        mean = x.mean(axis=(0, 1, 2))
        running = {"mean": mean, "variance": jnp.square(x - mean).mean(axis=(0, 1, 2))}
    normed = (x - running["mean"]) * jax.lax.rsqrt(running["variance"] + 1e-5)
    return normed * p["gain"] + p["bias"], running


def logits(params: Tree, images: jax.Array, statistics: Tree | None) -> tuple[jax.Array, Tree]:
    """Scores of the ten digits for images (batch, 8, 8, 1), and the statistics of each norm."""
    given = statistics or [None] * len(params["layers"])
    x, first = layer(params["layers"][0], images, given[0])
    x, used = jax.nn.relu(x), [first]
    for i in range(1, len(params["layers"]), 2):
        y, a = layer(params["layers"][i], x, given[i])
        y, b = layer(params["layers"][i + 1], jax.nn.relu(y), given[i + 1])
        x, used = jax.nn.relu(x + y), [*used, a, b]
    return x.mean(axis=(1, 2)) @ params["head"], used


def cross_entropy(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Against smoothed labels, in nats; 0.50 is the least there can be."""
    wanted = optax.smooth_labels(jax.nn.one_hot(labels, 10), CONFIG.smoothing)
    return -jnp.sum(wanted * jax.nn.log_softmax(scores), axis=-1).mean()


def loss_and_statistics(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
    scores, statistics = logits(params, batch["images"], None)
    return cross_entropy(scores, batch["labels"]), statistics


def loss_of(params: Tree, batch: Tree) -> jax.Array:
    """Mean cross entropy by the batch's own statistics."""
    return loss_and_statistics(params, batch)[0]


def evaluate(state: Tree, batch: Tree) -> jax.Array:
    """Mean cross entropy by the running statistics."""
    scores, _ = logits(state["params"], batch["images"], state["statistics"])
    return cross_entropy(scores, batch["labels"])


def train_step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
    step = jax.value_and_grad(loss_and_statistics, has_aux=True)
    (loss, new), gradients = step(state["params"], batch)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    statistics = optax.incremental_update(new, state["statistics"], 1 - CONFIG.momentum)
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "statistics": statistics, "optimizer": optimizer}, loss


def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return np.reshape(pixels, (-1, 8, 8, 1)).astype(np.float32) / 16, labels.astype(np.int32)


def held_out() -> Tree:
    """The digits that `batches` never gives."""
    images, labels = digits()
    return {"images": images[-CONFIG.held :], "labels": labels[-CONFIG.held :]}


def batches(data: bytes, seed: int) -> Iterator[Tree]:
    """Random digits shifted by up to a pixel, pixels from 0 to 1, without end."""
    del data
    images, labels = digits()
    random = np.random.default_rng(seed)
    while True:
        chosen = random.integers(0, len(images) - CONFIG.held, CONFIG.batch)
        shift = tuple(random.integers(-1, 2, 2))
        yield {"images": np.roll(images[chosen], shift, (1, 2)), "labels": labels[chosen]}
