"""Measures how far the mean of many random roundings is from a gradient, with and without headroom.

    python -m experiments.operand_bias                # writes docs/operand_bias.json; some minutes

The gradients of a matrix product under recipes that draw operands are averaged over keys, and
compared with those for the same operands undrawn: rounded where the recipe rounds to nearest, and
wide where it draws. ``outliers`` has a column of x, and one of the gradient, 30 times the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import scalewise as sw
from scalewise.autoscaling import Operand

from . import parity
from .recipe_variants import with_headroom

FILE = Path(__file__).parents[1] / "docs" / "operand_bias.json"
RECIPES = ("fp4_all_the_way", "nvfp4", "quartet2")
SIZE, OUTLIER = 128, 30.0
# An operand in float32 is left as it is, without the transform that the other operand has.
NEARLY_FLOAT32 = sw.Format("nearly_float32", exponent_bits=8, mantissa_bits=22)
DRAWS, BATCHES = 4_000, 40  # of keys; the batches' spread gives the standard error


def undrawn(recipe: sw.Recipe) -> sw.Recipe:
    """Returns the recipe with the operands that are drawn left wide."""

    def wide(x: Any) -> Any:
        if not isinstance(x, Operand) or not x.draws:
            return x
        return Operand(NEARLY_FLOAT32, hadamard=x.hadamard) if x.signs == "fixed" else None

    assert recipe.products is not None
    pairs = {
        name: tuple(map(wide, getattr(recipe.products, name)))
        for name in ("forward", "input_gradient", "weight_gradient")
    }
    return recipe.with_products(**pairs)


def arrays(outliers: bool) -> list[jax.Array]:
    """Returns x, w and the gradient of their product."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, g = (jax.random.normal(k, (SIZE, SIZE)) for k in keys)
    if outliers:
        x, g = x.at[:, 3].multiply(OUTLIER), g.at[:, 5].multiply(OUTLIER)
    return [x, w, g]


def gradients(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.grad(lambda x, w: jnp.sum((x @ w) * g), (0, 1))(x, w)


def measured(recipe: sw.Recipe, outliers: bool, draws: int = DRAWS) -> dict[str, list[float]]:
    """Returns bias and standard error of the input's and the weights' gradient, in % of its norm.

    The squared bias is the mean product of two batches' errors, which are independent; 0 where that
    is negative. A bias below twice the standard error of the mean isn't told apart from none.
    """
    given = arrays(outliers)
    recipe = dataclasses.replace(recipe, residuals=None)
    exact = sw.autoscale(gradients, undrawn(recipe))(*given)
    run = sw.autoscale(gradients, recipe, keyed=True)

    @jax.jit
    def batch(keys):
        def add(total, key):
            return jax.tree.map(jnp.add, total, run(key, *given)), None

        zero = jax.tree.map(jnp.zeros_like, exact)
        return jax.lax.scan(add, zero, keys)[0]

    size = draws // BATCHES
    keys = jax.random.split(jax.random.key(7), (BATCHES, size))
    sums = [batch(k) for k in keys]
    found: dict[str, list[float]] = {"bias": [], "error": []}
    for parts, true in zip(zip(*sums, strict=True), exact, strict=True):
        true = np.asarray(true, np.float64)
        errors = np.stack([np.asarray(p, np.float64) / size - true for p in parts])
        own, together = np.sum(errors**2), np.sum(errors.sum(0) ** 2)
        norm = np.linalg.norm(true)
        square = (together - own) / (BATCHES * (BATCHES - 1))
        spread = np.sum((errors - errors.mean(0)) ** 2) / (BATCHES * (BATCHES - 1))
        found["bias"].append(round(100 * float(np.sqrt(max(square, 0)) / norm), 3))
        found["error"].append(round(100 * float(np.sqrt(spread) / norm), 3))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="The bias of recipes that draw operands.")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES)
    parser.add_argument("--out", type=Path, default=FILE)
    given = parser.parse_args()
    rows = []
    for name in given.recipes:
        recipe = sw.recipes.recipe(name)
        for headroom, chosen in ((False, recipe), (True, with_headroom(recipe))):
            row: dict[str, Any] = {"recipe": name, "headroom": headroom}
            for outliers in (False, True):
                row["outliers" if outliers else "normal"] = measured(chosen, outliers, given.draws)
            rows.append(row)
            print(row, flush=True)
    text = json.dumps({"draws": given.draws, "rows": rows, **parity.versions()}, indent=1)
    given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
