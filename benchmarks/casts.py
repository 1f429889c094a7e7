"""``make bench``: times casts of float32, ``np.copyto`` and other libraries' casts.

One process, steady state: each route runs once to compile and warm up, then all routes in turns,
and the median of its runs counts; what takes over a second is timed once. Figures are millions of
elements a second, and the ratio to a NumPy copy that moves as many bytes (4 read, and as many
written as the result has). The Makefile has malloc use memory again, for everybody: else results of
over 32 MB wait for the system's pages, unless the heap happens to have room.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.peers import Run, peers
from scalewise import Format, ScaledArray, cast, quantize, round_to
from scalewise import format as format_
from scalewise.scaled import cast_data

E6M9 = Format("e6m9", exponent_bits=6, mantissa_bits=9)
FORMATS = [format_(n) for n in ("e4m3fn", "e5m2", "fp16", "bf16", "e2m1fn")]
SLOW = 1.0  # seconds: what takes longer is timed once
OTHERS = ("toward_zero", "toward_negative", "to_odd", "stochastic")


def routes(x: np.ndarray) -> dict[tuple[str, str], Run]:
    """Returns the timed calls by (format, library)."""
    there = jnp.asarray(x)
    table: dict[tuple[str, str], Run] = {}

    def jitted(f: Callable[[jax.Array], Any]) -> Run:
        compiled = jax.jit(f)
        return lambda: jax.block_until_ready(compiled(there))

    for fmt in FORMATS:
        dtype = np.dtype(fmt.dtype)
        copied = np.empty((x.nbytes + x.size * dtype.itemsize) // 2, np.uint8)
        source = x.view(np.uint8).ravel()[: copied.size]
        table[fmt.name, "np.copyto"] = lambda a=copied, b=source: np.copyto(a, b)
        table[fmt.name, "scalewise"] = jitted(lambda v, f=fmt: cast(v, f))
        table[fmt.name, "ours, saturating"] = jitted(lambda v, f=fmt: cast(v, f, saturate=True))
        table[fmt.name, "XLA convert"] = jitted(lambda v, d=dtype: lax.convert_element_type(v, d))
        if fmt.bits > 4:
            table[fmt.name, "ml_dtypes"] = lambda d=dtype: x.astype(d)
    table[E6M9.name, "scalewise, codes"] = jitted(lambda v: cast(v, E6M9))
    table[E6M9.name, "scalewise, in float32"] = jitted(lambda v: round_to(v, E6M9))
    table |= usable(peers(x))
    bits = jax.random.bits(jax.random.key(0), x.shape, jnp.uint32)
    whole_copy = np.empty_like(x)
    for fmt in (E6M9, FORMATS[0]):
        name = f"{fmt.name} in float32"
        table[name, "np.copyto"] = lambda: np.copyto(whole_copy, x)
        table[name, "scalewise"] = jitted(lambda v, f=fmt: round_to(v, f))
        for rounding in OTHERS:
            options = {"rounding": rounding}
            if rounding == "stochastic":
                compiled = jax.jit(
                    lambda v, b, f=fmt: round_to(v, f, rounding="stochastic", bits=b)
                )
                run = lambda c=compiled: jax.block_until_ready(c(there, bits))  # noqa: E731
                table[name, "stochastic, given bits"] = run
            else:
                table[name, rounding] = jitted(lambda v, f=fmt, o=options: round_to(v, f, **o))
    rows = there.reshape(-1, 4096)
    for name in ("mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "nvfp4"):
        compiled = jax.jit(lambda v, n=name: quantize(v, n))
        table[name, "scalewise"] = lambda c=compiled: jax.block_until_ready(c(rows))
    scaled = ScaledArray(there, jnp.float32(0.25))
    through = jax.jit(lambda a: cast_data(a, "e4m3fn"))
    table["e4m3fn", "through ScaledArray"] = lambda: jax.block_until_ready(through(scaled))
    table["e4m3fn", "with a scale from amax"] = jitted(lambda v: quantize(v, "e4m3fn"))
    return dict(sorted(table.items(), key=lambda item: item[0][0]))


def usable(table: dict[tuple[str, str], Run]) -> dict[tuple[str, str], Run]:
    """Returns the calls that run on this machine, and prints the names of the others."""
    result = {}
    for what, run in table.items():
        try:
            with np.errstate(all="ignore"):
                run()
        except Exception as error:  # another library's, of any kind
            print(f"{what[1]} can't cast to {what[0]}: {type(error).__name__}: {str(error)[:80]}")
        else:
            result[what] = run
    return result


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1 << 24
    repeats = int(sys.argv[2]) if len(sys.argv) > 2 else 15
    x = np.random.default_rng(0).standard_normal(count, np.float32)
    table = routes(x)
    times: dict[tuple[str, str], list[float]] = {what: [] for what in table}
    names, shuffled = list(table), np.random.default_rng(0)
    for turn in range(repeats + 1):
        for i in shuffled.permutation(
            len(names)
        ):  # whose memory one gets back isn't always the same
            what, run = names[i], table[names[i]]
            if turn > 1 and times[what][0] > SLOW:
                continue
            began = time.perf_counter()
            with np.errstate(all="ignore"):
                run()
            times[what].append(time.perf_counter() - began)
    print(f"{count:,} float32, medians of {repeats}, M elements/s")
    median = {what: statistics.median(t[1:]) for what, t in times.items()}
    for (fmt, who), seconds in median.items():
        copy = median.get((fmt, "np.copyto"))
        ratio = f"{copy / seconds:7.2f} of a copy" if copy else ""
        print(f"{fmt:<20} {who:<24} {count / seconds / 1e6:8.0f} {ratio}")


if __name__ == "__main__":
    main()
