"""What mixed precision costs and what it changes: overhead, parity, and bytes a parameter.

    python -m benchmarks.training overhead
    python -m benchmarks.training parity gpt cnn --seeds 0 1 2 --steps 300

Parity trains an example from several seeds under several recipes, one step of each in turn, and
reports the mean loss over the last steps; overhead times whole steps, alternating, in one process.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from scalewise.training import (
    METHODS,
    RECIPES,
    DynamicLossScale,
    StaticLossScale,
    corpus,
    load_program,
    loss_scaled,
    master_weights,
    step,
)

LAST = 50


def size(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


class Run:
    """One recipe from one seed."""

    def __init__(self, program: Any, recipe: str, seed: int):
        initial = program.init(seed)
        params = initial["params"]
        self.count = sum(x.size for x in jax.tree.leaves(params))
        if recipe == "fp16-plain":  # everything cast, and nothing else done
            method = METHODS[recipe]
            self.state = method.prepare(initial)
            self.step = jax.jit(method.transform(program.train_step))
            self.bytes = size(self.state)
        else:
            train = step(program.loss_of, program.optimizer, **RECIPES[recipe])
            self.state = train.init(params)
            self.step = jax.jit(train)
            self.bytes = size((self.state.params, self.state.rest, self.state.optimizer))
        self.stream = program.batches(corpus(), seed)
        self.losses: list[float] = []
        self.skipped = 0

    def advance(self) -> None:
        self.state, out = self.step(self.state, next(self.stream))
        loss, skipped = (out.loss, int(out.skipped)) if hasattr(out, "loss") else (out, 0)
        self.losses.append(float(loss))
        self.skipped = skipped


def parity(programs: list[str], recipes: list[str], seeds: list[int], steps: int) -> list[dict]:
    """For each program and recipe the last losses by seed, and their ratio to float32's."""
    rows = []
    for name in programs:
        program = load_program(f"examples/{name}.py")
        final: dict[str, list[float]] = {}
        for recipe in recipes:
            runs = [Run(program, recipe, seed) for seed in seeds]
            for run in runs:
                run.step = runs[0].step  # compiled once
            for _ in range(steps):
                for run in runs:
                    run.advance()
            final[recipe] = [statistics.fmean(run.losses[-LAST:]) for run in runs]
            ratios = [a / b for a, b in zip(final[recipe], final["float32"], strict=True)]
            rows.append({
                "program": name, "recipe": recipe, "steps": steps, "seeds": seeds,
                "losses": [round(x, 5) for x in final[recipe]],
                "mean": round(statistics.fmean(final[recipe]), 5),
                "ratio of means": round(
                    statistics.fmean(final[recipe]) / statistics.fmean(final["float32"]), 5
                ),
                "ratio by seed": [round(x, 5) for x in ratios],
                "skipped": [run.skipped for run in runs],
                "bytes a parameter": round(runs[0].bytes / runs[0].count, 3),
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    return rows


def overhead(repeats: int, width: int) -> dict[str, float]:
    """Time of a wrapped optimizer step over the bare one's: median of ratios, side by side.

    Of four square matrices; nothing else is done, so this is reading and writing memory.
    """
    key = jax.random.key(0)
    params = {f"w{i}": jax.random.normal(key, (width, width)) for i in range(4)}
    gradients = jax.tree.map(lambda x: 1e-3 * x, params)
    adam = optax.adamw(1e-3)
    ways: dict[str, tuple[Any, Any]] = {
        "bare": (adam, jnp.float32),
        "loss scale": (loss_scaled(adam, DynamicLossScale()), jnp.float32),
        "masters, FP16 weights": (master_weights(adam), jnp.float16),
        "both": (loss_scaled(master_weights(adam), DynamicLossScale()), jnp.float16),
    }

    def prepared(optimizer: Any, dtype: Any) -> Callable[[], None]:
        state = optimizer.init(params)
        weights = jax.tree.map(lambda x: x.astype(dtype), params)
        given = jax.tree.map(lambda x: x.astype(dtype), gradients)

        @jax.jit
        def one(weights, state, given):
            updates, state = optimizer.update(given, state, weights)
            return optax.apply_updates(weights, updates), state

        box = [weights, state]

        def run() -> None:
            box[:] = jax.block_until_ready(one(*box, given))

        return run

    runs = {name: prepared(*way) for name, way in ways.items()}
    return ratios(runs, repeats)


def whole_step(repeats: int) -> dict[str, float]:
    """The same for whole steps of the GPT example: the step by hand, and training.step."""
    program = load_program("examples/gpt.py")
    assert program.loss_of is not None
    assert program.optimizer is not None
    batch = next(iter(program.batches(corpus(), 0)))
    initial = program.init(0)

    def runner(function: Callable, state: Any) -> Callable[[], None]:
        compiled, box = jax.jit(function), [state]

        def run() -> None:
            box[0], _ = jax.block_until_ready(compiled(box[0], batch))

        return run

    runs = {"bare": runner(program.train_step, initial)}
    wrapped = {
        "loss scale": {"scaling": DynamicLossScale()},
        "masters, FP16 weights": {"policy": "p=f16,c=f32", "scaling": StaticLossScale(1.0)},
        "both": {"policy": "p=f16,c=f32", "scaling": DynamicLossScale()},
    }
    for name, options in wrapped.items():
        train = step(program.loss_of, program.optimizer, **options)
        runs[name] = runner(train, train.init(initial["params"]))
    return ratios(runs, repeats)


def ratios(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median over rounds of each one's time to the first one's in the same round."""
    for run in runs.values():
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    bare = next(iter(times.values()))
    result = {
        name: round(statistics.median(t / b for t, b in zip(ts, bare, strict=True)), 3)
        for name, ts in times.items()
    }
    return result | {"bare, ms": round(statistics.median(bare) * 1e3, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["overhead", "parity"])
    parser.add_argument("programs", nargs="*", default=["gpt", "cnn"])
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=["float32", "autocast-fp16", "autocast-bf16", "five-bytes", "fp16-plain"],
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--widths", nargs="+", type=int, default=[512, 1024, 2048])
    parser.add_argument("--repeats", type=int, default=40)
    given = parser.parse_args()
    if given.what == "parity":
        parity(given.programs, given.recipes, given.seeds, given.steps)
        return
    for width in given.widths:
        count = f"{4 * width**2:,} parameters"
        print(json.dumps({f"optimizer step alone, {count}": overhead(given.repeats, width)}))
    print(json.dumps({"whole step of gpt": whole_step(given.repeats)}))


if __name__ == "__main__":
    main()
