"""A convolutional classifier of handwritten digits in Flax Linen, with batch norm.

It doesn't deal with low precision: `scalewise compare examples/digits_linen.py` does.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn

Tree = Any
OPTIMIZER = optax.sgd(0.05, momentum=0.9)


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images[..., None]
        for features in (16, 32):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(x))
            x = nn.avg_pool(x, (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


MODEL = Classifier()


def init(seed: int) -> Tree:
    """Parameters, batch norm's running averages and the optimizer's state."""
    variables = MODEL.init(jax.random.key(seed), np.zeros((1, 8, 8), np.float32))
    return {**variables, "optimizer": OPTIMIZER.init(variables["params"])}


def loss_and_averages(params: Tree, averages: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
    """Mean cross entropy, in nats, and the new running averages."""
    variables = {"params": params, "batch_stats": averages}
    logits, changed = MODEL.apply(variables, batch["images"], mutable=["batch_stats"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return losses.mean(), changed["batch_stats"]


def train_step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
    gradient = jax.value_and_grad(loss_and_averages, has_aux=True)
    (loss, averages), gradients = gradient(state["params"], state["batch_stats"], batch)
    updates, moments = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "batch_stats": averages, "optimizer": moments}, loss


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
