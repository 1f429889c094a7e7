"""Measures time, compilation and memory of an audited training step, as ratios to the plain one.

`python -m benchmarks.audit` audits one step of examples/gpt.py in FP16, without trying fixes, and
prints ratios to the float32 step; `--width 384 --heads 6 --layers 6 --context 256` make it as wide
and deep as nanoGPT's smallest. Times are medians in one process: by the clock, and by processor
time, which other work on the same cores disturbs less; "compile" is the first run (of the audit:
tracing as well) less another one. Memory is what each adds to the peak of a process of its own,
its compilations included.
"""

import argparse
import dataclasses
import functools
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples import gpt
from scalewise.auditing._run._session import Session
from scalewise.auditing._tape._interpretations import TableEmulation
from scalewise.formats import FP16
from scalewise.interpret import trace

REPEATS = 7


def clocks() -> np.ndarray:
    """Returns wall-clock and processor time in seconds."""
    return np.array([time.perf_counter(), time.process_time()])


def seconds(call: Callable[[], Any], repeats: int = REPEATS) -> np.ndarray:
    """Returns the medians of a few calls by both clocks."""
    times = []
    for _ in range(repeats):
        start = clocks()
        jax.block_until_ready(call())
        times.append(clocks() - start)
    return np.median(times, axis=0)


def line(name: str, plain: np.ndarray, audited: np.ndarray) -> str:
    """Formats plain and audited times and their ratios."""
    wall, processor = audited / plain
    return (
        f"{name:8} plain {plain[0]:.3f} s   audited {audited[0]:.3f} s   ratio {wall:.1f}, "
        f"by processor time {processor:.1f} ({audited[1]:.3f} s)"
    )


def resize(config: gpt.Config) -> None:
    """Makes the example's model another size, in this process."""
    gpt.CONFIG = config


def example() -> tuple[Any, np.ndarray]:
    """Returns the step's arguments, after a first compilation in this process."""
    arguments = gpt.init(0), next(gpt.batches(Path(__file__).read_bytes() * 8, 0))
    jax.block_until_ready(jax.jit(lambda x: jax.numpy.tanh(x @ x.T))(np.ones((8, 8), np.float32)))
    return arguments


def plain_step() -> Callable[[], Any]:
    """Returns the jitted float32 step."""
    state, batch = example()
    step = jax.jit(gpt.train_step)
    return lambda: step(state, batch)


def audited_step() -> Callable[[], Any]:
    """Returns a function that makes both runs of the audit; its first call traces the program."""
    state, batch = example()
    sessions: list[Session] = []

    def run():
        if not sessions:
            low = TableEmulation(FP16)
            program = trace(gpt.train_step, low, (state, batch), {}, name="audit")
            sessions.append(Session(program, low))
        return sessions[0].run().low

    return run


def peak() -> float:
    """Returns the peak memory of this process so far, in megabytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def grown(make: Callable[[], Callable[[], Any]]) -> float:
    """Returns by how many megabytes three calls raise the peak."""
    call = make()
    before = peak()
    for _ in range(3):
        jax.block_until_ready(call())
    return peak() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for field in dataclasses.fields(gpt.Config):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    config = gpt.Config(**vars(parser.parse_args()))
    resize(config)
    print(config)
    spawn = multiprocessing.get_context("spawn")
    start = functools.partial(resize, config)
    with ProcessPoolExecutor(
        1, mp_context=spawn, max_tasks_per_child=1, initializer=start
    ) as processes:
        plain_memory, audited_memory = processes.map(grown, (plain_step, audited_step))
    plain_call, audited_call = plain_step(), audited_step()
    first = [seconds(call, 1) for call in (plain_call, audited_call)]
    rounds = [(seconds(plain_call, 3), seconds(audited_call, 1)) for _ in range(REPEATS)]
    plain, audited = np.median(rounds, axis=0)
    print(line("run", plain, audited))
    print(line("compile", first[0] - plain, first[1] - audited))
    print(
        f"memory   plain {plain_memory:.0f} MB   audited {audited_memory:.0f} MB   "
        f"ratio {audited_memory / plain_memory:.1f}  (compilers' memory included)"
    )


if __name__ == "__main__":
    main()
