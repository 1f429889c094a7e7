"""Trains models under every recipe, and under recipes that lack one part, beside float32.

    python -m experiments.recipe_training                    # continues where it stopped
    python -m experiments.recipe_training --sets gpt ablations --seeds 0
    python -m experiments.recipe_training --sets long --folder runs/long

Each run is a line of ``docs/recipe_training.jsonl``. All runs of a model and a seed have the same
initial parameters and batches. The row ``float32, moved`` says how much a loss depends on chance
alone: float32 again, each number of the initial parameters moved by at most 2^-12 of itself.
The runs of ``long`` take an hour each; they have checkpoints in ``--folder``, and continue there.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from examples.train import train as train_by_steps

from scalewise import training
from scalewise.cli import _methods
from scalewise.cli._methods import Method
from scalewise.cli._program import TrainingProgram

from . import models, parity
from .recipe_variants import (
    ABLATIONS,
    CHANCE,
    DEVICES,
    LONG,
    RECIPES,
    STATE_ABLATIONS,
    STATES,
    TARGETS,
    VARIANTS,
)  # fmt: skip

FILE = Path(__file__).parents[1] / "docs" / "recipe_training.jsonl"
LAST = 50  # the loss of a run is the mean over its last steps
POINTS = 20  # of a curve
PLANTED, OUTLIER = 4, 64.0  # channels, and what their norms' gains are multiplied by


@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs of one model: recipes, seeds and steps."""

    model: str
    recipes: tuple[str, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 150


SETS: Mapping[str, Runs] = {
    "targets": Runs("gpt", TARGETS, seeds=(0, 1, 2, 3, 4)),
    "outliers": Runs("gpt, outliers", ("float32", CHANCE, "fp8", "fp8_blockwise", "mxfp8")),
    "mlp": Runs("mlp", RECIPES + STATES),
    "ablations": Runs("gpt", (*ABLATIONS, *STATE_ABLATIONS)),
    "gpt": Runs("gpt", RECIPES + STATES),
    "moe": Runs("moe", RECIPES),
    "resnet": Runs("resnet", RECIPES),
    "devices": Runs("gpt, 100 steps", ("float32", CHANCE, "fp8", *DEVICES), (0,), steps=100),
    "long": Runs("gpt, 20 million parameters", LONG, seeds=(0,), steps=2000),
}


def program(name: str) -> TrainingProgram:
    """Returns a model: an example, or the GPT with outlier channels, or with more parameters."""
    name, _, variant = name.partition(", ")
    found = models.model(name)
    if variant == "outliers":
        return dataclasses.replace(found, init=lambda seed: planted(found.init(seed)))
    if variant.endswith("parameters"):
        module = models.module_of(found)
        module.CONFIG = dataclasses.replace(module.CONFIG, width=640, heads=10, layers=4, batch=1)
        schedule = optax.warmup_cosine_decay_schedule(0, 6e-4, 100, SETS["long"].steps, 6e-5)
        module.OPTIMIZER = optax.adamw(schedule, weight_decay=0.01)
        found = dataclasses.replace(found, optimizer=module.OPTIMIZER)
    return found


def planted(state: Any) -> Any:
    """Returns the GPT's state with outlier channels after each norm, and the same function.

    The gains of ``PLANTED`` channels are multiplied by ``OUTLIER``, and what reads them is divided.
    """

    def block(p: Any) -> Any:
        changed = dict(p)
        for norm, reader in (("norm_1", "qkv"), ("norm_2", "up")):
            channels = np.arange(PLANTED) * p[norm]["gain"].size // PLANTED
            gains = {name: x.at[channels].multiply(OUTLIER) for name, x in p[norm].items()}
            changed |= {norm: gains, reader: p[reader].at[channels].divide(OUTLIER)}
        return changed

    params = state["params"]
    return state | {"params": params | {"blocks": [block(p) for p in params["blocks"]]}}


def method(name: str) -> Method:
    """Returns how a recipe, a variant of one or an optimizer's state runs a training step."""
    if name in VARIANTS:
        return Method(name, recipe=VARIANTS[name])
    if name in STATE_ABLATIONS:
        return Method(name, options={"moments": STATE_ABLATIONS[name]})
    return _methods.method("float32" if name == CHANCE else name)


def train(
    model: TrainingProgram, name: str, steps: int, seeds: Iterable[int]
) -> Iterable[dict[str, Any]]:
    """Makes a run for each seed with one compiled step, and yields its losses."""
    prepare, step = method(name).build(model)
    compiled: Callable[..., Any] | None = None
    for seed in seeds:
        state, stream = model.init(seed), iter(models.batches(model, seed))
        if name == CHANCE:
            state |= {"params": parity.moved(state["params"])}
        batch = next(stream)
        state = prepare(state, batch)
        if compiled is None:
            compiled = jax.jit(step).lower(state, batch).compile()
        losses, times = [], []
        for _ in range(steps):
            start = time.perf_counter()
            state, loss = jax.block_until_ready(compiled(state, batch))
            times.append(time.perf_counter() - start)
            losses.append(float(jnp.asarray(loss)))
            batch = next(stream)
        yield {"seed": seed, **summary(losses), "step_ms": round(statistics.median(times) * 1e3, 1)}


def summary(losses: list[float]) -> dict[str, Any]:
    """Returns a run's final loss, its curve, and how many losses aren't finite."""
    every = max(len(losses) // POINTS, 1)
    parts = [losses[i : i + every] for i in range(0, len(losses), every)]
    loss = statistics.fmean(losses[-LAST:])
    finite = np.isfinite(losses)
    return {
        "loss": loss if np.isfinite(loss) else None,
        "non_finite": int((~finite).sum()),
        "curve": [round(m, 4) if np.isfinite(m) else None for m in map(statistics.fmean, parts)],
    }


def train_long(runs: Runs, recipe: str, folder: Path) -> dict[str, Any]:
    """Makes or continues a long run by examples/train.py, and returns its losses."""
    model = program(runs.model)
    if recipe == CHANCE:
        first = model.init

        def init(seed: int) -> Any:
            state = first(seed)
            return state | {"params": parity.moved(state["params"])}

        model = dataclasses.replace(model, init=init)
    assert model.loss_of is not None
    policy = None if recipe in ("float32", CHANCE) else recipe
    step = training.step(model.loss_of, model.optimizer, policy)
    out, data = folder / recipe.replace(", ", "_"), models.text()[: models.TRAINED_ON]
    train_by_steps(model, step, out, data=data, steps=runs.steps)
    lines = (out / "metrics.jsonl").read_text("utf-8").splitlines()
    return {"seed": 0, **summary([json.loads(line)["loss"] for line in lines])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Trains models under every recipe, beside float32."
    )
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--recipes", nargs="+", default=(), help="of the sets; all if none given")
    parser.add_argument("--seeds", nargs="+", type=int, help="only these of each set's")
    parser.add_argument("--folder", type=Path, default=Path("runs/long"), help="of the long runs")
    parser.add_argument("--out", type=Path, default=FILE)
    given = parser.parse_args()
    for chosen in given.sets:
        runs = SETS[chosen]
        for recipe in runs.recipes:
            there = {parity.key(row) for row in parity.rows(given.out)}
            about = {"model": runs.model, "recipe": recipe, "steps": runs.steps}
            seeds = [s for s in runs.seeds if given.seeds is None or s in given.seeds]
            seeds = [s for s in seeds if parity.key(about | {"seed": s}) not in there]
            if not seeds or (given.recipes and recipe not in given.recipes):
                continue
            made = (
                [train_long(runs, recipe, given.folder)]
                if chosen == "long"
                else train(program(runs.model), recipe, runs.steps, seeds)
            )
            for found in made:
                line = json.dumps(about | found | parity.versions())
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
                print(line, flush=True)
            jax.clear_caches()


if __name__ == "__main__":
    main()
