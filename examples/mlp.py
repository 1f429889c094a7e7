"""A small multilayer perceptron on scikit-learn's handwritten digits, in plain JAX and optax.

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
    widths: tuple[int, ...] = (64, 256, 256, 10)
    batch: int = 64


CONFIG = Config()
OPTIMIZER = optax.adamw(1e-3, weight_decay=0.01)


def init(seed: int) -> Tree:
    """Parameters of the model and the state of its optimizer."""
    shapes = list(zip(CONFIG.widths, CONFIG.widths[1:], strict=False))
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    params = [
        {
            "weight": jax.random.normal(key, shape) * (2 / shape[0]) ** 0.5,
            "bias": jnp.zeros(shape[1]),
        }
        for key, shape in zip(keys, shapes, strict=True)
    ]
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def logits(params: Tree, images: jax.Array) -> jax.Array:
    """Scores of the ten digits for images (batch, 64)."""
    x = images
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    return x @ params[-1]["weight"] + params[-1]["bias"]


def loss_of(params: Tree, batch: Tree) -> jax.Array:
    """Mean cross entropy, in nats."""
    log_probabilities = jax.nn.log_softmax(logits(params, batch["images"]))
    return -jnp.take_along_axis(log_probabilities, batch["labels"][:, None], axis=-1).mean()


def train_step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, loss


def batches(data: bytes, seed: int) -> Iterator[Tree]:
    """Random digits, pixels from 0 to 1, without end."""
    del data
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    images, labels = np.asarray(pixels, np.float32) / 16, np.asarray(digits, np.int32)
    random = np.random.default_rng(seed)
    while True:
        chosen = random.integers(0, len(images), CONFIG.batch)
        yield {"images": images[chosen], "labels": labels[chosen]}
