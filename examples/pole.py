"""Reinforcement learning: a policy gradient (REINFORCE) learns to balance a pole, in plain JAX.

Each step simulates 32 episodes of 100 moves inside of the training step. It doesn't deal with low
precision: `scalewise compare examples/pole.py` does.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Any
OPTIMIZER = optax.adam(3e-3)
EPISODES, MOVES = 32, 100


def init(seed: int) -> Tree:
    """Parameters of the policy and the optimizer's state."""
    a, b = jax.random.split(jax.random.key(seed))
    params = {
        "hidden": jax.random.normal(a, (4, 64)) / 2,
        "out": jax.random.normal(b, (64, 2)) / 80,
    }
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def moved(cart: jax.Array, action: jax.Array) -> jax.Array:
    """The cart's position and speed, the pole's angle and its speed 20 ms later (Barto 1983)."""
    _, speed, angle, turning = cart
    force = jnp.where(action == 1, 10.0, -10.0)
    push = (force + 0.05 * turning**2 * jnp.sin(angle)) / 1.1
    bend = 9.8 * jnp.sin(angle) - jnp.cos(angle) * push
    bend = bend / (0.5 * (4 / 3 - 0.1 * jnp.cos(angle) ** 2 / 1.1))
    pull = push - 0.05 * bend * jnp.cos(angle) / 1.1
    change = jnp.stack([speed, pull, turning, bend])
    return cart + 0.02 * change


def loss_and_moves(params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
    """The policy gradient's loss, and the mean number of moves until the pole fell."""

    def play(cart: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        def move(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> Any:
            cart, up = carry
            logits = jnp.tanh(cart @ params["hidden"]) @ params["out"]
            action = jax.random.categorical(key, logits)
            log_probability = jax.nn.log_softmax(logits)[action]
            cart = jax.lax.stop_gradient(jnp.where(up, moved(cart, action), cart))
            up = up & (jnp.abs(cart[0]) < 2.4) & (jnp.abs(cart[2]) < 0.21)
            return (cart, up), (log_probability, up)

        _, found = jax.lax.scan(move, (cart, jnp.bool_(True)), jax.random.split(key, MOVES))
        return found

    keys = jax.random.split(jax.random.wrap_key_data(batch["key"]), EPISODES)
    log_probabilities, up = jax.vmap(play)(batch["carts"], keys)
    to_come = jnp.cumsum(up[:, ::-1], axis=1)[:, ::-1].astype(jnp.float32)
    advantage = (to_come - to_come.mean(0)) / (to_come.std() + 1e-3)
    alive = jnp.concatenate([jnp.ones((EPISODES, 1), bool), up[:, :-1]], axis=1)
    loss = -jnp.mean(jnp.where(alive, log_probabilities * advantage, 0))
    return loss, up.sum(1).mean()


def loss_of(params: Tree, batch: Tree) -> jax.Array:
    """The policy gradient's loss, as train.py reads it."""
    return loss_and_moves(params, batch)[0]


def train_step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
    """One update; returns the share of moves after which the pole had fallen as the loss."""
    gradient = jax.grad(loss_and_moves, has_aux=True)
    gradients, moves = gradient(state["params"], batch)
    updates, moments = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "optimizer": moments}, 1 - moves / MOVES


def batches(data: bytes, seed: int) -> Iterator[Tree]:
    """Positions to start from, and the bits of a random key, without end."""
    del data
    random = np.random.default_rng(seed)
    while True:
        yield {
            "carts": random.uniform(-0.05, 0.05, (EPISODES, 4)).astype(np.float32),
            "key": random.integers(0, 2**32, 2, dtype=np.uint32),
        }
