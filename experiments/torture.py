"""Trains the models, and small programs on which FP16 fails, in units beyond FP16's range.

    python -m experiments.torture                    # continues where it stopped
    python -m experiments.torture --cases gpt moe --methods fp8

Each model is trained for a few steps as it is and with its inputs, its weights or its loss
multiplied by 2^40 and by 2^-40: the same optimisation in other units, see ``units.py``. A run
passes if all its losses are finite and the mean of the last five lies within 2 % of float32's, of
the model as it is. Steps that a loss scale leaves out don't count, and are made up for.
"""

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import scalewise as sw
from scalewise.cli._methods import METHODS
from scalewise.cli._program import TrainingProgram
from scalewise.training import DynamicLossScale, step

from . import models
from .cases import cases
from .parity import versions
from .units import Units, program_in_units, scaled

FILE = Path(__file__).parents[1] / "docs" / "torture.jsonl"
AUTOSCALE = ("fp16", "fp16_every_op", "fp8")
KEPT = "fp16_every_op, optimizer in FP32"
RECIPES = {name: getattr(sw.recipes, name) for name in AUTOSCALE} | {
    KEPT: dataclasses.replace(sw.recipes.fp16_every_op, keep={"optimizer": "fp32"})
}
METHODS_HERE = ("float32", "fp16-plain", "loss-scaled", "autocast", *RECIPES)
VARIANTS = (
    ("as it is", "", 0),
    *((f"{x} times 2^{k}", x, k) for x in ("inputs", "weights", "loss") for k in (40, -40)),
)
LINE_SEARCH = ("logistic",)  # its line search evaluates unscaled losses: a loss scale can't be used
STEPS, LAST, TOLERANCE, PATIENCE = 20, 5, 0.02, 60


def narrowed(tree: Any) -> Any:
    def leaf(x):
        return x.astype(jnp.float16) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(leaf, jax.tree.map(jnp.asarray, tree))


def method(name: str, program: TrainingProgram) -> tuple[Callable, Callable]:
    """Returns the function to the method's initial state, and its step: (state, loss, made)."""
    if name == "float32" or name in RECIPES:
        whole = program.train_step
        whole = whole if name == "float32" else sw.autoscale(whole, RECIPES[name])
        return lambda state: state, lambda state, batch: (*whole(state, batch), True)
    if name == "fp16-plain":
        prepare_with, whole = METHODS[name].build(program)
        return lambda state: prepare_with(state, None), lambda state, batch: (
            *whole(state, batch),
            True,
        )
    assert program.loss_of is not None
    assert program.optimizer is not None
    inner = program.loss_of
    if name == "autocast":
        train = step(inner, program.optimizer, "c=f16", scaling=DynamicLossScale())
    else:  # everything but the master weights and the optimizer in float16
        train = step(
            lambda params, batch: inner(narrowed(params), narrowed(batch)),
            program.optimizer,
            scaling=DynamicLossScale(),
        )

    def prepare(state):
        return train.init(state["params"]), state["optimizer"].units

    def one(state, batch):
        state, units = state
        inner = state.optimizer.inner._replace(units=units)
        state = dataclasses.replace(state, optimizer=state.optimizer._replace(inner=inner))
        state, metrics = train(state, batch)
        return (state, units), metrics.loss, metrics.finite

    return prepare, one


def run(program: TrainingProgram, name: str, variants: Any) -> dict[str, list[float]]:
    """Returns the losses of each variant, without those of steps that were left out."""
    units = program_in_units(program)
    prepare, one = method(name, units)
    jitted, found = jax.jit(one), {}
    for title, kind, k in variants:
        own = Units.of(kind, k)
        state = units.init(0)
        state = {
            "params": scaled(state["params"], own.weights),
            "optimizer": state["optimizer"]._replace(units=own),
        }
        state, losses = prepare(state), []
        stream = iter(models.batches(program, 0))
        batch = next(stream)
        for _ in range(PATIENCE):
            state, loss, taken = jitted(state, (scaled(batch, own.inputs), own))
            if bool(taken):
                losses.append(float(loss) / 2.0 ** (k if kind == "loss" else 0))
                batch = next(stream)
            if len(losses) == STEPS:
                break
        found[title] = losses
    return found


def verdict(losses: list[float], want: list[float]) -> dict[str, Any]:
    """Returns the relative difference of the last losses, or None and the last step reached."""
    bad = next((i for i, x in enumerate(losses) if not math.isfinite(x)), None)
    if bad is None and len(losses) == len(want):
        got, true = statistics.fmean(losses[-LAST:]), statistics.fmean(want[-LAST:])
        return {"error": abs(got - true) / abs(true), "stopped": None}
    return {"error": None, "stopped": len(losses) + 1 if bad is None else bad + 1}


def rows(file: Path) -> dict[tuple, dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return {(r["case"], r["variant"], r["method"]): r for r in map(json.loads, lines)}


def torture(
    program: TrainingProgram, names: Sequence[str], there: Container[tuple], whole: bool
) -> Iterator[dict[str, Any]]:
    """Returns the rows of one program that are still missing."""
    batch = next(iter(models.batches(program, 0)))
    floats = any(np.asarray(x).dtype.kind == "f" for x in jax.tree.leaves(batch))
    variants = [v for v in VARIANTS if floats or v[1] != "inputs"] if whole else VARIANTS[:1]
    want: list[float] = []
    for name in names:
        if all((program.name, v[0], name) in there for v in variants):
            continue
        if program.name in LINE_SEARCH and name in ("loss-scaled", "autocast"):
            continue
        want = want or run(program, "float32", VARIANTS[:1])["as it is"]
        for variant, losses in run(program, name, variants).items():
            about = {"case": program.name, "variant": variant, "method": name}
            yield about | verdict(losses, want) | versions()
        jax.clear_caches()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--methods", nargs="+", default=METHODS_HERE)
    parser.add_argument("--again", action="store_true", help="also what is there already")
    parser.add_argument("--out", type=Path, default=FILE)
    given = parser.parse_args()
    programs = [(program, False) for program in cases()]
    programs += [(models.model(name), True) for name in models.MODELS]
    for program, whole in programs:
        if given.cases and program.name not in given.cases:
            continue
        there = () if given.again else rows(given.out)
        for row in torture(program, given.methods, there, whole):
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
