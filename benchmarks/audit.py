"""What an audited training step costs beside the plain one: time, compile, memory.

`python -m benchmarks.audit` audits one step of examples/gpt.py in FP16, without trying fixes, and
prints ratios to the float32 step, medians in one process.
"""

import resource
import statistics
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


def seconds(call) -> float:
    """The median of a few calls."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def peak() -> int:
    """Bytes that this process has held at most, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    state = gpt.init(0)
    batch = next(gpt.batches(Path(__file__).read_bytes() * 8, 0))
    jax.block_until_ready(jax.jit(lambda x: jax.numpy.tanh(x @ x.T))(np.ones((8, 8), np.float32)))
    before = peak()
    start = time.perf_counter()
    step = jax.jit(gpt.train_step).lower(state, batch).compile()
    plain_compile = time.perf_counter() - start
    plain = seconds(lambda: step(state, batch))
    plain_memory = peak() - before

    start = time.perf_counter()
    lane = Rounded(FP16)
    program = trace(gpt.train_step, lane, (state, batch), {}, name="audit")
    session = Session(program, lane, Wide(np.dtype(np.float32)))
    outcome = session.run()
    first = time.perf_counter() - start
    audited = seconds(lambda: session.run().low)
    print(f"{len(outcome.rows)} rounded operations, error {outcome.error}")
    print(f"run      plain {plain:.3f} s   audited {audited:.3f} s   ratio {audited / plain:.1f}")
    build = first - audited
    print(f"compile  plain {plain_compile:.1f} s   audited {build:.1f} s   "
          f"ratio {build / plain_compile:.1f}")  # fmt: skip
    grown = peak() - before
    print(f"memory   plain {plain_memory / 1e6:.0f} MB   audited {grown / 1e6:.0f} MB   "
          f"ratio {grown / plain_memory:.1f}  (compilers' memory included)")  # fmt: skip


if __name__ == "__main__":
    main()
