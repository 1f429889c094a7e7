"""Small training programs, each with one operation that fails in FP16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from scalewise.cli._program import TrainingProgram

Tree = Any
MILLION = 1_000_000


def case(
    name: str,
    params: Callable[[], Tree],
    loss_of: Callable[[Tree, Tree], jax.Array],
    data: Callable[[], Tree],
    optimizer: optax.GradientTransformation | None = None,
) -> TrainingProgram:
    """A program that sees the same data at each step; Adam with its usual epsilon of 1e-8."""
    chosen = optimizer or optax.adam(1e-2)

    def train_step(state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, inner = chosen.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": inner}, loss

    def init(seed: int) -> Tree:
        del seed
        return {"params": params(), "optimizer": chosen.init(params())}

    def batches(text: bytes, seed: int) -> Iterator[Tree]:
        del text, seed
        batch = data()
        while True:
            yield batch

    return TrainingProgram(name, init, train_step, batches, loss_of, chosen)


def normal(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)


def attention(mask: float) -> Callable[[Tree, Tree], jax.Array]:
    """A causal head that fills what it may not see with ``mask``; one that rows may see nothing of
    is left out, since -inf alone has no softmax in any arithmetic."""

    def loss_of(params, batch):
        x = batch["x"]
        q, k, v = (x @ params[name] for name in "qkv")
        scores = jnp.einsum("bqd,bkd->bqk", q, k) / 4
        seen = jnp.tril(jnp.ones(scores.shape[1:], bool))
        mixed = jax.nn.softmax(jnp.where(seen, scores, mask)) @ v
        return jnp.square(mixed - batch["y"]).mean()

    return loss_of


def masked(name: str, mask: float) -> TrainingProgram:
    return case(
        name,
        lambda: {n: normal(i, 16, 16, scale=0.25) for i, n in enumerate("qkv")},
        attention(mask),
        lambda: {"x": normal(5, 4, 12, 16), "y": normal(6, 4, 12, 16)},
    )


def added_mask() -> TrainingProgram:
    """The mask added to the scores, as many programs do, over another one of the same."""

    def loss_of(params, batch):
        scores = jnp.einsum("bqd,bkd->bqk", batch["x"] @ params["q"], batch["x"] @ params["k"])
        out = (1 - jnp.tril(jnp.ones(scores.shape[1:]))) * jnp.finfo(jnp.float32).min
        mixed = jax.nn.softmax(scores / 4 + out / 2 + out / 2) @ batch["x"]
        return jnp.square(mixed - batch["y"]).mean()

    return case(
        "mask: half of finfo.min added twice",
        lambda: {n: normal(i, 16, 16, scale=0.25) for i, n in enumerate("qk")},
        loss_of,
        lambda: {"x": normal(5, 4, 12, 16), "y": normal(6, 4, 12, 16)},
    )


def layer_norm(epsilon: float, size: float, constant: int, name: str) -> TrainingProgram:
    """Norms of rows of a given size, the first of them constant."""

    def loss_of(params, batch):
        x = batch["x"] * params["in"]
        centred = x - x.mean(-1, keepdims=True)
        y = centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)
        return jnp.square(y @ params["out"] - batch["y"]).mean()

    def data():
        x = normal(0, 32, 16, scale=size)
        x[:constant] = np.float32(size)
        return {"x": x, "y": normal(1, 32, 4)}

    def params():
        return {"in": np.ones((), np.float32), "out": normal(2, 16, 4, scale=0.25)}

    return case(name, params, loss_of, data)


def dead_units() -> TrainingProgram:
    """Three quarters of the units never fire: Adam divides zero by the root of zero and 1e-8."""

    def loss_of(params, batch):
        hidden = jax.nn.relu(batch["x"] @ params["up"] + params["bias"])
        return jnp.square(hidden @ params["down"] - batch["y"]).mean()

    def params():
        bias = np.where(np.arange(64) < 16, 0, -100).astype(np.float32)
        up, down = normal(0, 16, 64, scale=0.25), normal(1, 64, 4, scale=0.25)
        return {"up": up, "bias": bias, "down": down}

    return case(
        "dead units", params, loss_of, lambda: {"x": normal(2, 32, 16), "y": normal(3, 32, 4)}
    )


def one_hot() -> TrainingProgram:
    """Five of 2,000 rows of a table are looked up; all others have a gradient of zero."""

    def loss_of(params, batch):
        scores = params["table"][batch["tokens"]] @ params["table"].T
        chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), batch["next"][:, None], -1)
        return -chosen.mean()

    def data():
        tokens = np.array([3, 14, 159, 265, 1358], np.int32)
        return {"tokens": tokens, "next": np.roll(tokens, 1)}

    return case("one-hot gradients", lambda: {"table": normal(0, 2000, 16)}, loss_of, data)


def sum_of_a_million() -> TrainingProgram:
    """The mean over a million examples of a regression with two parameters."""

    def loss_of(params, batch):
        found = params["slope"] * batch["x"] + params["offset"]
        return jnp.sum(jnp.square(found - batch["y"])) / MILLION

    def data():
        x = np.abs(normal(0, MILLION))
        return {"x": x, "y": 3 * x + 2 + normal(1, MILLION, scale=0.5)}

    zero = np.zeros((), np.float32)
    return case(
        "a sum of 10^6 terms",
        lambda: {"slope": zero, "offset": zero},
        loss_of,
        data,
        optax.sgd(0.2),
    )


def norm_of_a_million() -> TrainingProgram:
    """The norm of a million numbers is brought to a thousand times one: squares, a sum, a root."""

    def loss_of(params, batch):
        norm = jnp.sqrt(jnp.sum(jnp.square(params["x"])) + 1e-8)
        return jnp.square(norm / batch - 1)

    return case(
        "a norm of 10^6 numbers",
        lambda: {"x": normal(0, MILLION, scale=0.5)},
        loss_of,
        lambda: np.float32(1000),
        optax.sgd(1e5),
    )


def softmax_of_a_million() -> TrainingProgram:
    """Cross entropy over a million classes: its probabilities are 1e-6."""

    def loss_of(params, batch):
        scores = params["gain"] * batch["scores"]
        return -jax.nn.log_softmax(scores)[batch["label"]]

    def data():
        scores = normal(0, MILLION)
        return {"scores": scores, "label": np.int32(np.argmax(scores))}

    one = np.ones((), np.float32)
    return case("a softmax over 10^6", lambda: {"gain": one}, loss_of, data, optax.adam(0.1))


def hidden(k: int) -> TrainingProgram:
    """A rectifier net whose hidden units are multiplied by 2^k, by its weights alone.

    The model divides nowhere: with (2^k w1, 2^k b1, 2^-k w2) it is the same function, whose
    activations have that factor, and its gradients the opposite one. The optimizer undoes it.
    """
    factor = np.float32(2.0**k)
    factors = {"up": factor, "bias": factor, "down": 1 / factor}
    inner = optax.adam(1e-2)

    def update(gradients, state, params=None):
        plain = jax.tree.map(lambda g, f: g * f, gradients, factors)
        updates, state = inner.update(plain, state)
        return jax.tree.map(lambda u, f: u * f, updates, factors), state

    def params():
        plain = {
            "up": normal(0, 16, 32, scale=0.25),
            "bias": np.zeros(32, np.float32),
            "down": normal(1, 32, 4, scale=0.25),
        }
        return jax.tree.map(lambda p, f: p * f, plain, factors)

    def loss_of(params, batch):
        units = jax.nn.relu(batch["x"] @ params["up"] + params["bias"])
        return jnp.square(units @ params["down"] - batch["y"]).mean()

    return case(
        f"hidden units times 2^{k}",
        params,
        loss_of,
        lambda: {"x": normal(2, 32, 16), "y": normal(3, 32, 4)},
        optax.GradientTransformation(inner.init, update),
    )


def second_moments() -> TrainingProgram:
    """Gradients of 1e-7 beside some of 1e3 under one Adam: their squares span 2^66."""

    def loss_of(params, batch):
        residual = params["w"] - 1
        return jnp.sum(batch * jnp.square(residual)) / jnp.sum(batch) + jnp.square(residual).mean()

    weights = np.logspace(-7, 3, 64).astype(np.float32)
    return case(
        "second moments over 2^66",
        lambda: {"w": np.zeros(64, np.float32)},
        loss_of,
        lambda: weights,
        optax.adam(5e-2),
    )


def cases() -> list[TrainingProgram]:
    """Returns all programs in the order of the table."""
    least = float(np.finfo(np.float32).min)
    return [
        masked("mask: -inf", -np.inf), masked("mask: finfo.min", least),
        masked("mask: -1e9", -1e9), added_mask(),
        layer_norm(1e-8, 1.0, 8, "epsilon 1e-8, constant rows"),
        layer_norm(1e-12, 1e-4, 8, "epsilon 1e-12, rows of 1e-4"),
        layer_norm(1e-8, 1e4, 0, "norm of rows of 1e4"),
        dead_units(), one_hot(), second_moments(),
        sum_of_a_million(), norm_of_a_million(), softmax_of_a_million(),
        hidden(40), hidden(-40), hidden(16), hidden(-16),
    ]  # fmt: skip
