"""Trains the examples under autoscale and in float32 on the same data, and compares losses.

    python -m proofs.parity                     # continues where it stopped
    python -m proofs.parity --models gpt --recipes fp8 --steps 300

Each run is a line of ``docs/parity.jsonl``: the whole training step (forward, backward, optimizer)
under a recipe, or as it is. The row ``float32, moved`` says how much a loss depends on chance
alone: float32 again, each number of the initial parameters moved by at most half a unit in FP16's
last place.
"""

import argparse
import datetime
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import scalewise as sw
from scalewise.training import Program, all_finite

from . import models

FILE = Path(__file__).parents[1] / "docs" / "parity.jsonl"
RECIPES = ("float32", "float32, moved", "fp16_every_op", "scalify", "fp16", "fp8")
STEPS, LAST = 300, 20


def moved(params: Any) -> Any:
    """Returns the parameters, each moved by less than FP16's spacing."""
    random = np.random.default_rng(0)

    def leaf(x):
        return x * (1 + 2.0**-12 * random.uniform(-1, 1, x.shape)).astype(x.dtype)

    return jax.tree.map(leaf, params)


def under(recipe: str, f: Any) -> Any:
    return f if recipe.startswith("float32") else sw.autoscale(f, recipe)


def train(program: Program, recipe: str, steps: int, seed: int = 0) -> dict[str, Any]:
    """Makes one run; returns its last losses, the held-out loss, and counts of non-finite steps."""

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
    held = models.held_out(program)
    evaluate = jax.jit(under(recipe, models.evaluation(program)))
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
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--again", action="store_true", help="also what is there already")
    parser.add_argument("--out", type=Path, default=FILE)
    given = parser.parse_args()
    there = set() if given.again else {key(row) for row in rows(given.out)}
    for name in given.models:
        for recipe in given.recipes:
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
