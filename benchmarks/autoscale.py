"""Measures autoscale: a step's time, tracing and compilation, and their growth with the layers.

    python -m benchmarks.autoscale step compile every_op

All times are ratios to float32 of runs that alternate in one process, medians of each round's
ratio. ``step`` times whole training steps of examples and compares their temporary memory;
``compile`` traces and compiles a GPT of 2, 4, 8 and 16 layers, written out and scanned;
``every_op`` says where the time of an FP16 machine's emulation goes.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from experiments import models

import scalewise as sw
from scalewise.cli._program import TrainingProgram

RECIPES = ("float32", "fp16", "fp8")
LAYERS = (2, 4, 8, 16)


def under(recipe: Any, f: Callable) -> Callable:
    return f if recipe == "float32" else sw.autoscale(f, recipe)


def gpt(layers: int, scanned: bool, **sizes: int) -> TrainingProgram:
    """Returns the GPT example with this number of layers, as a list or stacked for a scan."""
    program = models.model("gpt")
    module = models.module_of(program)
    module.CONFIG = dataclasses.replace(module.CONFIG, layers=layers, **sizes)
    if not scanned:
        return program

    def logits(params, tokens):
        def block(x, p):
            x = x + module.attention(p, module.layer_norm(p["norm_1"], x))
            return x + module.mlp(p, module.layer_norm(p["norm_2"], x)), None

        x = params["tokens"][tokens] + params["positions"][: tokens.shape[1]]
        x, _ = jax.lax.scan(block, x, params["blocks"])
        return module.layer_norm(params["norm"], x) @ params["head"]

    def init(seed):
        params = program.init(seed)["params"]
        params |= {"blocks": jax.tree.map(lambda *x: jnp.stack(x), *params["blocks"])}
        return {"params": params, "optimizer": module.OPTIMIZER.init(params)}

    module.logits = logits  # of this module alone: each call of `gpt` has its own
    return dataclasses.replace(program, init=init)


def interleaved(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Returns each run's median ratio to the first run of the same round."""
    seconds = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(run())
    first = next(iter(seconds.values()))
    found = {
        name: round(statistics.median(np.divide(own, first)), 3) for name, own in seconds.items()
    }
    return found | {"float32, s": round(statistics.median(first), 4)}


@dataclasses.dataclass
class Stepping:
    """Returns a function that makes one compiled training step and returns its seconds."""

    compiled: Any
    state: Any
    batch: Any

    def __call__(self) -> float:
        start = time.perf_counter()
        self.state, _ = jax.block_until_ready(self.compiled(self.state, self.batch))
        return time.perf_counter() - start

    @property
    def temporary_bytes(self) -> int:
        return self.compiled.memory_analysis().temp_size_in_bytes


def stepping(program: TrainingProgram, recipe: Any) -> Stepping:
    """Compiles a training step and makes the first."""
    batch = next(iter(models.batches(program, 0)))
    state = program.init(0)
    compiled = jax.jit(under(recipe, program.train_step)).lower(state, batch).compile()
    return Stepping(compiled, jax.block_until_ready(compiled(state, batch))[0], batch)


def compiling(program: TrainingProgram, recipe: Any) -> Callable[[], float]:
    """Traces and compiles the training step anew at each call."""
    batch = next(iter(models.batches(program, 0)))
    state = program.init(0)

    def run() -> float:
        jax.clear_caches()
        start = time.perf_counter()
        jax.jit(under(recipe, program.train_step)).lower(state, batch).compile()
        return time.perf_counter() - start

    return run


def steps(names: Sequence[str], rounds: int) -> None:
    """Times and temporary memory of examples' steps, and of a GPT whose products take the time."""
    programs = {name: models.model(name) for name in names}
    programs["gpt, width 256"] = gpt(2, False, width=256)
    for name, program in programs.items():
        runs = {recipe: stepping(program, recipe) for recipe in RECIPES}
        sizes = {recipe: run.temporary_bytes for recipe, run in runs.items()}
        memory = {recipe: round(size / sizes["float32"], 2) for recipe, size in sizes.items()}
        found = interleaved(dict(runs), rounds)
        print(json.dumps({"step": name} | found | {"temporary memory": memory}), flush=True)


def compiles(sizes: Sequence[int], rounds: int) -> None:
    """Trace and compile times by layers."""
    for scanned in (True, False):
        for layers in sizes:
            program = gpt(layers, scanned, width=64, context=32, batch=4)
            runs = {recipe: compiling(program, recipe) for recipe in ("float32", "fp16")}
            about = {"compile": "scanned" if scanned else "written out", "layers": layers}
            print(json.dumps(about | interleaved(runs, rounds)), flush=True)


def every_op(names: Sequence[str], rounds: int) -> None:
    """Step times of ``scalify``: with scales found after each operation, and without."""
    propagated = sw.Scalify()
    for name in names:
        program = models.model(name)
        recipes = {
            "float32": "float32",
            "boundaries": "fp16",
            "scales found": "fp16_every_op",
            "scales propagated": propagated,
        }
        batch, state = next(iter(models.batches(program, 0))), program.init(0)
        counts = {}
        for title, recipe in recipes.items():
            lowered = jax.jit(under(recipe, program.train_step)).lower(state, batch)
            text = lowered.as_text()
            counts[title] = {"operations": text.count(" = "), "reductions": text.count(".reduce(")}
        runs = {title: stepping(program, recipe) for title, recipe in recipes.items()}
        print(
            json.dumps({"every_op": name} | interleaved(runs, rounds) | {"counts": counts}),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", default=["step", "compile", "every_op"])
    parser.add_argument("--models", nargs="+", default=["gpt", "resnet", "lstm"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--layers", nargs="+", type=int, default=LAYERS)
    parser.add_argument("--compiles", type=int, default=3)
    given = parser.parse_args()
    if "step" in given.what:
        steps(given.models, given.rounds)
    if "compile" in given.what:
        compiles(given.layers, given.compiles)
    if "every_op" in given.what:
        every_op(given.models, given.rounds)


if __name__ == "__main__":
    main()
