"""Trains the GPT by Muon, SOAP and Shampoo under recipes, the optimizer's products rounded or not.

    python -m experiments.optimizers    # an hour; continues where it stopped

Each run is a line of ``docs/optimizers.jsonl``. A recipe rounds all products of the
function that it is given: ``whole step`` is ``autoscale(train_step)``, which includes the
optimizer's, ``gradient`` is ``autoscale(value_and_grad(loss))``, as ``training.step`` does it.
``audit`` is the verdict on the optimizer's update alone, with every operation in the format.
"""

import dataclasses
import json
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

import scalewise as sw
from examples import gpt

FILE = Path(__file__).parents[1] / "docs" / "optimizers.jsonl"
STEPS, LAST, SEEDS, EVERY = 150, 30, (0, 1, 2), 10
RECIPES = ("fp8", "mxfp8", "nvfp4")
FORMATS = ("bf16", "fp16")
Tree = Any


class KroneckerState(NamedTuple):
    """Exponential means of the gradient and of its Gram matrices, and a function of these."""

    count: jax.Array
    mean: Tree
    square: Tree
    left: Tree
    right: Tree
    factors: Tree  # of each matrix, for both sides: found every EVERY steps


class Pair(NamedTuple):
    first: jax.Array
    second: jax.Array


def kronecker(factor: Callable, direction: Callable) -> optax.GradientTransformation:
    """Returns the transformation of matrices by a factor for each side, and a direction."""

    def init(params: Tree) -> KroneckerState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        eyes = jax.tree.map(lambda p: Pair(*(jnp.eye(n, dtype=p.dtype) for n in p.shape)), params)
        left, right = (
            jax.tree.map(lambda p, i=i: jnp.zeros((p.shape[i],) * 2, p.dtype), params)
            for i in (0, 1)
        )
        return KroneckerState(jnp.int32(0), zeros, zeros, left, right, eyes)

    def update(g: Tree, state: KroneckerState, params: Tree = None) -> tuple[Tree, KroneckerState]:
        del params

        def decayed(b: float, old: Tree, new: Tree) -> Tree:
            return jax.tree.map(lambda o, n: b * o + (1 - b) * n, old, new)

        mean = decayed(0.9, state.mean, g)
        left = decayed(0.95, state.left, jax.tree.map(lambda g: g @ g.T, g))
        right = decayed(0.95, state.right, jax.tree.map(lambda g: g.T @ g, g))
        factors = jax.lax.cond(
            state.count % EVERY == 0,
            lambda: jax.tree.map(lambda a, b: Pair(factor(a), factor(b)), left, right),
            lambda: state.factors,
        )
        found = jax.tree.map(direction, g, mean, state.square, factors)
        is_pair = lambda x: isinstance(x, Pair)  # noqa: E731
        updates, square = (
            jax.tree.map(lambda pair, i=i: pair[i], found, is_leaf=is_pair) for i in (0, 1)
        )
        return updates, KroneckerState(state.count + 1, mean, square, left, right, factors)

    return optax.GradientTransformation(init, update)


def inverse_root(matrix: jax.Array) -> jax.Array:
    """Returns the inverse fourth root of a positive semidefinite matrix."""
    values, vectors = jnp.linalg.eigh(matrix)
    return (vectors * jnp.maximum(values, 1e-6 * values[-1] + 1e-30) ** -0.25) @ vectors.T


def shampoo(g: jax.Array, mean: jax.Array, square: jax.Array, roots: Pair) -> Pair:
    """Returns the step of arXiv 1802.09568, of the norm of Adam's, and the second moment."""
    step = roots.first @ mean @ roots.second
    square = 0.95 * square + 0.05 * g * g
    adam = mean / (jnp.sqrt(square) + 1e-8)
    return Pair(step * jnp.linalg.norm(adam) / (jnp.linalg.norm(step) + 1e-30), square)


def soap(g: jax.Array, mean: jax.Array, square: jax.Array, bases: Pair) -> Pair:
    """Returns the step of arXiv 2409.11321, Adam's in the eigenbasis, and its second moment."""
    left, right = bases
    square = 0.95 * square + 0.05 * (left.T @ g @ right) ** 2
    return Pair(left @ ((left.T @ mean @ right) / (jnp.sqrt(square) + 1e-8)) @ right.T, square)


def by_matrix(scale: optax.GradientTransformation, rate: float) -> optax.GradientTransformation:
    """Returns an optimizer of the blocks' matrices by ``scale``, and of the rest by Adam."""

    def label(path: Any, x: jax.Array) -> str:
        return "matrix" if "blocks" in jax.tree_util.keystr(path) and x.ndim == 2 else "rest"

    def labels(params: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(label, params)

    chosen = {"matrix": optax.chain(scale, optax.scale(-rate)), "rest": optax.adam(1e-3)}
    return optax.partition(chosen, labels)


def dimensions(params: Tree) -> Tree:
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), params)


