"""Finds the initial state of a wave, by gradients through its simulation, in plain JAX.

This file doesn't deal with low precision. It defines what `scalewise compare` and train.py
read from any file (see gpt.py). No neural network: a membrane whose initial displacement is one of
scikit-learn's digits follows the wave equation, detectors along its rim record it with noise, and
the displacement that explains the records is trained.
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
    size: int = 16  # points along each side
    steps: int = 64
    speed: tuple[float, float] = (0.4, 0.6)  # in the left and the right half, cells a step
    noise: float = 0.05
    digit: int = 3  # which of scikit-learn's digits began it


CONFIG = Config()
OPTIMIZER = optax.adam(optax.cosine_decay_schedule(0.05, 400))


def init(seed: int) -> Tree:
    """A flat membrane, and the state of the optimizer."""
    del seed
    params = {"displacement": jnp.zeros((CONFIG.size, CONFIG.size))}
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def stiffness() -> np.ndarray:
    """The square of the wave's speed at each point."""
    left, right = CONFIG.speed
    columns = np.where(np.arange(CONFIG.size) < CONFIG.size // 2, left, right)
    return np.broadcast_to(columns**2, (CONFIG.size,) * 2).astype(np.float32)


def swing(u: jax.Array, stiffness: jax.Array) -> jax.Array:
    """Acceleration of a membrane whose rim can move freely."""
    wide = jnp.pad(u, 1, mode="edge")
    around = wide[:-2, 1:-1] + wide[2:, 1:-1] + wide[1:-1, :-2] + wide[1:-1, 2:]
    return stiffness * (around - 4 * u)


def records(displacement: jax.Array) -> jax.Array:
    """What the detectors along the rim see, (steps, detectors): leapfrog from rest."""
    square = jnp.asarray(stiffness(), displacement.dtype)

    def step(state, _):
        before, now = state
        after = 2 * now - before + swing(now, square)
        rim = jnp.concatenate([after[0], after[-1], after[:, 0], after[:, -1]])
        return (now, after), rim

    start = (displacement, displacement + swing(displacement, square) / 2)
    return jax.lax.scan(step, start, None, length=CONFIG.steps)[1]


def loss_of(params: Tree, batch: jax.Array) -> jax.Array:
    """Mean squared error of the records, in units of the noise's variance."""
    return jnp.square((records(params["displacement"]) - batch) / CONFIG.noise).mean()


def train_step(state: Tree, batch: jax.Array) -> tuple[Tree, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, loss


def batches(data: bytes, seed: int) -> Iterator[np.ndarray]:
    """The records of one experiment after the other, each with noise of its own, without end."""
    del data
    from sklearn.datasets import load_digits

    pixels, _ = load_digits(return_X_y=True)
    image = np.reshape(pixels[CONFIG.digit], (8, 8)) / 16
    true = np.kron(image, np.ones((CONFIG.size // 8,) * 2)).astype(np.float32)
    clean = np.asarray(jax.jit(records)(true))
    random = np.random.default_rng(seed)
    while True:
        yield clean + CONFIG.noise * random.standard_normal(clean.shape, np.float32)
