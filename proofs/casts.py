"""Every one of the 2^32 float32 inputs, rounded to each format in each direction.

With and without saturation, against two routes that share no code with ours: thresholds
(``proofs/oracle.py``) for all, and NumPy's or ml_dtypes' own cast where there is one. It runs on
all cores; ``.prove/`` remembers what was done, so that it goes on where it stopped. Names of
formats or roundings restrict it: ``make prove ARGS="fp16 e4m3fn nearest_even"``.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from proofs import records
from proofs.oracle import DETERMINISTIC, NAN, Case
from scalewise.formats import CATALOGUE, E8M0, SATURATE, Format
from scalewise.rounding import cast, decode, round_to

CHUNK = 1 << 20  # what is moved fits in caches, and no call needs new memory
USER = Format("e6m9", exponent_bits=6, mantissa_bits=9)
# The unsigned variants round as their signed siblings do: tests/rounding samples them.
FORMATS = {
    f.name: f
    for f in [*CATALOGUE.values(), USER]
    if f.mantissa_bits < 23 and (f.signed or f is E8M0)
}


def canonical(y: jax.Array) -> jax.Array:
    """A float32 array's bits, all NaNs alike."""
    return jnp.where(jnp.isnan(y), jnp.uint32(NAN), lax.bitcast_convert_type(y, jnp.uint32))


def inputs(first: jax.Array) -> jax.Array:
    """The ``CHUNK`` float32 numbers whose bits begin at ``first`` (uint32)."""
    return lax.bitcast_convert_type(first + lax.iota(jnp.uint32, CHUNK), jnp.float32)


def compare(wrong: list[str], what: str, first: int, got: np.ndarray, want: np.ndarray) -> int:
    """Notes the first inputs that differ; returns how many were compared."""
    if not np.array_equal(got, want):
        for i in np.flatnonzero(got != want)[:3]:
            x = np.uint32(first + i).view(np.float32)
            wrong.append(f"{what} of {x!r}: {got[i]:#010x} for {want[i]:#010x}")
    return len(got)


def prove(name: str, direction: str) -> dict[str, object]:
    """All inputs for one format and direction: how many comparisons, and the first that differ."""
    fmt = FORMATS[name]
    cases = [Case(fmt, direction, s) for s in SATURATE]
    rounds = [
        jax.jit(
            lambda first, s=c.saturate: canonical(
                round_to(inputs(first), fmt, rounding=direction, saturate=s)
            )
        )
        for c in cases
    ]
    # E8M0 has as many readings of "nearest" as there are libraries, and what has no NaN turns it
    # into something else each time: those stand against the thresholds alone
    native = direction == "nearest_even" and fmt.dtype and fmt.zero and fmt.nan_code is not None
    stored = jax.jit(lambda first: cast(inputs(first), fmt))
    # a cast to nearest even has routes of its own: XLA's converts, or codes made in one go
    casts = [
        jax.jit(
            lambda first, s=c.saturate: canonical(numbers(cast(inputs(first), fmt, saturate=s)))
        )
        for c in (cases if direction == "nearest_even" else [])
    ]

    def numbers(stored: jax.Array) -> jax.Array:
        coded = jnp.issubdtype(stored.dtype, jnp.integer)
        return decode(stored, fmt) if coded else stored.astype(jnp.float32)

    wrong: list[str] = []
    compared, began = 0, time.monotonic()
    for first in range(0, 1 << 32, CHUNK):
        start = np.uint32(first)
        for i, (case, round_) in enumerate(zip(cases, rounds, strict=True)):
            want = case.expected(first, CHUNK)
            what = f"{direction}, saturate={case.saturate}"
            compared += compare(wrong, what, first, np.asarray(round_(start)), want)
            if casts:
                if fmt.nan_code is None:  # no code for it: zero's
                    want = np.where(want == NAN, np.uint32(0), want)
                got = np.asarray(casts[i](start))
                compared += compare(wrong, f"cast, {what}", first, got, want)
        if native:
            with np.errstate(over="ignore", invalid="ignore"):
                x = np.arange(CHUNK, dtype=np.uint32)
                theirs = (x + start).view(np.float32).astype(fmt.dtype)
                ours = np.asarray(stored(start))
                code = fmt.code_dtype
                nan = np.isnan(ours) & np.isnan(theirs)
                a, b = (np.where(nan, 0, y.view(code)).astype(np.uint32) for y in (ours, theirs))
            compared += compare(wrong, f"cast, {fmt.dtype}", first, a, b)
        if len(wrong) > 20:
            break
    seconds = round(time.monotonic() - began, 1)
    return {"case": f"{name}-{direction}", "compared": compared, "wrong": wrong, "seconds": seconds}


def prove_pair(case: tuple[str, str]) -> dict[str, object]:
    """:func:`prove` for records."""
    return prove(*case)


def chosen(arguments: list[str]) -> list[tuple[str, str]]:
    """(format, rounding) pairs named on the command line; what isn't named isn't restricted."""
    if unknown := [a for a in arguments if a not in FORMATS and a not in DETERMINISTIC]:
        sys.exit(f"unknown {unknown}: there are {', '.join([*FORMATS, *DETERMINISTIC])}")
    names = [a for a in arguments if a in FORMATS] or FORMATS
    directions = [a for a in arguments if a in DETERMINISTIC] or DETERMINISTIC
    return [(f, r) for r, f in itertools.product(directions, names)]


def main() -> int:
    return records.run(Path(__file__), chosen(sys.argv[1:]), prove_pair, "-".join)


if __name__ == "__main__":
    sys.exit(main())
