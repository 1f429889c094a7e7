"""Compares the probabilities of stochastic rounding with exact arithmetic in every binade.

For every format of the catalogue, inputs of every binade from the format's largest number down to
float32's smallest subnormal are rounded with draws on both sides of the threshold at which the
result changes, the first and the last draw, and random ones, and compared with exact rational
arithmetic. In each binade one input is rounded with all draws that differ, and those that round up
are counted (where more than 23 bits matter, with 2^23 evenly spaced draws, and once with all 2^32).
This is done for explicit bits, with and without JAX's x64, from float32 and float64, with and
without saturation; a key must round like the bits drawn from it. Names of formats restrict it.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from proofs import records
from scalewise.formats import CATALOGUE, Format
from scalewise.rounding import round_to

FORMATS = dict(CATALOGUE)
DRAWS = 32  # for each input
CHUNK = 1 << 20
CASES = [
    (name, dtype)
    for name in FORMATS
    for dtype in ("float32", "float64")
    if (name, dtype) != ("fp64", "float32")  # where nothing is rounded
]


@dataclasses.dataclass(frozen=True)
class Law:
    """The distribution of one input's stochastic rounding.

    Attributes:
        low, high: the results, of the input's sign.
        bits: how many of the lowest bits of a draw decide.
        ups: for how many of the 2^bits values of those bits the result is ``high``: the highest.
    """

    low: float
    high: float
    bits: int
    ups: int


def law(fmt: Format, x: float, width: int, saturate: bool = False, ulp: int = -149) -> Law:
    """Returns the distribution of stochastic rounding to a format, by exact arithmetic.

    Of the 2^width draws, floor(p * 2^width) give the upper neighbour, where p is the distance from
    the lower neighbour over the distance between both.

    Args:
        fmt: the format.
        x: any finite number but zero.
        width: the width of a draw in bits.
        saturate: whether overflow becomes the largest number.
        ulp: log2 of the last place of ``x`` in its dtype.
    """
    if x < 0 and not fmt.signed:
        return Law(math.nan, math.nan, 0, 0)
    size = abs(Fraction(x))
    low, high, p = neighbours(fmt, size, saturate)
    gap = (high - low) / Fraction(2) ** ulp
    bits = gap.numerator.bit_length() - 1
    if gap != 1 << bits or bits > width:
        bits = width
    results = [_number(fmt, y, saturate) for y in (low, high)]
    if not fmt.zero and size < fmt.smallest:
        results = [math.nan if not saturate else float(fmt.smallest), float(fmt.smallest)]
    sign = -1.0 if x < 0 else 1.0
    if results[0] == 0 and not fmt.negative_zero and x < 0:
        return Law(0.0, sign * results[1], bits, math.floor(p * (1 << bits)))
    return Law(sign * results[0], sign * results[1], bits, math.floor(p * (1 << bits)))


def neighbours(fmt: Format, size: Fraction, saturate: bool) -> tuple[Fraction, Fraction, Fraction]:
    """Returns both neighbours of a positive number, without overflow, and its position between."""
    smallest = fmt.smallest
    if size < smallest and not fmt.subnormals:
        low = Fraction(0) if fmt.zero else smallest / 2
        return low, smallest, max(Fraction(0), (size - low) / (smallest - low))
    exponent = max(_log2(size), fmt.min_exponent)
    quantum = Fraction(2) ** (exponent - fmt.mantissa_bits)
    low = quantum * math.floor(size / quantum)
    return low, low + quantum, (size - low) / quantum


def _log2(x: Fraction) -> int:
    n = x.numerator.bit_length() - x.denominator.bit_length()
    return n if Fraction(2) ** n <= x else n - 1


def _number(fmt: Format, y: Fraction, saturate: bool) -> float:
    if y <= fmt.max:
        return float(y)
    if saturate or (not fmt.infinities and fmt.nan_code is None):
        return float(fmt.max)
    return math.inf if fmt.infinities else math.nan


def threshold(fmt: Format, x: Fraction, width: int) -> tuple[float, float, int]:
    """Returns the neighbours of a positive number, and how many of 2^width draws round up."""
    low, high, p = neighbours(fmt, x, False)
    return float(low), float(high), math.floor(p * (1 << width))


@lru_cache(maxsize=8)
def inputs(fmt: Format, dtype: Any, per_binade: int) -> np.ndarray:
    """Returns inputs of every binade from above the format's range to float32's smallest.

    In each of them: one unit above the power of two, one below the next, and random ones; of both
    signs. In float64 with all of its bits.
    """
    rng = np.random.default_rng(0)
    precision = np.finfo(dtype).nmant
    top = min(fmt.max_exponent + 1, 127)
    parts = []
    for exponent in range(top, -150, -1):
        bits = precision if dtype == np.float64 else min(23, exponent + 149)
        units = rng.integers(0, 1 << bits, per_binade, np.uint64)
        units[:2] = [1, (1 << bits) - 1][:per_binade]
        units &= np.uint64((1 << bits) - 1)
        parts.append(np.ldexp(1 + np.ldexp(units.astype(np.float64), -bits), exponent))
    x = np.concatenate(parts).astype(dtype)
    return np.concatenate([x, -x])


def ulps(x: np.ndarray) -> np.ndarray:
    """Returns log2 of each number's last place in its dtype."""
    info = np.finfo(x.dtype)
    _, exponent = np.frexp(x)
    return np.maximum(exponent - 1, info.minexp).astype(np.int64) - info.nmant


@partial(jax.jit, static_argnums=(2, 3))
def _rounded(x: jax.Array, bits: jax.Array, fmt: Format, saturate: bool) -> jax.Array:
    return round_to(x, fmt, rounding="stochastic", saturate=saturate, bits=bits)


