"""Rounds all 2^32 float32 inputs to each format in each deterministic rounding and compares.

The results, with and without saturation, are compared with two routes that share no code with ours:
thresholds (``proofs/oracle.py``) for all, and the cast of NumPy or ml_dtypes where there is one. It
runs on all cores, records results in ``.prove/`` and resumes from there. Names of formats or
roundings restrict it: ``make prove ARGS="fp16 e4m3fn nearest_even"``.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from proofs import records
from proofs.oracle import DETERMINISTIC, NAN, Case
from scalewise.formats import CATALOGUE, E8M0, SATURATE, Format
from scalewise.rounding import cast, decode, round_to

CHUNK = 1 << 20  # a chunk fits into the caches
USER = Format("e6m9", exponent_bits=6, mantissa_bits=9)
# Unsigned formats round as the signed ones do, and tests/rounding samples them.
FORMATS = {
    f.name: f
    for f in [*CATALOGUE.values(), USER]
    if f.mantissa_bits < 23 and (f.signed or f is E8M0)
}


def canonical(y: jax.Array) -> jax.Array:
    """Returns a float32 array's bits, with the same bits for all NaNs."""
    return jnp.where(jnp.isnan(y), jnp.uint32(NAN), lax.bitcast_convert_type(y, jnp.uint32))


def inputs(first: jax.Array) -> jax.Array:
    """Returns ``CHUNK`` float32 numbers with consecutive bits from ``first`` (uint32) on."""
    return lax.bitcast_convert_type(first + lax.iota(jnp.uint32, CHUNK), jnp.float32)


def numbers(stored: jax.Array, fmt: Format) -> jax.Array:
    """Returns a result of ``cast``, codes or an array of the format's dtype, as float32."""
    coded = jnp.issubdtype(stored.dtype, jnp.integer)
    return decode(stored, fmt) if coded else stored.astype(jnp.float32)


def routes(fmt: Format, direction: str) -> list[tuple[str, Case, Any]]:
    """Returns the functions to check: (name, expected results, function to canonical bits)."""
    found: list[tuple[str, Case, Any]] = []
    for s in SATURATE:
        case, name = Case(fmt, direction, s), f"{direction}, saturate={s}"

        def rounded(x: jax.Array, s: Any = s) -> jax.Array:
            return canonical(round_to(x, fmt, rounding=direction, saturate=s))

        def casted(x: jax.Array, s: Any = s) -> jax.Array:
            y = canonical(numbers(cast(x, fmt, saturate=s), fmt))
            if fmt.nan_code is None:  # NaN has become code 0
                y = jnp.where(jnp.isnan(x) & (y == 0), jnp.uint32(NAN), y)
            return y

        found.append((name, case, rounded))
        # a cast to nearest even has code of its own: XLA's converts and nearest_codes
        if direction == "nearest_even":
            found.append((f"cast, {name}", case, casted))
    return found


def named(what: str, first: int, got: np.ndarray, want: np.ndarray) -> list[str]:
    """Returns descriptions of the first inputs with different results."""
    return [
        f"{what} of {np.uint32(first + i).view(np.float32)!r}: {got[i]:#010x} for {want[i]:#010x}"
        for i in np.flatnonzero(got != want)[:3]
    ]


def prove(name: str, direction: str) -> dict[str, object]:
    """Compares all inputs for one format and rounding; returns counts and the first mismatches."""
    fmt = FORMATS[name]
    todo = routes(fmt, direction)
    # libraries disagree about "nearest" for E8M0, and about NaN in formats without it: these are
    # compared with the thresholds only
    native = direction == "nearest_even" and fmt.dtype and fmt.zero and fmt.nan_code is not None
    stored = jax.jit(lambda first: cast(inputs(first), fmt))
    each = [jax.jit(lambda first, f=f: f(inputs(first))) for _, _, f in todo]

    @jax.jit
    def unlike(first: jax.Array, wants: list[jax.Array]) -> jax.Array:
        """Returns 0 if all routes give the expected bits."""
        x = inputs(first)
        pairs = zip(todo, wants, strict=True)
        bits = functools.reduce(jnp.bitwise_or, (f(x) ^ want for (_, _, f), want in pairs))
        return lax.reduce(bits, jnp.uint32(0), lax.bitwise_or, (0,))

    def wanted(first: int) -> list[jax.Array]:
        """Returns the expected bits of each route, sharing equal arrays."""
        wants, arrays = [], dict[tuple[bytes, bytes], jax.Array]()
        for _, case, _ in todo:
            ends, results = case.runs(first, CHUNK)
            key = ends.tobytes(), results.tobytes()
            if key not in arrays:
                arrays[key] = jnp.asarray(case.expected(first, CHUNK))
            wants.append(arrays[key])
        return wants

    wrong: list[str] = []
    compared, began = 0, time.monotonic()
    for first in range(0, 1 << 32, CHUNK):
        start = np.uint32(first)
        wants = wanted(first)
        compared += CHUNK * len(todo)
        if unlike(start, wants):
            for (what, _, _), f, want in zip(todo, each, wants, strict=True):
                wrong += named(what, first, np.asarray(f(start)), np.asarray(want))
            assert wrong, f"inputs from {first:#x} differ in one program, and in none by itself"
        if native:
            with np.errstate(over="ignore", invalid="ignore"):
                x = np.arange(CHUNK, dtype=np.uint32)
                theirs = (x + start).view(np.float32).astype(fmt.dtype)
                ours = np.asarray(stored(start))
                code = fmt.code_dtype
                nan = np.isnan(ours) & np.isnan(theirs)
                a, b = (np.where(nan, 0, y.view(code)).astype(np.uint32) for y in (ours, theirs))
            compared += CHUNK
            if not np.array_equal(a, b):
                wrong += named(f"cast, {fmt.dtype}", first, a, b)
        if len(wrong) > 20:
            break
    seconds = round(time.monotonic() - began, 1)
    return {"case": f"{name}-{direction}", "compared": compared, "wrong": wrong, "seconds": seconds}


def prove_pair(case: tuple[str, str]) -> dict[str, object]:
    """Calls :func:`prove` with the elements of a case."""
    return prove(*case)


def chosen(arguments: list[str]) -> list[tuple[str, str]]:
    """Returns the (format, rounding) pairs selected by the names on the command line."""
    if unknown := [a for a in arguments if a not in FORMATS and a not in DETERMINISTIC]:
        sys.exit(f"unknown {unknown}: there are {', '.join([*FORMATS, *DETERMINISTIC])}")
    names = [a for a in arguments if a in FORMATS] or FORMATS
    directions = [a for a in arguments if a in DETERMINISTIC] or DETERMINISTIC
    return [(f, r) for r, f in itertools.product(directions, names)]


def main() -> int:
    return records.run(Path(__file__), chosen(sys.argv[1:]), prove_pair, "-".join)


if __name__ == "__main__":
    sys.exit(main())
