"""A recurrent classifier of handwritten digits in Equinox, which reads them row by row.

It doesn't deal with low precision: `scalewise compare examples/digits_equinox.py` does.
"""

from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Any
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))


class Classifier(eqx.Module):
    cell: eqx.nn.GRUCell
    out: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        cell, out = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(8, 64, key=cell)
        self.out = eqx.nn.Linear(64, 10, key=out)

    def __call__(self, image: jax.Array) -> jax.Array:
        def read(hidden: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
            return self.cell(row, hidden), None

        hidden, _ = jax.lax.scan(read, jnp.zeros(64), image)
        return self.out(hidden)


STATIC = eqx.partition(Classifier(jax.random.key(0)), eqx.is_array)[1]


def init(seed: int) -> Tree:
    """The model's arrays and the optimizer's state."""
    params = eqx.filter(Classifier(jax.random.key(seed)), eqx.is_array)
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def loss_of(params: Tree, batch: Tree) -> jax.Array:
    """Mean cross entropy, in nats."""
    logits = jax.vmap(eqx.combine(params, STATIC))(batch["images"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def train_step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
    updates, moments = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": eqx.apply_updates(state["params"], updates), "optimizer": moments}, loss


def batches(data: bytes, seed: int) -> Iterator[Tree]:
    """Random digits of scikit-learn, pixels from 0 to 1, without end."""
    del data
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    images = np.asarray(pixels, np.float32).reshape(-1, 8, 8) / 16
    labels = np.asarray(digits, np.int32)
    random = np.random.default_rng(seed)
    while True:
        chosen = random.integers(0, len(images), 64)
        yield {"images": images[chosen], "labels": labels[chosen]}