def check(
    fmt: Format, dtype: Any, per_binade: int, saturate: bool = False
) -> tuple[int, list[str]]:
    """Compares draws around each input's threshold; returns the count and the mismatches."""
    x = inputs(fmt, dtype, per_binade)
    width = 64 if dtype == np.float64 else 32
    word = np.uint64 if width == 64 else np.uint32
    laws = [law(fmt, float(v), width, saturate, int(u)) for v, u in zip(x, ulps(x), strict=True)]
    draws = np.random.default_rng(1).integers(0, 1 << width, (len(x), DRAWS), word, endpoint=False)
    mask = np.array([(1 << a.bits) - 1 for a in laws], word)[:, None]
    first = np.array([(1 << a.bits) - a.ups for a in laws], object)  # 2^bits: none goes up
    never = np.array([a.ups == 0 for a in laws])[:, None]
    first = np.where(never[:, 0], 0, first).astype(word)[:, None]
    for column, value in enumerate((first, first - word(1), word(0), ~word(0))):
        draws[:, column : column + 1] = (draws[:, column : column + 1] & ~mask) | (value & mask)
    up = ~never & ((draws & mask) >= first)
    low, high = (np.array([getattr(a, n) for a in laws])[:, None] for n in ("low", "high"))
    want = np.where(up, high, low)
    spread = jnp.broadcast_to(jnp.asarray(x)[:, None], draws.shape)
    got = np.asarray(_rounded(spread, jnp.asarray(draws), fmt, saturate), np.float64)
    nan = np.isnan(got) & np.isnan(want)
    same = nan | ((got == want) & (np.signbit(got) == np.signbit(want)))
    wrong = [
        f"{fmt.name}, saturate={saturate}: {x[i]!r} with draw {draws[i, j]:#x}: {got[i, j]!r} "
        f"for {want[i, j]!r}"
        for i, j in np.argwhere(~same)[:5]
    ]
    return got.size, wrong


def count(fmt: Format) -> tuple[int, list[str]]:
    """Checks how many of all draws, or of 2^23 evenly spaced ones, round up in each binade.

    The first input below half the smallest number is rounded with all 2^32 draws. Returns the
    number of comparisons and the mismatches.
    """
    x = inputs(fmt, np.float32, 3)
    x = x[: len(x) // 2][2::3]

    @jax.jit
    def ups(x: jax.Array, first: jax.Array, step: jax.Array, low: jax.Array) -> jax.Array:
        draws = (first + jnp.arange(CHUNK, dtype=jnp.uint32)) * step
        y = round_to(jnp.full(CHUNK, x), fmt, rounding="stochastic", bits=draws)
        # their bits, since a comparison of floats flushes subnormals
        y, low = (lax.bitcast_convert_type(v, jnp.uint32) for v in (y, low))
        return jnp.sum(y != low)

    compared, wrong, seen = 0, [], False
    for v, ulp in zip(x, ulps(x), strict=True):
        rule = law(fmt, float(v), 32, False, int(ulp))
        if np.isnan(rule.low) or rule.low == rule.high or not math.isfinite(rule.low):
            continue
        whole = 0 < 2 * abs(float(v)) / float(fmt.smallest) < 1 and not seen
        seen |= whole
        draws = 1 << max(20, min(rule.bits, 32 if whole else 23))
        step = max(1, (1 << rule.bits) // draws)
        found = sum(
            int(ups(v, np.uint32(first), np.uint32(step), np.float32(rule.low)))
            for first in range(0, draws, CHUNK)
        )
        # the highest draws go up: of those at multiples of step, as many as lie among them
        expected = rule.ups // step * max(1, draws >> rule.bits)
        compared += draws
        if found != expected:
            wrong.append(f"{fmt.name}: {v!r} goes up for {found} of {draws} draws, not {expected}")
    return compared, wrong


def prove(case: tuple[str, str]) -> dict[str, Any]:
    """Checks one format from one dtype; returns the count and the first mismatches."""
    fmt, dtype = FORMATS[case[0]], np.dtype(case[1]).type
    began, compared, wrong = time.monotonic(), 0, []

    def add(result: tuple[int, list[str]]) -> None:
        nonlocal compared
        compared += result[0]
        wrong.extend(result[1])

    if dtype == np.float32:
        for saturate in (False, True):
            add(check(fmt, dtype, 8, saturate))
        add(count(fmt))
        add(_by_key(fmt, dtype))
    with jax.enable_x64(True):
        for saturate in (False, True):
            add(check(fmt, dtype, 8, saturate))
        add(_by_key(fmt, dtype))
    seconds = round(time.monotonic() - began, 1)
    return {"case": "-".join(case), "compared": compared, "wrong": wrong, "seconds": seconds}


def _by_key(fmt: Format, dtype: Any) -> tuple[int, list[str]]:
    """Compares rounding with a key with rounding by the bits drawn from the key."""
    x, key = jnp.asarray(inputs(fmt, dtype, 8)), jax.random.key(7)
    bits = jax.random.bits(key, x.shape, jnp.uint64 if dtype == np.float64 else jnp.uint32)
    by_key = np.asarray(round_to(x, fmt, rounding="stochastic", key=key))
    same = np.array_equal(by_key, np.asarray(_rounded(x, bits, fmt, False)), equal_nan=True)
    return x.size, [] if same else [f"{fmt.name}: a key isn't its bits"]


def main() -> int:
    if unknown := [a for a in sys.argv[1:] if a not in FORMATS]:
        sys.exit(f"unknown {unknown}: expected some of {', '.join(FORMATS)}")
    cases = [c for c in CASES if not sys.argv[1:] or c[0] in sys.argv[1:]]
    return records.run(Path(__file__), cases, prove, lambda c: f"{c[0]}-{c[1]}")


if __name__ == "__main__":
    sys.exit(main())
