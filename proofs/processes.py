"""Trains a sharded GPT in four processes and in one; kills one process and resumes the run.

    python -m proofs.processes [--recipes fp8 fp8_delayed]

A tiny GPT of examples/gpt.py is trained by ``training.train(sharding=...)`` on a mesh of data, FSDP
and tensor axes, 2 x 2 x 2: four processes joined by ``jax.distributed`` on this machine's loopback,
two devices each. The loss scale starts low and grows; in one step the last process's part of the
batch makes its gradients overflow. Losses, loss scales and skipped steps are compared with those of
one process with one device, and, with the histories of delayed scaling, among the four processes.
A run in which a process was killed (``kill -9``) is compared with an uninterrupted one: the bits of
the whole state and the metrics of every step.
"""

import argparse
import hashlib
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

from proofs.workers import free_port, results, start, tell

RECIPES = ("fp8", "fp8_delayed")
COUNT, DEVICES = 4, 8
STEPS, EVERY, OVERFLOWS = 12, 4, 7
TOLERANCE = 5e-3  # of a loss, relative: sums in another order, rounded to FP8
TEXT = b"To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer " * 20


def worker(number: int, count: int, port: int, recipe: str, out: str, steps: int) -> None:
    """Runs one process of ``count``; 0 means one process with one device. Prints JSON."""
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES // count if count else 1)
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"localhost:{port}", count, number, heartbeat_timeout_seconds=30,
            shutdown_timeout_seconds=30,
        )  # fmt: skip
    from rich.console import Console

    from scalewise import training

    seen = []
    ended = training.train(
        program(),
        recipe,
        data=TEXT,
        steps=steps,
        every=EVERY,
        out=out,
        resume=True,
        console=Console(file=sys.stderr),
        watch=lambda step, state: seen.append(decisions(state)) or {},
        sharding=sharding() if count else None,
        scaling=training.DynamicLossScale(initial=2.0**10, interval=4),
    )
    split = sum(not x.is_fully_replicated for x in jax.tree.leaves(ended.state))
    tell({"digest": ended.digest, "decisions": seen, "split": split})


def program():
    """Returns the GPT as a program whose batches have a weight for each sequence."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from examples import gpt
    from scalewise.training import Program

    gpt.CONFIG = gpt.Config(context=16, width=32, heads=4, layers=1, batch=8)

    def loss_of(params, batch):
        logs = jax.nn.log_softmax(gpt.logits(params, batch["tokens"][:, :-1]))
        of_tokens = jnp.take_along_axis(logs, batch["tokens"][:, 1:, None], axis=-1)
        return -(of_tokens.mean(axis=(1, 2)) * batch["weight"]).mean()

    def batches(data, seed):
        for step, tokens in enumerate(gpt.batches(data, seed), 1):
            weight = np.ones(len(tokens), np.float32)
            weight[-1] = 1e37 if step == OVERFLOWS else 1
            yield {"tokens": tokens, "weight": weight}

    return Program("gpt", gpt.init, gpt.train_step, batches, loss_of, gpt.OPTIMIZER)


def sharding():
    """Returns a sharding of products over the tensor axis (Megatron), weights over FSDP's."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh
    from jax.sharding import PartitionSpec as P

    from scalewise.training import Sharding

    columns, rows = P("fsdp", "tensor"), P("tensor", "fsdp")
    by_name = {
        "qkv": columns, "up": columns, "head": columns, "projection": rows, "down": rows,
        "tokens": rows, "up_bias": P("tensor"),
    }  # fmt: skip
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    mesh = Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)

    def of_state(path: str, shape: tuple[int, ...]) -> P:
        name = path.rsplit("['", 1)[-1].removesuffix("']")
        return by_name.get(name, P()) if shape else P()

    return Sharding(mesh, of_state, P(("data", "fsdp")))


def decisions(state) -> list:
    """Returns this process's loss scale, skipped steps and digest of the history."""
    import numpy as np

    from scalewise.training import loss_scale_of

    scale = loss_scale_of(state.optimizer)
    history = b"" if state.history is None else np.asarray(state.history.amaxes).tobytes()
    return [float(scale.scale), int(scale.skipped), hashlib.sha256(history).hexdigest()[:16]]


# -- the runs that are compared ------------------------------------------------------------------


def launch(count: int, recipe: str, out: Path, steps: int = STEPS) -> list:
    """Starts the processes of one run; with a count of 0, one process with one device."""
    port = free_port()
    return [
        start("proofs.processes", "worker", n, count, port, recipe, out, steps)
        for n in range(max(1, count))
    ]


def figures(out: Path) -> list[tuple]:
    """Returns the metrics of each step without its time."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"], r["scale"], r["skipped"]) for r in rows]


def kill_one(workers: list, out: Path) -> list[int]:
    """Kills the last process after a checkpoint; returns the exit codes of all."""
    file = out / "metrics.jsonl"
    while not file.exists() or len(file.read_bytes().splitlines()) < EVERY + 2:
        if any(process.poll() is not None for process in workers):
            results(workers)  # says why
        time.sleep(0.02)
    workers[-1].send_signal(signal.SIGKILL)
    for process in workers:
        process.communicate(timeout=300)
    return [process.returncode for process in workers]


def prove(recipe: str, folder: Path) -> dict:
    """Returns figures on the differences between the runs.

    Raises:
        SystemExit: the processes disagree, with one another or with one process, or the resumed
            run has other bits than the uninterrupted one.
    """
    alone, whole, killed = (folder / name for name in ("alone", "whole", "killed"))
    results(launch(0, recipe, alone))
    first, *others = results(launch(COUNT, recipe, whole))
    if any(other != first for other in others):
        raise SystemExit(f"{recipe}: the processes took different decisions")
    want, got = figures(alone), figures(whole)
    if [row[2:] for row in want] != [row[2:] for row in got]:
        raise SystemExit(f"{recipe}: other loss scales or steps than one process: {want}\n{got}")
    off = max(abs(b[1] / a[1] - 1) for a, b in zip(want, got, strict=True))
    if off > TOLERANCE:
        raise SystemExit(f"{recipe}: a loss differs by {off:.2g} from one process: {want}\n{got}")
    codes = kill_one(launch(COUNT, recipe, killed), killed)
    if codes[-1] != -signal.SIGKILL or 0 in codes:
        raise SystemExit(f"{recipe}: the processes ended with {codes} when one was killed")
    made = len(figures(killed))
    again = results(launch(COUNT, recipe, killed))
    if {x["digest"] for x in again} != {first["digest"]} or figures(killed) != got:
        raise SystemExit(f"{recipe}: other bits after a kill at step {made}: {again}")
    return {
        "state": first["digest"][:16], "split arrays": first["split"], "killed in step": made + 1,
        "scales": [row[2] for row in got], "skipped": got[-1][3],
        "loss differs from one process by": off, "exit codes": codes,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    given = parser.parse_args()
    for recipe in given.recipes:
        with tempfile.TemporaryDirectory() as folder:
            print(recipe, json.dumps(prove(recipe, Path(folder))), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        number, count, port, recipe, out, steps = sys.argv[2:]
        worker(int(number), int(count), int(port), recipe, out, int(steps))
    else:
        main()
