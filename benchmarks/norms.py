"""``python -m benchmarks.norms``: time of every method of ``l2_norm`` against the direct one.

Each is compiled and warmed up, then all run in turns; the median counts, as a ratio to the direct
norm of the same format. ``auto`` stands beside the direct norm in either order of summation, since
one after the other (as published) and by halves differ by far more than the methods do.
"""

from __future__ import annotations

import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from scalewise.ops import NORM_METHODS, l2_norm

ROUTES = {"direct, pairwise": ("direct", "pairwise"), **{m: (m, None) for m in NORM_METHODS}}


def measure(fmt: str, n: int, rows: int, repeats: int) -> dict[str, float]:
    """Medians in seconds, by route."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((rows, n)), jnp.float32)
    routes = {
        name: jax.jit(lambda v, m=m, o=o: l2_norm(v, axis=-1, method=m, arithmetic=fmt, order=o))
        for name, (m, o) in ROUTES.items()
    }
    times: dict[str, list[float]] = {name: [] for name in routes}
    for _ in range(repeats + 1):
        for name, run in routes.items():
            began = time.perf_counter()
            jax.block_until_ready(run(x))
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(t[1:]) for name, t in times.items()}


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
    repeats = int(sys.argv[2]) if len(sys.argv) > 2 else 15
    for rows in (1, 64):
        print(f"n = {n}, {rows} norms at once, medians of {repeats}: ms, and ratio to direct")
        for fmt in ("fp16", "bf16", "e4m3"):
            medians = measure(fmt, n, rows, repeats)
            for name, seconds in medians.items():
                ratio = seconds / medians["direct"]
                print(f"{fmt:<6} {name:<30} {seconds * 1e3:8.3f} {ratio:7.2f}")


if __name__ == "__main__":
    main()
