"""Trains a model with loss scaling; a run that is killed at any moment resumes to the same bits.

    python examples/train.py gpt --policy c=f16 --steps 300 --out runs/a

The same command continues the run in `runs/a` from its last checkpoint. It ends with the bits of an
undisturbed run: a step's batch depends on nothing but the seed and the step's
number, and a checkpoint holds the whole training state: weights, moments, loss scale, random keys,
histories of delayed scaling.

Copy this file and change it. The model is a module with `init`, `loss_of`, `OPTIMIZER` and
`batches`; see gpt.py. With several processes each runs the same command and --coordinator,
--processes and --process, and all of them see the same folder.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import jax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from scalewise import training

Tree = Any
LOGGED = ("loss", "scale", "skipped")  # of the metrics of a step


def over_first_axis(mesh: Mesh, path: str, shape: tuple[int, ...]) -> PartitionSpec:
    """Splits the first axis of every array that the mesh divides, as FSDP does."""
    divides = bool(shape) and shape[0] % mesh.size == 0
    return PartitionSpec(mesh.axis_names) if divides else PartitionSpec()


def train(
    model: Any,
    step: training.Step,
    out: Path,
    *,
    data: bytes,
    steps: int,
    every: int = 100,
    seed: int = 0,
    mesh: Mesh | None = None,
    spec_of=over_first_axis,
    log: Callable[[int, dict[str, float]], None] | None = None,
) -> Tree:
    """Makes or continues a run, and returns the training state after `steps` steps.

    Args:
        model: has `init(seed)`, a state with "params", and `batches(data, seed)` without end.
        step: of `training.step`.
        out: the folder of `metrics.jsonl` and of `checkpoints`.
        every: the number of steps between two checkpoints. The last step always has one.
        mesh: devices, also those of other processes; by default all, along one axis.
        spec_of: returns the partition of an array of the state, from the mesh, path and shape.
        log: called on the first process with each step's number and metrics. For Weights & Biases
            `lambda step, row: wandb.log(row, step=step)`, for TensorBoard
            `lambda step, row: [writer.add_scalar(k, x, step) for k, x in row.items()]`.
    """
    mesh = mesh or jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))

    def place(batch: Tree) -> Tree:  # each process has the whole batch, and keeps its own part
        def one(x):
            sharding = NamedSharding(mesh, over_first_axis(mesh, "", x.shape))
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        return jax.tree.map(one, batch)

    def init() -> Tree:
        return step.init(model.init(seed)["params"], next(model.batches(data, seed)))

    def sharding_of(path, x) -> NamedSharding:
        return NamedSharding(mesh, spec_of(mesh, jax.tree_util.keystr(path), x.shape))

    # `init` is compiled, so that no device holds the whole state
    shardings = jax.tree_util.tree_map_with_path(sharding_of, jax.eval_shape(init))
    state = jax.jit(init, out_shardings=shardings)()
    run = jax.jit(step, out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())))
    with checkpoints(out, every) as saved:
        done = saved.latest_step() or 0
        if done:
            state = saved.restore(done, args=ocp.args.StandardRestore(state))
        batches = itertools.islice(model.batches(data, seed), done, None)
        first = jax.process_index() == 0
        with metrics_file(out, done) if first else contextlib.nullcontext() as rows:
            for number, batch in zip(range(done + 1, steps + 1), batches, strict=False):
                state, metrics = run(state, place(batch))
                if rows is not None:
                    found = {k: getattr(metrics, k).item() for k in LOGGED}
                    if log is not None:
                        log(number, found)
                    row = {"step": number, **found}
                    print(json.dumps(row), file=rows, flush=True)
                    if number % every == 0 or number == steps:
                        print(row, flush=True)
                saved.save(number, args=ocp.args.StandardSave(state), force=number == steps)
    return state


def checkpoints(out: Path, every: int) -> ocp.CheckpointManager:
    """Returns Orbax's manager. A checkpoint is renamed into place when all of it is written."""
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=every,
        max_to_keep=3,
        enable_async_checkpointing=False,
        cleanup_tmp_directories=True,
    )
    return ocp.CheckpointManager((out / "checkpoints").absolute(), options=options)


def metrics_file(out: Path, done: int) -> TextIO:
    """Opens `metrics.jsonl` without the lines of steps that will be made again."""
    file, kept = out / "metrics.jsonl", out / "metrics.part"
    lines = file.read_text().splitlines(keepends=True)[:done] if file.exists() else []
    kept.write_text("".join(lines))
    os.replace(kept, file)
    return file.open("a")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a model, or continues a run.")
    parser.add_argument("model", nargs="?", default="gpt", help="a module beside this file")
    parser.add_argument("--policy", default="c=f16", help="a policy, or the name of a recipe")
    parser.add_argument("--weights", help="of 16 bits: master, stochastic or compensated")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="a text; by default the model's source")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--coordinator", help="host:port of the first process")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    given = parser.parse_args()
    if given.coordinator:
        jax.distributed.initialize(given.coordinator, given.processes, given.process)
    model = importlib.import_module(given.model)
    options = {"weights": given.weights} if given.weights else {}
    step = training.step(model.loss_of, model.OPTIMIZER, given.policy, **options)
    data = (given.data or Path(str(model.__file__))).read_bytes()
    train(model, step, given.out, data=data, steps=given.steps, every=given.every, seed=given.seed)


if __name__ == "__main__":
    main()