MUON = optax.contrib.scale_by_muon(weight_dimension_numbers=dimensions)
OPTIMIZERS = {
    "Muon": by_matrix(MUON, 5e-3),
    "SOAP": by_matrix(kronecker(lambda m: jnp.linalg.eigh(m)[1], soap), 1e-3),
    "Shampoo": by_matrix(kronecker(inverse_root, shampoo), 1e-3),
}


def step_of(optimizer: optax.GradientTransformation, recipe: str | None, whole: bool) -> Callable:
    gradient = jax.value_and_grad(gpt.loss_of)
    if recipe and not whole:
        gradient = sw.autoscale(gradient, recipe)

    def train_step(state: Tree, batch: jax.Array) -> tuple[Tree, jax.Array]:
        loss, g = gradient(state["params"], batch)
        updates, new = optimizer.update(g, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": new}, loss

    return sw.autoscale(train_step, recipe) if recipe and whole else train_step


def initial(optimizer: optax.GradientTransformation, seed: int) -> Tree:
    params = gpt.init(seed)["params"]
    return {"params": params, "optimizer": optimizer.init(params)}


def runs() -> Iterator[tuple[str, str, str]]:
    for name in OPTIMIZERS:
        yield name, "float32", ""
        for recipe in RECIPES:
            yield from ((name, recipe, what) for what in ("gradient", "whole step"))


def losses(name: str, recipe: str, what: str) -> list[float]:
    """Returns the mean of the last losses of a run for each seed."""
    optimizer = OPTIMIZERS[name]
    named = None if recipe == "float32" else recipe
    step = jax.jit(step_of(optimizer, named, what == "whole step"))
    data, found = Path(str(gpt.__file__)).read_bytes(), []
    for seed in SEEDS:
        state, last = initial(optimizer, seed), []
        for _, batch in zip(range(STEPS), gpt.batches(data, seed), strict=False):
            state, loss = step(state, batch)
            last.append(float(loss))
        found.append(statistics.fmean(last[-LAST:]))
    return found


def audited(name: str, fmt: str) -> dict[str, Any]:
    """Returns what the audit says of the eleventh update, with each operation in a format."""
    optimizer = OPTIMIZERS[name]
    step = jax.jit(step_of(optimizer, None, False))
    data, state = Path(str(gpt.__file__)).read_bytes(), initial(optimizer, 0)
    for _, batch in zip(range(10), gpt.batches(data, 0), strict=False):
        state, _ = step(state, batch)
    g = jax.grad(gpt.loss_of)(state["params"], next(gpt.batches(data, 1)))
    report = sw.audit(lambda g, s: optimizer.update(g, s)[0]["blocks"][0]["up"], fmt)(
        g, state["optimizer"]
    )
    first = report.findings[0] if report.findings else None
    place = "" if first is None else f"{first.kind} in {first.primitive} ({first.function})"
    return {"first": place, "error": str(report.error)}


def tables() -> tuple[str, str]:
    """Returns the tables of ``docs/guides/optimizers.md``: losses, and audits."""
    found = [json.loads(line) for line in FILE.read_text().splitlines()]
    means = {
        (r["optimizer"], r["arithmetic"], r["what"]): statistics.fmean(r["losses"])
        for r in found
        if "losses" in r
    }
    lines = ["| arithmetic | optimizer's products |" + "".join(f" {n} |" for n in OPTIMIZERS)]
    lines += ["|---|---|" + "---:|" * len(OPTIMIZERS)]
    for recipe in ("float32", *RECIPES):
        kinds = {"gradient": "left alone", "whole step": "rounded"}
        for what, words in {"": ""}.items() if recipe == "float32" else kinds.items():
            cells = [f"{means[n, recipe, what]:.3f}" for n in OPTIMIZERS]
            lines.append(f"| `{recipe}` | {words} | {' | '.join(cells)} |")
    audits = ["| optimizer | format | error of the update | first finding |", "|---|---|---:|---|"]
    for r in found:
        if r["what"] == "audit":
            first = re.sub(r"\((.*)\)", r"(`\1`)", r["first"]) or "no single line"
            cells = (r["optimizer"], f"`{r['arithmetic']}`", r["error"], first)
            audits.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines), "\n".join(audits)


def main() -> None:
    gpt.CONFIG = dataclasses.replace(gpt.CONFIG, width=64, context=64)
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    done = {(r["optimizer"], r["arithmetic"], r["what"]) for r in map(json.loads, lines)}
    every = [*runs(), *((n, f, "audit") for n in OPTIMIZERS for f in FORMATS)]
    for name, arithmetic, what in every:
        if (name, arithmetic, what) in done:
            continue
        row: dict[str, Any] = {"optimizer": name, "arithmetic": arithmetic, "what": what}
        if what == "audit":
            row |= audited(name, arithmetic)
        else:
            row["losses"] = losses(name, arithmetic, what)
        with FILE.open("a") as file:
            print(json.dumps(row), file=file)
        print(row, flush=True)
    print(*tables(), sep="\n\n")


if __name__ == "__main__":
    main()
