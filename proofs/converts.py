"""Compares casts by XLA's convert with those by integers, on all 2^32 float32 inputs.

``cast`` rounds to FP8 by integers on a CPU and by XLA's convert on all other platforms. Here the
convert runs on the machine's default device, a GPU where there is one, and its codes are compared
with those of integers on the CPU. NaNs count as equal: a device may return any of them.

    python -m proofs.converts [format ...]
"""

from __future__ import annotations

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalewise.formats import SATURATE
from scalewise.formats import format as format_
from scalewise.rounding import CONVERTED, converted, nearest_codes

CHUNK = 1 << 22


def codes(route, fmt, saturate):
    """Returns a function from the bits of the first of ``CHUNK`` float32 numbers to their codes."""

    @jax.jit
    def run(first):
        x = lax.bitcast_convert_type(first + lax.iota(jnp.uint32, CHUNK), jnp.float32)
        y = route(x, fmt, saturate)
        code = y if y.dtype == jnp.uint8 else lax.bitcast_convert_type(y, jnp.uint8)
        return jnp.where(jnp.isnan(lax.bitcast_convert_type(code, fmt.dtype)), np.uint8(255), code)

    return run


def prove(name: str, saturate: bool | str) -> int:
    """Returns how many of all inputs the device's convert and the integers give different codes."""
    fmt, cpu = format_(name), jax.devices("cpu")[0]
    device = codes(converted, fmt, saturate)
    host = codes(nearest_codes, fmt, saturate)
    wrong = 0
    for first in range(0, 1 << 32, CHUNK):
        got = np.asarray(device(jnp.uint32(first)))
        with jax.default_device(cpu):
            want = np.asarray(host(jnp.uint32(first)))
        wrong += int(np.count_nonzero(got != want))
    return wrong


def main(names: list[str]) -> int:
    total = 0
    for name in names or sorted(CONVERTED):
        for saturate in SATURATE:
            start, wrong = time.perf_counter(), prove(name, saturate)
            total += wrong
            print(
                f"{name:8} saturate={saturate!s:6} on {jax.devices()[0].device_kind}: "
                f"{1 << 32:,} inputs, {wrong:,} differ ({time.perf_counter() - start:.0f} s)",
                flush=True,
            )
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
