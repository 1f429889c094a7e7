"""A byte-level LSTM in plain JAX and optax, its time steps in a `lax.scan`.

This file doesn't deal with low precision. It defines what `scalewise compare` and train.py
read from any file: init, loss_of, OPTIMIZER, train_step and batches (see gpt.py).
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
    vocabulary: int = 256  # one token for each byte
    context: int = 64
    width: int = 128
    batch: int = 16


CONFIG = Config()
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))


def init(seed: int) -> Tree:
    """Parameters of the model and the state of its optimizer."""
    a, b, c, d = jax.random.split(jax.random.key(seed), 4)
    width, vocabulary = CONFIG.width, CONFIG.vocabulary
    forget = jnp.zeros((4, width)).at[1].set(1.0)  # remembers at first
    params = {
        "tokens": 0.1 * jax.random.normal(a, (vocabulary, width)),
        "input": jax.random.normal(b, (width, 4 * width)) * width**-0.5,
        "recurrent": jax.random.normal(c, (width, 4 * width)) * width**-0.5,
        "bias": forget.reshape(4 * width),
        "head": jax.random.normal(d, (width, vocabulary)) * width**-0.5,
    }
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def cell(params: Tree, state: tuple[jax.Array, jax.Array], x: jax.Array):
    """One time step: (hidden, memory) and an input, each (batch, width)."""
    hidden, memory = state
    gates = x @ params["input"] + hidden @ params["recurrent"] + params["bias"]
    take, keep, candidate, show = jnp.split(gates, 4, axis=-1)
    memory = jax.nn.sigmoid(keep) * memory + jax.nn.sigmoid(take) * jnp.tanh(candidate)
    hidden = jax.nn.sigmoid(show) * jnp.tanh(memory)
    return (hidden, memory), hidden


def logits(params: Tree, tokens: jax.Array) -> jax.Array:
    """Scores of the next byte after each byte of `tokens` (batch, time)."""
    x = params["tokens"][tokens].swapaxes(0, 1)
    zero = jnp.zeros((tokens.shape[0], CONFIG.width), x.dtype)
    _, hidden = jax.lax.scan(lambda state, x: cell(params, state, x), (zero, zero), x)
    return hidden.swapaxes(0, 1) @ params["head"]


def loss_of(params: Tree, batch: jax.Array) -> jax.Array:
    """Mean cross entropy, in nats a byte."""
    log_probabilities = jax.nn.log_softmax(logits(params, batch[:, :-1]))
    return -jnp.take_along_axis(log_probabilities, batch[:, 1:, None], axis=-1).mean()


def train_step(state: Tree, batch: jax.Array) -> tuple[Tree, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, loss


def batches(data: bytes, seed: int) -> Iterator[np.ndarray]:
    """Random windows of the text, one byte longer than the context, without end."""
    text = np.frombuffer(data, np.uint8)
    last = len(text) - CONFIG.context
    if last < 1:
        raise ValueError(f"at least {CONFIG.context + 1} bytes of text are needed, not {len(text)}")
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, last, size=(CONFIG.batch, 1))
        yield text[starts + np.arange(CONFIG.context + 1)].astype(np.int32)
