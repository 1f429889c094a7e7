"""``python -m benchmarks.monitor``: the share of a training step's time that a Monitor takes.

Steps of examples/gpt.py with and without a :class:`scalewise.auditing.Monitor` of its parameters
and moments, every 10 steps, in turn in one process; the ratio of the medians of runs of 20 steps.
"""

import statistics
import tempfile
import time
from pathlib import Path

import jax

from examples import gpt
from scalewise.auditing import Monitor

STEPS, ROUNDS, EVERY = 20, 9, 10


def main() -> None:
    state = gpt.init(0)
    batch = next(gpt.batches(Path(gpt.__file__).read_bytes() * 4, 0))
    step = jax.jit(gpt.train_step)
    with tempfile.TemporaryDirectory() as folder:
        monitor = Monitor("fp16", every=EVERY, groups=2, out=folder)

        def seconds(watched: bool) -> float:
            now = jax.block_until_ready(state)
            start = time.perf_counter()
            for n in range(STEPS):
                now, _ = step(now, batch)
                if watched:
                    monitor(n, now)
            jax.block_until_ready(now)
            return (time.perf_counter() - start) / STEPS

        for watched in (False, True):  # compiles
            seconds(watched)
        readings = []
        for n in range(10):
            start = time.perf_counter()
            monitor.numbers(EVERY * n, state)  # waits for it, which a training doesn't
            readings.append(time.perf_counter() - start)
        pairs = [(seconds(False), seconds(True)) for _ in range(ROUNDS)]
        monitor.close()
    plain, watched = (statistics.median(x) for x in zip(*pairs, strict=True))
    reading = statistics.median(readings)
    share = statistics.median(b / a - 1 for a, b in pairs)
    print(f"a step: {plain * 1e3:.1f} ms plain, {watched * 1e3:.1f} ms monitored every {EVERY}")
    print(f"a reading: {reading * 1e3:.1f} ms, {reading / (EVERY * plain):.2%} of {EVERY} steps")
    print(f"the monitor's share of a step's time: {share:.2%} (median of {ROUNDS} pairs of runs)")


if __name__ == "__main__":
    main()
