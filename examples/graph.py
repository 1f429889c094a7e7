"""A graph network on the nearest neighbours among scikit-learn's digits, in plain JAX and optax.

This file doesn't deal with low precision. It defines what `scalewise compare` and train.py
read from any file (see gpt.py), and digits that it doesn't train on, `held_out`. Each digit is a
node, connected with the most similar digits; `segment_sum` adds up messages along the edges. Two
thirds of the digits have a label; the pixels of all are used.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Any


@dataclass(frozen=True)
class Config:
    width: int = 32
    layers: int = 2
    neighbours: int = 6
    labelled: int = 1200
    hidden: float = 0.5  # share of the pixels that a step doesn't see
    smoothing: float = 0.1  # of the labels: how much of the certainty the other digits share


CONFIG = Config()
OPTIMIZER = optax.adamw(5e-3, weight_decay=0.01)


def init(seed: int) -> Tree:
    """Parameters of the model and the state of its optimizer."""
    keys = iter(jax.random.split(jax.random.key(seed), 1 + 2 * CONFIG.layers))

    def weight(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    widths = [64] + [CONFIG.width] * CONFIG.layers
    params = {
        "layers": [
            {"own": weight(a, b), "others": weight(a, b), "bias": jnp.zeros(b)}
            for a, b in pairwise(widths)
        ],
        "head": weight(CONFIG.width, 10),
    }
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def layer(p: Tree, x: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    """Each node's own features and the mean of its neighbours', rectified and normed."""
    messages = (x @ p["others"])[senders]
    total = jax.ops.segment_sum(messages, receivers, len(x))
    count = jax.ops.segment_sum(jnp.ones(len(receivers)), receivers, len(x))
    x = jax.nn.relu(x @ p["own"] + total / jnp.maximum(count, 1)[:, None] + p["bias"])
    return x / jnp.sqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6)


def logits(params: Tree, batch: Tree) -> jax.Array:
    """Scores of the ten digits for each node."""
    x = batch["pixels"]
    for p in params["layers"]:
        x = layer(p, x, batch["senders"], batch["receivers"])
    return x @ params["head"]


def loss_of(params: Tree, batch: Tree) -> jax.Array:
    """Mean cross entropy against smoothed labels, in nats, of the nodes that have one."""
    log_probabilities = jax.nn.log_softmax(logits(params, batch)[batch["known"]])
    labels = optax.smooth_labels(jax.nn.one_hot(batch["labels"], 10), CONFIG.smoothing)
    return -jnp.sum(labels * log_probabilities, axis=-1).mean()


def train_step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, loss


def graph() -> tuple[Tree, np.ndarray]:
    """Pixels from 0 to 1 and edges to each node from those nearest to it; the labels."""
    from sklearn.datasets import load_digits
    from sklearn.neighbors import kneighbors_graph

    pixels, labels = load_digits(return_X_y=True)
    receivers, senders = kneighbors_graph(pixels, CONFIG.neighbours).nonzero()
    edges = {"senders": senders.astype(np.int32), "receivers": receivers.astype(np.int32)}
    return {"pixels": pixels.astype(np.float32) / 16, **edges}, labels.astype(np.int32)


def held_out() -> Tree:
    """The nodes that `batches` gives no label of; every pixel is seen."""
    whole, labels = graph()
    known = np.arange(CONFIG.labelled, len(labels), dtype=np.int32)
    return whole | {"known": known, "labels": labels[known]}


def batches(data: bytes, seed: int) -> Iterator[Tree]:
    """The whole graph, random pixels of it hidden, with half of the labels, without end."""
    del data
    whole, labels = graph()
    random = np.random.default_rng(seed)
    while True:
        known = random.permutation(CONFIG.labelled)[: CONFIG.labelled // 2].astype(np.int32)
        seen = random.random(whole["pixels"].shape) >= CONFIG.hidden
        pixels = whole["pixels"] * seen.astype(np.float32)
        yield whole | {"pixels": pixels, "known": known, "labels": labels[known]}
