"""A classifier of handwritten digits in Flax NNX, with layer norm and dropout.

It doesn't deal with low precision: `scalewise compare examples/digits_nnx.py` does.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

Tree = Any
OPTIMIZER = optax.adamw(2e-3)


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.norm = nnx.LayerNorm(128, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)
        self.out = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, pixels: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        x = nnx.gelu(self.norm(self.hidden(pixels)))
        return self.out(self.dropout(x, rngs=rngs))


GRAPH = nnx.graphdef(Classifier(nnx.Rngs(0)))


def init(seed: int) -> Tree:
    """Parameters, the optimizer's state and the key of dropout."""
    params = nnx.state(Classifier(nnx.Rngs(seed)), nnx.Param)
    return {"params": params, "optimizer": OPTIMIZER.init(params), "key": jax.random.key(seed)}


def loss_with_dropout(params: Tree, batch: Tree, key: jax.Array) -> jax.Array:
    """Mean cross entropy, in nats."""
    model = nnx.merge(GRAPH, params)
    logits = model(batch["pixels"], nnx.Rngs(dropout=key))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def train_step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
    key, dropout = jax.random.split(state["key"])
    loss, gradients = jax.value_and_grad(loss_with_dropout)(state["params"], batch, dropout)
    updates, moments = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "optimizer": moments, "key": key}, loss


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
