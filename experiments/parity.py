"""Trains the examples under autoscale and in float32 on the same data, and compares losses.

    python -m experiments.parity                     # continues where it stopped
    python -m experiments.parity --models gpt --recipes fp8 --steps 300

Each run is a line of ``docs/parity.jsonl``: the whole training step (forward, backward, optimizer)
under a recipe, or as it is. The row ``float32, moved`` says how much a loss depends on chance
alone: float32 again, each number of the initial parameters moved by at most half a unit in FP16's
last place. Under ``bfloat16`` float32 parameters are cast to bfloat16 for the loss, as
mixed-precision programs are written; a recipe after the comma is applied to that step, whose values
in flight are bfloat16 too unless it says otherwise.
"""

import argparse
import dataclasses
import datetime
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import scalewise as sw
from scalewise.cli._program import TrainingProgram
from scalewise.training import all_finite

from . import models

FILE = Path(__file__).parents[1] / "docs" / "parity.jsonl"
RECIPES = ("float32", "float32, moved", "fp16_every_op", "scalify", "fp16", "fp8")
# A network of each kind whose loss can be computed in bfloat16 by a cast of its parameters.
CAST_MODELS = ("mlp", "cnn", "gpt", "moe")
CAST = "bfloat16"
WIDE_FLIGHT = "fp8, float32 in flight"
CAST_RECIPES = (CAST, f"{CAST}, bf16", f"{CAST}, fp8", f"{CAST}, {WIDE_FLIGHT}")
STEPS, LAST = 300, 20


def moved(params: Any) -> Any:
    """Returns the parameters, each moved by less than FP16's spacing."""
    random = np.random.default_rng(0)

    def leaf(x):
        return x * (1 + 2.0**-12 * random.uniform(-1, 1, x.shape)).astype(x.dtype)

    return jax.tree.map(leaf, params)


def under(recipe: str, f: Any) -> Any:
    """Returns a function under a recipe; ``float32`` and ``bfloat16`` are no recipes."""
    if recipe.startswith("float32"):
        return f
    inner = recipe.removeprefix(CAST).removeprefix(", ")
    if inner == WIDE_FLIGHT:
        return sw.autoscale(f, dataclasses.replace(sw.recipes.fp8, flight="float32"))
    return sw.autoscale(f, inner) if inner else f


def in_bfloat16(program: TrainingProgram) -> TrainingProgram:
    """Returns the program with its parameters and data cast to bfloat16 for the loss."""
    loss_of, optimizer = program.loss_of, program.optimizer
    assert loss_of is not None
    assert optimizer is not None

    def cast(x):
        return x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def loss_in_bfloat16(params, batch):
        return loss_of(*jax.tree.map(cast, (params, batch))).astype(jnp.float32)

    def train_step(state, batch):
        loss, gradients = jax.value_and_grad(loss_in_bfloat16)(state["params"], batch)
        updates, inner = optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": inner}, loss

    return dataclasses.replace(program, train_step=train_step, loss_of=loss_in_bfloat16)


def train(program: TrainingProgram, recipe: str, steps: int, seed: int = 0) -> dict[str, Any]:
    """Makes one run; returns its last losses, the held-out loss, and counts of non-finite steps."""

    held, evaluated = models.held_out(program), models.evaluation(program)
    if recipe.startswith(CAST):
        program = in_bfloat16(program)
        evaluated = lambda state, batch: program.loss_of(state["params"], batch)  # noqa: E731

    def step(state, batch):
        state, loss = under(recipe, program.train_step)(state, batch)
        return state, loss, all_finite((state["params"], loss))

    state, stream = program.init(seed), iter(models.batches(program, seed))
    if recipe == "float32, moved":
        state |= {"params": moved(state["params"])}
    batch, start = next(stream), time.perf_counter()
    compiled = jax.jit(step).lower(state, batch).compile()
    compiling = time.perf_counter() - start
    losses, finite, times = [], [], []
    for number in range(steps):
        start = time.perf_counter()
        state, loss, good = jax.block_until_ready(compiled(state, batch))
        times.append(time.perf_counter() - start)
        losses.append(float(loss))
        finite.append(bool(good))
        batch = next(stream) if number + 1 < steps else batch
    evaluate = jax.jit(under(recipe, evaluated))
    return {
        "loss": statistics.fmean(losses[-LAST:]),
        "held_out": statistics.fmean(float(evaluate(state, b)) for b in held) if held else None,
        "first": losses[0],
        "non_finite": finite.count(False),
        "compile_s": round(compiling, 1),
        "step_ms": round(statistics.median(times) * 1e3, 2),
    }


def versions() -> dict[str, str]:
    return {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def key(row: dict[str, Any]) -> tuple:
    return row["model"], row["recipe"], row["steps"], row["seed"]


def rows(file: Path) -> list[dict[str, Any]]:
    """Reads a file of JSON lines; of two with the same key, the later is kept."""
    lines = file.read_text().splitlines() if file.exists() else []
    return list({key(row): row for row in map(json.loads, lines)}.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=models.MODELS, choices=models.MODELS)
    parser.add_argument("--recipes", nargs="+", default=())
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--again", action="store_true", help="also what is there already")
    parser.add_argument("--out", type=Path, default=FILE)
    given = parser.parse_args()
    there = set() if given.again else {key(row) for row in rows(given.out)}
    for name in given.models:
        for recipe in given.recipes or (*RECIPES, *(CAST_RECIPES if name in CAST_MODELS else ())):
            for seed in given.seeds:
                about = {"model": name, "recipe": recipe, "steps": given.steps, "seed": seed}
                if key(about) in there:
                    continue
                row = about | train(models.model(name), recipe, given.steps, seed) | versions()
                with given.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
                jax.clear_caches()


if __name__ == "__main__":
    main()
