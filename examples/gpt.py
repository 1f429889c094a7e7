"""A small byte-level GPT in plain JAX and optax: pytrees of float32 arrays, no modules.

This file doesn't deal with low precision and doesn't import scalewise. `scalewise compare` uses
three functions of it, or of any other file:

    init(seed) -> state                            a pytree that holds the parameters as "params"
    train_step(state, batch) -> (state, loss)      one step of training, a pure function
    batches(data, seed) -> iterator of batches     NumPy arrays, made from the bytes of a text

`python examples/gpt.py` trains the model on the text of this file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Any


@dataclass(frozen=True)
class Config:
    vocabulary: int = 256  # one token for each byte
    context: int = 128
    width: int = 128
    heads: int = 4
    layers: int = 2
    batch: int = 8


CONFIG = Config()
LEARNING_RATE = optax.linear_schedule(init_value=1e-4, end_value=1e-3, transition_steps=50)
OPTIMIZER = optax.adamw(LEARNING_RATE, weight_decay=0.01)


def init(seed: int) -> Tree:
    """Parameters of the model and the state of its optimizer."""
    keys = iter(jax.random.split(jax.random.key(seed), 3 + 4 * CONFIG.layers))
    width = CONFIG.width

    def weight(*shape: int, scale: float = 0.02) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape)

    def norm() -> Tree:
        return {"gain": jnp.ones(width), "bias": jnp.zeros(width)}

    def block() -> Tree:
        return {
            "norm_1": norm(),
            "qkv": weight(width, 3 * width, scale=width**-0.5),
            "projection": weight(width, width, scale=(2 * CONFIG.layers * width) ** -0.5),
            "norm_2": norm(),
            "up": weight(width, 4 * width, scale=width**-0.5),
            "up_bias": jnp.zeros(4 * width),
            "down": weight(4 * width, width, scale=(8 * CONFIG.layers * width) ** -0.5),
            "down_bias": jnp.zeros(width),
        }

    params = {
        "tokens": weight(CONFIG.vocabulary, width),
        "positions": weight(CONFIG.context, width),
        "blocks": [block() for _ in range(CONFIG.layers)],
        "norm": norm(),
        "head": weight(width, CONFIG.vocabulary),
    }
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def layer_norm(p: Tree, x: jax.Array) -> jax.Array:
    mean = x.mean(axis=-1, keepdims=True)
    variance = jnp.square(x - mean).mean(axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["gain"] + p["bias"]


def attention(p: Tree, x: jax.Array) -> jax.Array:
    batch, time, width = x.shape
    qkv = (x @ p["qkv"]).reshape(batch, time, 3, CONFIG.heads, width // CONFIG.heads)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // CONFIG.heads) ** -0.5
    causal = jnp.tril(jnp.ones((time, time), dtype=bool))
    scores = jnp.where(causal, scores, jnp.finfo(x.dtype).min)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return mixed.reshape(batch, time, width) @ p["projection"]


def mlp(p: Tree, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]


def logits(params: Tree, tokens: jax.Array) -> jax.Array:
    """Scores of the next byte after each byte of `tokens` (batch, time)."""
    x = params["tokens"][tokens] + params["positions"][: tokens.shape[1]]
    for number, block in enumerate(params["blocks"]):
        with jax.named_scope(f"block_{number}"):
            x = x + attention(block, layer_norm(block["norm_1"], x))
            x = x + mlp(block, layer_norm(block["norm_2"], x))
    with jax.named_scope("head"):
        return layer_norm(params["norm"], x) @ params["head"]


def loss_of(params: Tree, batch: jax.Array) -> jax.Array:
    """Mean cross entropy, in nats a byte."""
    log_probabilities = jax.nn.log_softmax(logits(params, batch[:, :-1]))
    return -jnp.take_along_axis(log_probabilities, batch[:, 1:, None], axis=-1).mean()


def train_step(state: Tree, batch: jax.Array) -> tuple[Tree, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, loss


def batches(data: bytes, seed: int) -> Iterator[np.ndarray]:
    """Yields random windows of the text, one byte longer than the context, without end."""
    text = np.frombuffer(data, np.uint8)
    last = len(text) - CONFIG.context
    if last < 1:
        raise ValueError(f"at least {CONFIG.context + 1} bytes of text are needed, not {len(text)}")
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, last, size=(CONFIG.batch, 1))
        yield text[starts + np.arange(CONFIG.context + 1)].astype(np.int32)


if __name__ == "__main__":
    state, step = init(0), jax.jit(train_step)
    for number, batch in zip(range(1, 101), batches(Path(__file__).read_bytes(), 0), strict=False):
        state, loss = step(state, batch)
        if number % 10 == 0:
            print(f"step {number:3}  loss {loss:.3f}")
