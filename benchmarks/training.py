"""Measures the overhead of loss scaling and master weights, in time and in bytes moved.

    python -m benchmarks.training

Steps are timed in turn, in one process. (What they change is in ``experiments/side_by_side.py``.)
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

from scalewise.cli._program import corpus, load_program
from scalewise.training import (
    DynamicLossScale,
    StaticLossScale,
    loss_scaled,
    master_weights,
    step,
)


def overhead(repeats: int, width: int) -> dict[str, dict[str, float]]:
    """Compares a wrapped optimizer step with the bare one, for four square matrices.

    Nothing else is done, so this is reading and writing memory: the time, as a ratio, and the bytes
    a parameter that XLA counts in the compiled program.
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
        "clipped by optax": (optax.chain(optax.clip_by_global_norm(1.0), adam), jnp.float32),
        "loss scale, clipping": (loss_scaled(adam, DynamicLossScale(), clip=1.0), jnp.float32),
    }
    moved: dict[str, float] = {}

    def prepared(name: str, optimizer: Any, dtype: Any) -> Callable[[], None]:
        state = optimizer.init(params)
        weights = jax.tree.map(lambda x: x.astype(dtype), params)
        given = jax.tree.map(lambda x: x.astype(dtype), gradients)

        def one(weights, state, given):
            updates, state = optimizer.update(given, state, weights)
            return optax.apply_updates(weights, updates), state

        compiled = jax.jit(one).lower(weights, state, given).compile()
        moved[name] = round(compiled.cost_analysis()["bytes accessed"] / (4 * width**2), 1)
        box = [weights, state]

        def run() -> None:
            box[:] = jax.block_until_ready(compiled(*box, given))

        return run

    runs = {name: prepared(name, *way) for name, way in ways.items()}
    return {"time": ratios(runs, repeats), "bytes a parameter": moved}


def whole_step(repeats: int) -> dict[str, float]:
    """Compares whole steps of the GPT example: written by hand, and by training.step."""
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
    """Returns each run's median ratio to the first run of the same round."""
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--widths", nargs="+", type=int, default=[512, 1024, 2048])
    parser.add_argument("--repeats", type=int, default=40)
    given = parser.parse_args()
    for width in given.widths:
        count = f"{4 * width**2:,} parameters"
        print(json.dumps({f"optimizer step alone, {count}": overhead(given.repeats, width)}))
    print(json.dumps({"whole step of gpt": whole_step(given.repeats)}))


if __name__ == "__main__":
    main()
