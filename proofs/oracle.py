"""What a cast has to give, by a route that shares no code with the casts: thresholds.

The positive float32 numbers stand in the order of their bits, and a rounding is monotone: so it is
known by the first input that goes to each code. Those thresholds are computed here from the
format's numbers alone (midpoints, exact in float64), one by one; between two of them the result is
constant, whatever integer tricks a cast plays.
"""

from __future__ import annotations

import numpy as np

from scalewise.formats import Format

INFINITY = 0x7F800000


def thresholds(fmt: Format) -> tuple[np.ndarray, np.ndarray]:
    """First positive input (float32 bits) of each result, and the results (float64), ascending.

    To nearest, ties to the even code; the last result stands for overflow (infinity).
    """
    codes = np.arange(fmt.max_code + 2)
    values = np.array([float(fmt.exact(int(c))) for c in codes]) if fmt.bits <= 12 else _many(fmt)
    middle = (values[:-1] + values[1:]) / 2  # 25 significant bits at the most: exact
    tie_goes_up = codes[1:] % 2 == 0
    with np.errstate(over="ignore"):
        first = middle.astype(np.float32)
    wide = first.astype(np.float64)
    too_low = (wide < middle) | ((wide == middle) & ~tie_goes_up)
    bits = first.view(np.uint32).astype(np.int64) + too_low
    bits = np.minimum(bits, INFINITY)
    values = values.copy()
    values[-1] = np.inf
    return np.concatenate([[0], bits]), values


def _many(fmt: Format) -> np.ndarray:
    """Values of codes 0 to max_code + 1 by counting up quanta binade by binade."""
    per = 1 << fmt.mantissa_bits
    binades = []
    exponent = fmt.min_exponent
    if fmt.subnormals:
        binades.append(np.arange(per) * 2.0 ** (exponent - fmt.mantissa_bits))
    while exponent <= fmt.max_exponent + 1:
        binades.append((per + np.arange(per)) * 2.0 ** (exponent - fmt.mantissa_bits))
        exponent += 1
    values = np.concatenate(binades)[: fmt.max_code + 2]
    if not fmt.subnormals and fmt.zero:
        values[0] = 0.0
    return values


def expected(fmt: Format, first: int, count: int, saturate: bool | str) -> np.ndarray:
    """float32 results for the inputs whose bits are ``first .. first + count - 1``."""
    negative = first >= 1 << 31
    magnitude = first & 0x7FFFFFFF
    starts, results = thresholds(fmt)
    result = np.empty(count, np.float32)
    low = np.searchsorted(starts, magnitude, side="right") - 1
    high = np.searchsorted(starts, magnitude + count, side="left")
    edges = np.clip(np.concatenate([starts[low:high], [magnitude + count]]) - magnitude, 0, count)
    with np.errstate(over="ignore"):
        result[:] = np.repeat(results[low:high].astype(np.float32), np.diff(edges))
    bits = np.arange(magnitude, magnitude + count)
    at_infinity, nan = bits == INFINITY, bits > INFINITY
    beyond = np.inf if fmt.infinities else float(fmt.max) if fmt.nan_code is None else np.nan
    top = np.float32(float(fmt.max))
    over = np.isinf(result)
    result[over & ~at_infinity] = beyond if saturate is False else top
    result[at_infinity] = top if saturate is True else beyond
    if negative:
        if fmt.signed:
            result = -result
            if not fmt.negative_zero:
                result[result == 0] = 0.0
        else:
            result[bits > 0] = np.nan
    if not fmt.zero:
        result[bits == 0] = np.nan
    result[nan] = np.nan
    return result


def mismatches(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Where two float32 arrays differ: in any bit, but NaNs are all alike."""
    same = got.view(np.uint32) == want.view(np.uint32)
    return np.flatnonzero(~(same | (np.isnan(got) & np.isnan(want))))
