"""Measures without training what each recipe does to a trained model's gradient and operands.

    python -m experiments.recipe_numbers                  # continues where it stopped

Each model is trained in float32 for some steps; then the loss and its gradient are computed under
each recipe for one batch. A line of ``docs/recipe_numbers.jsonl`` has, for each array of
parameters, cosine and signal-to-noise ratio of its gradient beside float32's, and of all operands
of all products, by role, the shares that were flushed to zero and cut off at the largest number,
and the bits that hold them: ``rounded_operands`` gives the numbers that the recipe multiplies.
"""

import argparse
import collections
import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import scalewise as sw
from scalewise.autoscaling import Boundaries, Operands, Setup, WithHistory
from scalewise.autoscaling._predict import role_of
from scalewise.formats import BlockFormat
from scalewise.interpret import RoundedOperand, transform

from . import models, parity
from .recipe_training import SETS, program
from .recipe_variants import ABLATIONS, CHANCE, RECIPES, VARIANTS

FILE = Path(__file__).parents[1] / "docs" / "recipe_numbers.jsonl"
MODELS = ("gpt", "gpt, outliers", SETS["devices"].model)
STEPS = 100  # in float32, before anything is measured


class Log:
    """Sums over the operands of a program, by role."""

    def __init__(self):
        self.measures = True
        self.sums = collections.defaultdict(lambda: collections.defaultdict(float))

    def trace(self, role: str, bits: float, operand: RoundedOperand | None, size: int) -> None:
        """Has the compiled program add an operand; ``operand`` is None if it isn't rounded."""
        counts = {}
        if operand is not None:
            exact = operand.exact
            counts = {
                "nonzero": jnp.count_nonzero(exact),
                "flushed": jnp.count_nonzero((exact != 0) & (operand.rounded == 0)),
                "saturated": jnp.count_nonzero(operand.saturated),
                "rounded": jnp.asarray(exact.size),
            }
        jax.debug.callback(functools.partial(self.add, role, bits, size), counts)

    def add(self, role: str, bits: float, size: int, counts: dict[str, Any]) -> None:
        """Adds one operand."""
        sums = self.sums[role]
        sums["numbers"] += size
        sums["bits"] += bits * size
        for name, count in counts.items():
            sums[name] += int(count)

    def rows(self) -> dict[str, dict[str, float]]:
        """Returns the shares of each role, and of all together."""
        roles = dict(self.sums)
        total = collections.defaultdict(float)
        for sums in roles.values():
            for name, value in sums.items():
                total[name] += value
        return {role: _shares(sums) for role, sums in {**roles, "all": total}.items() if sums}


def _shares(sums: dict[str, float]) -> dict[str, float]:
    return {
        "bits": sums["bits"] / sums["numbers"],
        "flushed": sums["flushed"] / max(sums["nonzero"], 1),
        "saturated": sums["saturated"] / max(sums["rounded"], 1),
    }


@dataclasses.dataclass(frozen=True)
class Measured(Operands):
    """Operands as a recipe rounds them, each of which is also added to a log."""

    log: Log = dataclasses.field(default_factory=Log)

    def operands(self, equation, values):
        if self.log.measures:
            self.log.measures = False  # what follows asks for the operands again
            settings = self.settings(equation, values)
            found = iter(self.rounded_operands(equation, values))
            for value, setting in zip(values, settings, strict=True):
                bits = 8 * value.data.dtype.itemsize if setting is None else width(setting.format)
                self.log.trace(role(value), bits, setting and next(found), value.data.size)
            self.log.measures = True
        return super().operands(equation, values)


def role(value: Any) -> str:
    if value.origin == "backward":
        return "gradient"
    return role_of(value) or ("weight" if value.origin == "stored" else "activation")


def width(fmt: Any) -> float:
    """Returns the bits that hold a number, its part of a block's scale included."""
    return (
        fmt.element.bits + fmt.scale.bits / fmt.size if isinstance(fmt, BlockFormat) else fmt.bits
    )


def gradients(
    loss_and_gradient: Any, recipe: sw.Recipe, params: Any, batch: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """Returns loss and gradient under a recipe, and what its operands were rounded to."""
    scaled = sw.autoscale(loss_and_gradient, recipe)
    if isinstance(scaled, WithHistory):
        (loss, found), _ = scaled.step(scaled.init(params, batch), params, batch)
        return loss, found, {}
    if isinstance(recipe, sw.Scalify):
        return (*jax.jit(scaled)(params, batch), {})
    measured = Measured(Setup(recipe))
    by = Boundaries(measured)
    loss, found = jax.jit(transform(loss_and_gradient, by, name="measured"))(params, batch)
    jax.effects_barrier()
    return loss, found, measured.log.rows()


def compared(found: Any, exact: Any) -> dict[str, dict[str, float | None]]:
    """Returns cosine and SQNR (dB) of each array of a gradient beside the exact one."""
    rows = {}
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(exact), strict=True
    ):
        a, b = np.asarray(x, np.float64).ravel(), np.asarray(y, np.float64).ravel()
        norms, noise = np.linalg.norm(a) * np.linalg.norm(b), np.linalg.norm(a - b)
        if norms:
            ratio = 20 * math.log10(np.linalg.norm(b) / noise) if noise else None
            rows[jax.tree_util.keystr(path)] = {"cosine": float(a @ b / norms), "sqnr": ratio}
    return rows


def trained(name: str) -> tuple[Any, Any, Any]:
    """Returns a model, its parameters after some steps in float32, and the next batch."""
    model = program(name)
    state, stream, step = model.init(0), iter(models.batches(model, 0)), jax.jit(model.train_step)
    for _ in range(STEPS):
        state, _ = step(state, next(stream))
    return model, state["params"], next(stream)


def _recipes(model: str) -> tuple[str, ...]:
    own = {runs.model: runs.recipes for runs in (SETS["outliers"], SETS["devices"])}
    return own.get(model, (*RECIPES, *ABLATIONS))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="What each recipe does to a gradient and its operands."
    )
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--recipes", nargs="+", default=())
    parser.add_argument("--out", type=Path, default=FILE)
    given = parser.parse_args()
    for name in given.models:
        there = {row["recipe"] for row in parity.rows(given.out) if row["model"] == name}
        wanted = given.recipes or _recipes(name)
        missing = [r for r in wanted if r not in there and r not in ("float32", CHANCE)]
        if not missing:
            continue
        model, params, batch = trained(name)
        function = jax.value_and_grad(model.loss_of)
        exact = jax.jit(function)(params, batch)
        for recipe in missing:
            chosen = VARIANTS.get(recipe) or sw.recipes.CATALOGUE[recipe]
            loss, found, operands = gradients(function, chosen, params, batch)
            row = {"model": name, "recipe": recipe, "steps": STEPS, "seed": 0}
            row |= {"loss": float(loss) / float(exact[0]), "gradient": compared(found, exact[1])}
            line = json.dumps(row | {"operands": operands} | parity.versions())
            with given.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            worst = min(x["cosine"] for x in row["gradient"].values())
            print(name, recipe, f"worst cosine {worst:.4f}", operands.get("all"), flush=True)
            jax.clear_caches()


if __name__ == "__main__":
    main()
