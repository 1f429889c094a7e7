"""Measures the five kinds of scaling that the Scalify design compares, on one small network.

``python -m proofs.scaling_kinds`` writes ``docs/scaling_kinds.json``, from which
``docs/scalify_page.py`` makes its table. The network, its data and its initial weights are the same
for all five; takes about two minutes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import scalewise as sw
from scalewise import training
from scalewise.formats import E5M2

OUT = Path(__file__).parents[1] / "docs" / "scaling_kinds.json"
RECIPES = {
    "bias": sw.recipes.fp8,
    "unit": sw.recipes.unit_scaling,
    "propagated": sw.recipes.scalify,
}
KINDS = ("static", "automatic", "bias", "unit", "propagated")
WIDTH, BATCH, STEPS = 64, 128, 60
SMALL = 2.0**-34  # the loss is multiplied by it where FP16's gradients need a scale

Tree = Any


def network(seed: int = 0) -> tuple[Tree, Tree]:
    """Returns weights and a batch of a network of three layers with GELUs between."""
    keys = jax.random.split(jax.random.key(seed), 5)
    weights = [
        jax.random.normal(k, (WIDTH, n)) / np.sqrt(WIDTH)
        for k, n in zip(keys, (WIDTH, WIDTH, 1), strict=False)
    ]
    x = jax.random.normal(keys[3], (BATCH, WIDTH))
    return weights, (x, jnp.sin(x[:, :1]))


def loss(weights: Tree, batch: Tree, factor: jax.typing.ArrayLike = 1.0) -> jax.Array:
    """The mean squared error times a factor."""
    x, target = batch
    for w in weights[:-1]:
        x = jax.nn.gelu(x @ w)
    return jnp.mean(jnp.square(x @ weights[-1] - target)) * factor


def in_fp16(weights: Tree, batch: Tree, factor: jax.typing.ArrayLike, scale: Any) -> jax.Array:
    """The loss with products in FP16, times a loss scale: as loss scaling has it."""
    half = partial(jax.tree.map, lambda x: x.astype(jnp.float16))
    x, target = half(batch)
    for w in half(weights)[:-1]:
        x = jax.nn.gelu(x @ w)
    error = (x @ half(weights)[-1] - target).astype(jnp.float32)
    return jnp.mean(jnp.square(error)) * factor * scale


def unit_scaled(weights: Tree, batch: Tree) -> jax.Array:
    """The network as unit scaling publishes it: weights of unit variance, products scaled.

    Each product is divided by sqrt(fan in) forward (arXiv 2303.11257, constraint of one scale).
    """
    x, target = batch
    for w in weights[:-1]:
        x = jax.nn.gelu(x @ w / np.sqrt(WIDTH)) * 1.6  # keeps unit variance
    return jnp.mean(jnp.square(x @ weights[-1] / np.sqrt(WIDTH) - target))


def lost(found: Tree, exact: Tree) -> float:
    """Returns the share of nonzero gradient elements that became zero or infinite."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True))
    gone = sum(int(jnp.sum(((f == 0) & (e != 0)) | ~jnp.isfinite(f))) for f, e in pairs)
    return gone / sum(int(jnp.sum(e != 0)) for _, e in pairs)


def gradients(kind: str, weights: Tree, batch: Tree, factor: float, scale: Any = None) -> Tree:
    """Returns the gradients in the first step, by one kind of scaling."""
    if kind in ("static", "automatic"):
        scale = scale if scale is not None else scaling(kind).init().scale
        found = jax.grad(in_fp16)(weights, batch, factor, scale)
        return jax.tree.map(lambda g: g / scale, found)
    step = jax.grad(partial(loss, factor=factor))
    return sw.autoscale(step, RECIPES[kind])(weights, batch)


def scaling(kind: str) -> Any:
    if kind == "static":
        return training.StaticLossScale()
    return training.DynamicLossScale(interval=5)


RECIPES = {
    "bias": sw.recipes.fp8,
    "unit": sw.recipes.unit_scaling,
    "propagated": sw.recipes.scalify,
}


def sources(kind: str, weights: Tree, batch: Tree) -> dict[str, int]:
    """Returns how many scales a step has of each source: propagated, found from data, ..."""
    if kind in ("static", "automatic"):
        doubled = gradients(kind, weights, batch, 1.0, 2.0**14)
        plain = gradients(kind, weights, batch, 1.0, 2.0**13)
        same = [bool(jnp.all(a == b)) for a, b in zip(doubled, plain, strict=True)]
        return {"propagated": sum(same), "rows": len(same), "scales": 1}
    rows = sw.explain(jax.value_and_grad(loss), RECIPES[kind])(weights, batch).rows
    rows = [r for r in rows if r.scale != "none"]
    moved = sum(r.scale == "propagated" for r in rows)
    return {"propagated": moved, "rows": len(rows), "scales": len(rows)}


def scales_over_time(kind: str, weights: Tree, batch: Tree) -> int:
    """Returns how many scales the first layer's gradient had while the loss shrank by 2^-30."""
    seen, state = set(), scaling(kind).init()
    plain = jax.jit(jax.grad(lambda w, b, f: loss(w, b, f)))
    scaled = jax.jit(sw.autoscale(jax.grad(lambda w, b, f: loss(w, b, f)), RECIPES["propagated"]))
    half = jax.jit(jax.grad(in_fp16))
    for step in range(STEPS):
        factor = jnp.float32(2.0 ** (-30 * step / STEPS))
        if kind in ("static", "automatic"):
            found = half(weights, batch, factor, state.scale)
            seen.add(float(state.scale))
            state = scaling(kind).update(state, training.all_finite(found))
        elif kind == "bias":
            seen.add(float(sw.quantize(plain(weights, batch, factor)[0], E5M2).scale))
        elif kind == "unit":
            g = plain(weights, batch, factor)[0]
            seen.add(float(sw.quantize(g, E5M2, scaling=sw.Unit(BATCH)).scale))
        else:
            arguments = sw.scaled.as_scaled((weights, batch, factor), "l2", dtype=jnp.float16)
            seen.add(float(scaled(*arguments)[0].scale))
    return len(seen)


def changes(kind: str, weights: Tree, batch: Tree) -> dict[str, float]:
    """Returns how far the loss of the first step is from float32's: rounding, or another model."""
    exact = float(loss(weights, batch))
    if kind in ("static", "automatic"):
        found = in_fp16(weights, batch, 1.0, 1.0)
    else:
        found = sw.autoscale(loss, RECIPES[kind])(weights, batch)
    result = {"ours": abs(float(found) / exact - 1)}
    if kind == "unit":
        result["published"] = abs(float(unit_scaled(weights, batch)) / exact - 1)
    return result


def measure() -> dict[str, dict[str, Any]]:
    """Returns all figures, by kind."""
    weights, batch = network()
    exact = jax.grad(partial(loss, factor=SMALL))(weights, batch)
    found: dict[str, Callable[[str], Any]] = {
        "sources": lambda kind: sources(kind, weights, batch),
        "scales over time": lambda kind: scales_over_time(kind, weights, batch),
        "lost at once": lambda kind: lost(gradients(kind, weights, batch, SMALL), exact),
        "changes": lambda kind: changes(kind, weights, batch),
    }
    return {kind: {name: f(kind) for name, f in found.items()} for kind in KINDS}


if __name__ == "__main__":
    figures = {"JAX": jax.__version__, "steps": STEPS, "kinds": measure()}
    OUT.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))
