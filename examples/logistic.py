"""Logistic regression by L-BFGS on scikit-learn's breast cancer data, in plain JAX and optax.

This file doesn't deal with low precision. It defines what `scalewise compare` reads from any file
(see gpt.py), and patients that it doesn't train on, `held_out`. No neural network: a convex
problem, solved by a quasi-Newton method whose line search is a loop within the step.
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
    ridge: float = 1e-2
    held: int = 169  # patients that are held out


CONFIG = Config()
OPTIMIZER = optax.lbfgs(memory_size=5)


def init(seed: int) -> Tree:
    """Parameters of the model and the state of its optimizer."""
    params = {"weight": 0.1 * jax.random.normal(jax.random.key(seed), (30,)), "bias": jnp.zeros(())}
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def loss_of(params: Tree, batch: Tree) -> jax.Array:
    """Mean log loss, in nats, and the ridge."""
    scores = batch["measures"] @ params["weight"] + params["bias"]
    log_loss = jax.nn.softplus(scores) - batch["benign"] * scores
    return log_loss.mean() + CONFIG.ridge * jnp.square(params["weight"]).sum()


def train_step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
    def value_of(params):
        return loss_of(params, batch)

    params = state["params"]
    loss, gradients = jax.value_and_grad(value_of)(params)
    updates, optimizer = OPTIMIZER.update(
        gradients, state["optimizer"], params, value=loss, grad=gradients, value_fn=value_of
    )
    return {"params": optax.apply_updates(params, updates), "optimizer": optimizer}, loss


def patients() -> Tree:
    """Thirty measures of each, centred and of unit variance, in random order."""
    from sklearn.datasets import load_breast_cancer

    measures, benign = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(benign))
    measures = (measures - measures.mean(axis=0)) / measures.std(axis=0)
    both = {"measures": measures[order], "benign": benign[order]}
    return {name: x.astype(np.float32) for name, x in both.items()}


def held_out() -> Tree:
    """The patients that `batches` never gives."""
    return {name: x[-CONFIG.held :] for name, x in patients().items()}


def batches(data: bytes, seed: int) -> Iterator[Tree]:
    """Yields the same batch of all patients, without end."""
    del data, seed
    everybody = {name: x[: -CONFIG.held] for name, x in patients().items()}
    while True:
        yield everybody
