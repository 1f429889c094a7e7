"""Kills runs of examples/train.py at random moments, resumes them, and compares the bits.

    python -m proofs.resume [--kills 20] [--processes 1 4] [--policies fp8_delayed c=f16]

A tiny GPT of examples/gpt.py is trained in one process, and in four that are joined by
``jax.distributed`` on this machine's loopback, with two devices each and a mesh of data, FSDP and
tensor axes, 2 x 2 x 2. The weights of ``c=f16`` are float16, rounded stochastically. The loss scale
starts low and grows; in one step the last sequence of the batch, the last process's, makes the
gradients overflow. ``kill -9`` ends the process, or the last of four; moments are spread over
start, compilation, steps and the writing of checkpoints (one every other step). Compared with an
undisturbed run are the metrics of all steps and the bits of the whole state; with one process's,
losses, loss scales and skipped steps of four.
"""

import argparse
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from proofs.workers import free_port, results, start, tell

POLICIES = ("fp8_delayed", "c=f16")
STEPS, EVERY, OVERFLOWS = 24, 2, 7
TOLERANCE = 5e-3  # of a loss, relative: sums in another order, rounded to FP8 or FP16
TEXT = b"To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer " * 20


def worker(number: int, count: int, port: int, policy: str, out: str, steps: int) -> None:
    """Runs one process of ``count``, with two devices if there are several. Prints JSON."""
    import jax

    # So that a killed run is soon where it was. Processes that read a program with collectives from
    # the cache may wait for each other forever (JAX 0.10.2, CPU).
    if count == 1:
        jax.config.update("jax_compilation_cache_dir", str(Path(out).with_name("compiled")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    else:
        jax.config.update("jax_num_cpu_devices", 2)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"localhost:{port}", count, number, heartbeat_timeout_seconds=60,
            shutdown_timeout_seconds=600,
        )  # fmt: skip
    from examples import gpt, train
    from scalewise import training

    step = training.step(
        loss_of, gpt.OPTIMIZER, "p=f16,c=f16" if policy == "c=f16" else policy,
        weights="stochastic" if policy == "c=f16" else None,
        scaling=training.DynamicLossScale(initial=2.0**10, interval=4),
    )  # fmt: skip
    gpt.CONFIG = gpt.Config(context=16, width=32, heads=4, layers=1, batch=8)
    model = SimpleNamespace(init=gpt.init, batches=batches)
    layout = {} if count == 1 else {"mesh": mesh(), "spec_of": spec_of}
    state = train.train(model, step, Path(out), data=TEXT, steps=steps, every=EVERY, **layout)
    arrays = [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(state)]
    same = [x for x in arrays if x.is_fully_replicated]
    tell({"own": digest(arrays), "same": digest(same), "split": len(arrays) - len(same)})


def is_key(x) -> bool:
    import jax

    return jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def digest(arrays) -> str:
    """Returns a digest of what this process has of some arrays."""
    import numpy as np

    parts = [np.asarray(s.data).tobytes() for x in arrays for s in x.addressable_shards]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def loss_of(params, batch):
    """Returns the GPT's loss with a weight for each sequence."""
    import jax
    import jax.numpy as jnp

    from examples import gpt

    logs = jax.nn.log_softmax(gpt.logits(params, batch["tokens"][:, :-1]))
    of_tokens = jnp.take_along_axis(logs, batch["tokens"][:, 1:, None], axis=-1)
    return -(of_tokens.mean(axis=(1, 2)) * batch["weight"]).mean()


def batches(data: bytes, seed: int):
    import numpy as np

    from examples import gpt

    for number, tokens in enumerate(gpt.batches(data, seed), 1):
        weight = np.ones(len(tokens), np.float32)
        weight[-1] = 1e37 if number == OVERFLOWS else 1
        yield {"tokens": tokens, "weight": weight}


def mesh():
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh

    devices = np.array(jax.devices()).reshape(2, 2, 2)
    return Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def spec_of(mesh, path: str, shape: tuple[int, ...]):
    """Splits products over the tensor axis (Megatron), weights over FSDP's."""
    from jax.sharding import PartitionSpec as P

    columns, rows = P("fsdp", "tensor"), P("tensor", "fsdp")
    by_name = {
        "qkv": columns, "up": columns, "head": columns, "projection": rows, "down": rows,
        "tokens": rows, "up_bias": P("tensor"),
    }  # fmt: skip
    name = path.rsplit("['", 1)[-1].removesuffix("']")
    return by_name.get(name, P()) if shape else P()


# -- the runs that are compared ------------------------------------------------------------------


def launch(count: int, policy: str, out: Path, steps: int) -> list[subprocess.Popen]:
    """Starts the processes of one run."""
    port = free_port()
    return [
        start("proofs.resume", "worker", number, count, port, policy, out, steps)
        for number in range(count)
    ]


def rows(out: Path) -> list[dict]:
    """Returns the metrics of each step that was made."""
    file = out / "metrics.jsonl"
    return [json.loads(x) for x in file.read_text().splitlines()] if file.exists() else []


def kill(workers: list[subprocess.Popen], out: Path, rng: random.Random, training: bool) -> bool:
    """Kills the last process at some moment; returns True if a checkpoint was being written."""
    if training:
        before = (out / "metrics.jsonl").stat().st_mtime_ns if rows(out) else 0
        while not rows(out) or (out / "metrics.jsonl").stat().st_mtime_ns == before:
            if any(process.poll() is not None for process in workers):
                results(workers)  # says why
                break
            time.sleep(0.02)
    time.sleep(rng.random() * (2 if training else 8))
    workers[-1].send_signal(signal.SIGKILL)
    for process in workers:
        _, err = process.communicate(timeout=600)
        if process is workers[-1] and "Traceback" in err:
            raise SystemExit(f"a traceback before a kill:\n{err[-3000:]}")
    return any((out / "checkpoints").glob("*tmp*"))


def prove(count: int, policy: str, kills: int, folder: Path, steps: int = STEPS) -> dict:
    """Returns figures on the runs.

    Raises:
        SystemExit: the processes disagree, or the resumed run has other bits than the undisturbed.
    """
    whole, killed, rng = folder / "whole", folder / "killed", random.Random(kills)
    want = results(launch(count, policy, whole, steps))
    if len({found["same"] for found in want}) > 1:
        raise SystemExit(f"{policy}: the processes have different states: {want}")
    saving, after = 0, []
    for number in range(kills):  # three of four kills while it trains and saves, others before
        saving += kill(launch(count, policy, killed, steps), killed, rng, number % 4 < 3)
        after.append(len(rows(killed)))
    got = results(launch(count, policy, killed, steps))
    if got != want or rows(killed) != rows(whole):
        raise SystemExit(f"{policy}: other bits after kills at steps {after}: {got}, not {want}")
    return {
        "processes": count, "state": want[0]["own"], "split arrays": want[0]["split"],
        "kills": kills, "within a save": saving, "after steps": after,
    }  # fmt: skip


def beside(several: list[dict], alone: list[dict]) -> float:
    """Returns the largest relative difference of a loss; the decisions have to be the same."""
    if [(r["scale"], r["skipped"]) for r in several] != [(r["scale"], r["skipped"]) for r in alone]:
        raise SystemExit(f"other loss scales or steps than one process: {several}\n{alone}")
    if not alone[-1]["skipped"] or len({row["scale"] for row in alone}) == 1:
        raise SystemExit(f"no step was left out, or the scale stayed as it was: {alone}")
    off = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(several, alone, strict=True))
    if off > TOLERANCE:
        raise SystemExit(f"a loss differs by {off:.2g} from one process: {several}\n{alone}")
    return off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="of one process; a tenth of several")
    parser.add_argument("--processes", type=int, nargs="+", default=(1, 4))
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    given = parser.parse_args()
    for policy in given.policies:
        made: dict[int, list[dict]] = {}
        for count in given.processes:
            kills = given.kills if count == 1 else max(1, given.kills // 10)
            with tempfile.TemporaryDirectory() as folder:
                found = prove(count, policy, kills, Path(folder))
                made[count] = rows(Path(folder, "whole"))
            if count > 1 and 1 in made:
                found["loss differs from one process by"] = beside(made[count], made[1])
            print(policy, json.dumps(found), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        number, count, port, policy, out, steps = sys.argv[2:]
        worker(int(number), int(count), int(port), policy, out, int(steps))
    else:
        main()
