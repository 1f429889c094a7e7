"""What an audited training step costs beside the plain one: time, compile, memory.

`python -m benchmarks.audit` audits one step of examples/gpt.py in FP16, without trying fixes, and
prints ratios to the float32 step, medians in one process: by the clock, and by processor time,
which other work on the same cores disturbs less.
"""

import resource
import time
from pathlib import Path

import jax
import numpy as np

from examples import gpt
from scalewise.audit._lanes import Rounded, Wide
from scalewise.audit._session import Session
from scalewise.formats import FP16
from scalewise.interpret import trace

REPEATS = 7


def clocks() -> np.ndarray:
    """Wall-clock and processor time, in seconds."""
    return np.array([time.perf_counter(), time.process_time()])


def seconds(call) -> np.ndarray:
    """The medians of a few calls, by both clocks."""
    times = []
    for _ in range(REPEATS):
        start = clocks()
        jax.block_until_ready(call())
        times.append(clocks() - start)
    return np.median(times, axis=0)


def line(name: str, plain: np.ndarray, audited: np.ndarray) -> str:
    """Both, and their ratios."""
    wall, processor = audited / plain
    return (
        f"{name:8} plain {plain[0]:.3f} s   audited {audited[0]:.3f} s   ratio {wall:.1f}, "
        f"by processor time {processor:.1f}"
    )


def peak() -> int:
    """Bytes that this process has held at most, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    state = gpt.init(0)
    batch = next(gpt.batches(Path(__file__).read_bytes() * 8, 0))
    jax.block_until_ready(jax.jit(lambda x: jax.numpy.tanh(x @ x.T))(np.ones((8, 8), np.float32)))
    before = peak()
    start = clocks()
    step = jax.jit(gpt.train_step).lower(state, batch).compile()
    plain_compile = clocks() - start
    plain = seconds(lambda: step(state, batch))
    plain_memory = peak() - before

    start = clocks()
    lane = Rounded(FP16)
    program = trace(gpt.train_step, lane, (state, batch), {}, name="audit")
    session = Session(program, lane, Wide(np.dtype(np.float32)))
    outcome = session.run()
    first = clocks() - start
    audited = seconds(lambda: session.run().low)
    print(f"{len(outcome.rows)} rounded operations, error {outcome.error}")
    print(line("run", plain, audited))
    print(line("compile", plain_compile, first - audited))
    grown = peak() - before
    print(f"memory   plain {plain_memory / 1e6:.0f} MB   audited {grown / 1e6:.0f} MB   "
          f"ratio {grown / plain_memory:.1f}  (compilers' memory included)")  # fmt: skip


if __name__ == "__main__":
    main()
