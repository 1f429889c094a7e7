"""A byte-level mixture of experts in plain JAX and optax: attention, then two of eight experts.

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
    width: int = 64
    experts: int = 8
    chosen: int = 2
    hidden: int = 128
    batch: int = 8
    balance: float = 0.01  # weight of the loss that keeps the experts equally busy


CONFIG = Config()
OPTIMIZER = optax.adamw(2e-3, weight_decay=0.01)


def init(seed: int) -> Tree:
    """Parameters of the model and the state of its optimizer."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    width, experts, hidden = CONFIG.width, CONFIG.experts, CONFIG.hidden

    def weight(*shape: int, scale: float) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape)

    params = {
        "tokens": weight(CONFIG.vocabulary, width, scale=0.1),
        "positions": weight(CONFIG.context, width, scale=0.02),
        "qkv": weight(width, 3 * width, scale=width**-0.5),
        "projection": weight(width, width, scale=width**-0.5),
        "router": weight(width, experts, scale=width**-0.5),
        "up": weight(experts, width, hidden, scale=width**-0.5),
        "down": weight(experts, hidden, width, scale=hidden**-0.5),
        "head": weight(width, CONFIG.vocabulary, scale=width**-0.5),
    }
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def norm(x: jax.Array) -> jax.Array:
    """Root-mean-square norm without a gain."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6)


def attention(params: Tree, x: jax.Array) -> jax.Array:
    """One causal head."""
    q, k, v = jnp.split(x @ params["qkv"], 3, axis=-1)
    scores = jnp.einsum("bqd,bkd->bqk", q, k) * CONFIG.width**-0.5
    causal = jnp.tril(jnp.ones(scores.shape[1:], dtype=bool))
    scores = jnp.where(causal, scores, jnp.finfo(x.dtype).min)
    return jax.nn.softmax(scores) @ v @ params["projection"]


def experts(params: Tree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The chosen experts' output, and how unevenly they are chosen (1 is even)."""
    shares = jax.nn.softmax(x @ params["router"])
    best, index = jax.lax.top_k(shares, CONFIG.chosen)
    mask = jax.nn.one_hot(index, CONFIG.experts, dtype=x.dtype)
    gates = jnp.einsum("btk,btke->bte", best / best.sum(-1, keepdims=True), mask)
    inner = jax.nn.gelu(jnp.einsum("btd,edh->bteh", x, params["up"]))
    out = jnp.einsum("bteh,ehd,bte->btd", inner, params["down"], gates)
    busy = mask.sum(axis=2).mean(axis=(0, 1)) / CONFIG.chosen
    return out, CONFIG.experts * jnp.sum(busy * shares.mean(axis=(0, 1)))


def logits(params: Tree, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scores of the next byte after each byte of `tokens` (batch, time), and the imbalance."""
    x = params["tokens"][tokens] + params["positions"][: tokens.shape[1]]
    x = x + attention(params, norm(x))
    mixed, imbalance = experts(params, norm(x))
    return norm(x + mixed) @ params["head"], imbalance


def loss_of(params: Tree, batch: jax.Array) -> jax.Array:
    """Mean cross entropy, in nats a byte, and a little of the experts' imbalance."""
    scores, imbalance = logits(params, batch[:, :-1])
    log_probabilities = jax.nn.log_softmax(scores)
    chosen = jnp.take_along_axis(log_probabilities, batch[:, 1:, None], axis=-1)
    return CONFIG.balance * imbalance - chosen.mean()


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
