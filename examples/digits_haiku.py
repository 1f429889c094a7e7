"""A residual classifier of handwritten digits in Haiku.

It doesn't deal with low precision: `scalewise compare examples/digits_haiku.py` does.
"""

from collections.abc import Iterator
from typing import Any

import haiku as hk
import jax
import numpy as np
import optax

Tree = Any
OPTIMIZER = optax.adam(1e-3)


def classify(pixels: jax.Array) -> jax.Array:
    x = hk.Linear(128)(pixels)
    for _ in range(2):
        y = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        x = x + hk.Linear(128)(jax.nn.silu(hk.Linear(256)(y)))
    return hk.Linear(10)(x)


MODEL = hk.without_apply_rng(hk.transform(classify))


def init(seed: int) -> Tree:
    """Parameters and the optimizer's state."""
    params = MODEL.init(jax.random.key(seed), np.zeros((1, 64), np.float32))
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def loss_of(params: Tree, batch: Tree) -> jax.Array:
    """Mean cross entropy, in nats."""
    logits = MODEL.apply(params, batch["pixels"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def train_step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
    updates, moments = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, loss


def batches(data: bytes, seed: int) -> Iterator[Tree]:
    """Random digits of scikit-learn, pixels from 0 to 1, without end."""
    del data
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    pixels, labels = np.asarray(pixels, np.float32) / 16, np.asarray(digits, np.int32)
    random = np.random.default_rng(seed)
    while True:
        chosen = random.integers(0, len(pixels), 64)
        yield {"pixels": pixels[chosen], "labels": labels[chosen]}
