"""Times products as matrix units compute them: million products a second, medians.

python -m benchmarks.matrix_units [SIZE]                    # 1024 by default
python -m benchmarks.matrix_units 1024 --mmasim FOLDER      # beside MMA-Sim, which needs torch
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from proofs import matrix_units as proof

from scalewise import ops
from scalewise.devices import MatrixUnit, element_of, matrix_unit

UNITS = (
    matrix_unit("h100", "e4m3fn"), matrix_unit("h100", "e4m3fn", promote=128),
    matrix_unit("b200", "e4m3fn"), matrix_unit("h100", "bf16"), matrix_unit("mi300x", "bf16"),
)  # fmt: skip
RUNS = 5


def median(run: Callable[[], object]) -> float:
    """Returns the median of the seconds of some runs, after one that compiles."""
    run()
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def ours(unit: MatrixUnit, n: int) -> float:
    rng = np.random.default_rng(0)
    dtype = element_of(unit.left).dtype
    a, b = (jnp.asarray(rng.standard_normal((n, n)), dtype) for _ in range(2))
    product = lambda: ops.matmul(a, b, accumulator=unit, out=jnp.float32).block_until_ready()  # noqa: E731
    return n**3 / median(product)


def theirs(unit: MatrixUnit) -> float:
    given = proof.operands(unit, "normal", 64, np.random.default_rng(0))
    return given[0].size / median(lambda: proof.mmasim(unit, *given))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", nargs="?", type=int, default=1024)
    parser.add_argument("--mmasim", type=Path, help="a checkout of microsoft/MMA-Sim")
    options = parser.parse_args()
    if options.mmasim:
        sys.path.insert(0, str(options.mmasim))
    for unit in UNITS:
        name = f"{unit}" + (f", promotion after {unit.promote}" if unit.promote else "")
        line = f"{name}: {ours(unit, options.size) / 1e6:.0f}"
        if options.mmasim and not unit.promote:
            line += f", MMA-Sim {theirs(unit) / 1e6:.4f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
