"""Times scalewise's own casts, arithmetic and norms, to compare two revisions.

    python -m benchmarks.own > new.json         # and in a checkout of the other revision, old.json
    python -m benchmarks.own --compare old.json new.json

Milliseconds, medians of runs in random order. Run both twice, in turn: two runs of one revision
differ by up to a quarter on a shared machine.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import scalewise as sw
from scalewise import ops

SIZE = 1 << 22
FORMATS = ("e4m3fn", "e5m2", "fp16", "bf16", "e2m1fn")
E6M9 = sw.Format("e6m9", exponent_bits=6, mantissa_bits=9)


def routes() -> dict[str, tuple[Callable, tuple[jax.Array, ...]]]:
    """Returns functions and their arguments, by name."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal(SIZE, np.float32))
    bits = jax.random.bits(jax.random.key(0), x.shape, jnp.uint32)
    halves = x[: SIZE // 4].astype(jnp.float16).astype(jnp.float32)
    arithmetic = ops.Arithmetic(sw.format("fp16"))
    table: dict[str, tuple[Callable, tuple[jax.Array, ...]]] = {}
    for f in FORMATS:
        table[f"cast {f}"] = (lambda v, f=f: sw.cast(v, f)), (x,)
        table[f"cast {f}, saturating"] = (lambda v, f=f: sw.cast(v, f, saturate=True)), (x,)
        toward_zero = lambda v, f=f: sw.round_to(v, f, rounding="toward_zero")  # noqa: E731
        table[f"round_to {f}, toward zero"] = toward_zero, (x,)
    for f in ("e4m3fn", "fp16"):
        stochastic = lambda v, b, f=f: sw.round_to(v, f, rounding="stochastic", bits=b)  # noqa: E731
        table[f"round_to {f}, stochastic"] = stochastic, (x, bits)
    table["cast e6m9, codes"] = (lambda v: sw.cast(v, E6M9)), (x,)
    table["cast e4m3fn from bfloat16"] = (lambda v: sw.cast(v, "e4m3fn")), (x.astype(jnp.bfloat16),)
    table["quantize e4m3fn"] = (lambda v: sw.quantize(v, "e4m3fn").data), (x,)
    mxfp8 = sw.formats.block_format("mxfp8_e4m3")
    table["quantize mxfp8"] = (lambda v: sw.quantize(v.reshape(-1, 1024), mxfp8).data), (x,)
    for name in ("add", "mul", "div"):
        table[f"FP16 {name}"] = getattr(arithmetic, name), (halves, halves[::-1])
    for method in ("power_of_two", "blue"):
        norm = lambda v, m=method: ops.l2_norm(v, method=m)  # noqa: E731
        table[f"l2_norm, {method}"] = norm, (halves[:4096],)
    return table


def timed(rounds: int) -> dict[str, float]:
    compiled: dict[str, tuple[Any, tuple[jax.Array, ...]]] = {
        name: (jax.jit(f), arguments) for name, (f, arguments) in routes().items()
    }
    for f, arguments in compiled.values():
        jax.block_until_ready(f(*arguments))
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    order = np.random.default_rng(1)
    for _ in range(rounds):
        for name in order.permutation(list(compiled)):
            f, arguments = compiled[name]
            start = time.perf_counter()
            jax.block_until_ready(f(*arguments))
            seconds[name].append(time.perf_counter() - start)
    return {name: round(1e3 * statistics.median(own), 3) for name, own in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"))
    given = parser.parse_args()
    if given.compare is None:
        print(json.dumps(timed(given.rounds), indent=1))
        return
    old, new = (json.loads(path.read_text()) for path in given.compare)
    for name in old.keys() & new.keys():
        print(f"{name:32} {new[name] / old[name]:.2f} of the old time ({new[name]} ms)")


if __name__ == "__main__":
    main()
