"""What a cast has to give, by a route that shares no code with the casts: thresholds.

The positive float32 numbers stand in the order of their bits, and a rounding is monotone: so it is
known by the first input that goes to each code. Those thresholds are computed here from the
format's numbers alone (midpoints, exact in float64), one by one; between two of them the result is
constant, whatever integer tricks a cast plays.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from scalewise.formats import ROUNDINGS, Format

INFINITY = 0x7F800000
NAN = 0x7FC00000
DETERMINISTIC = tuple(name for name, mode in ROUNDINGS.items() if not mode.random)


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to round: a format, a direction, what overflow does."""

    fmt: Format
    rounding: str = "nearest_even"
    saturate: bool | str = False

    def expected(self, first: int, count: int) -> np.ndarray:
        """Bits of the results for the inputs of bits ``first .. first + count - 1``; NaN is NAN.

        The inputs have one sign.
        """
        ends, results = self.runs(first, count)
        if len(results) > 1024:
            return np.repeat(results, np.diff(ends, prepend=0))
        bits, begin = np.empty(count, results.dtype), 0
        for end, result in zip(ends, results, strict=True):  # a slice each is quicker
            bits[begin:end], begin = result, end
        return bits

    def runs(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The same as where each run of equal results ends, counted from ``first``, and those."""
        magnitude, negative = first & 0x7FFFFFFF, first >= 1 << 31
        starts, results = _segments(self, negative)
        low = np.searchsorted(starts, magnitude, side="right") - 1
        high = np.searchsorted(starts, magnitude + count, side="left")
        ends = np.concatenate([starts[low + 1 : high], [magnitude + count]]) - magnitude
        return ends, results[low:high]


@functools.lru_cache(maxsize=8)
def _segments(case: Case, negative: bool) -> tuple[np.ndarray, np.ndarray]:
    """Magnitudes (float32 bits) at which a new result begins, and the results' bits."""
    fmt, saturate = case.fmt, case.saturate
    starts, values = _thresholds(fmt, of_magnitude(case.rounding, negative))
    stays = STAYS_FINITE[of_magnitude(case.rounding, negative)]
    top = float(fmt.max)
    beyond = np.inf if fmt.infinities else top if fmt.nan_code is None else np.nan
    values[-1] = beyond if saturate is False and not stays else top
    lowest = np.nan if saturate is False else float(fmt.smallest)
    if not fmt.zero:
        values[0] = lowest
    starts = np.concatenate([starts, [INFINITY, INFINITY + 1]])
    values = np.concatenate([values, [top if saturate is True else beyond, np.nan]])
    if negative:
        values = -values if fmt.signed else np.where(np.arange(len(values)) >= 0, np.nan, values)
        if fmt.signed and not fmt.negative_zero:
            values = np.where(values == 0, 0.0, values)
    # zero itself, apart from what rounds to zero
    zero = -0.0 if negative and fmt.negative_zero else 0.0
    if not fmt.zero:
        zero = lowest
    starts = np.concatenate([[0], np.maximum(starts, 1)])
    values = np.concatenate([[zero], values])
    keep = np.concatenate([np.diff(starts) > 0, [True]])  # of several at one place, the last
    bits = values.astype(np.float32).view(np.uint32)
    return starts[keep], np.where(np.isnan(values), np.uint32(NAN), bits)[keep]


def edges(fmt: Format, rounding: str, saturate: bool | str) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each sign, inputs on and just below each threshold, and the results; float32 bits."""
    result = []
    for negative in (False, True):
        starts, results = _segments(Case(fmt, rounding, saturate), negative)
        at = np.unique(np.concatenate([starts, starts - 1]).clip(0, 0x7FFFFFFF))
        want = results[np.searchsorted(starts, at, side="right") - 1]
        result.append((at.astype(np.uint32) | np.uint32(negative << 31), want))
    return result


# Whether a magnitude rounded beyond the largest number stays there (IEEE 754-2019, 7.4).
STAYS_FINITE = {
    "nearest_even": False,
    "nearest_away": False,
    "toward_zero": True,
    "away_from_zero": False,
    "to_odd": True,
}


def of_magnitude(rounding: str, negative: bool) -> str:
    """A directed rounding of a negative number is that of its magnitude the other way round."""
    if rounding not in ("toward_positive", "toward_negative"):
        return rounding
    return "away_from_zero" if (rounding == "toward_positive") != negative else "toward_zero"


def _thresholds(fmt: Format, rounding: str) -> tuple[np.ndarray, np.ndarray]:
    """First magnitude of each code's number, ascending; the last number stands for overflow."""
    values = _values(fmt)
    odd = np.arange(1, len(values)) % 2 == 1
    if not fmt.zero:  # half the smallest number, under a code of -1, stands for "below them all"
        values = np.concatenate([[values[0] / 2], values])
        odd = np.concatenate([[False], odd])
    low, high = values[:-1].copy(), values[1:]
    middle = (low + high) / 2  # 25 significant bits at the most: exact
    if not fmt.zero:
        low[0] = 0.0  # away from zero, all that isn't zero is above it
    never, always = np.zeros(len(odd), bool), np.ones(len(odd), bool)
    at, inclusive = {
        "nearest_even": (middle, ~odd),
        "nearest_away": (middle, always),
        "toward_zero": (high, always),
        "away_from_zero": (low, never),
        "to_odd": (np.where(odd, low, high), ~odd),  # an odd code takes all around it
    }[rounding]
    with np.errstate(over="ignore"):
        first = at.astype(np.float32)
    wide = first.astype(np.float64)
    too_low = (wide < at) | ((wide == at) & ~inclusive)
    bits = np.minimum(first.view(np.uint32).astype(np.int64) + too_low, INFINITY)
    return np.concatenate([[0], bits]), values


def _values(fmt: Format) -> np.ndarray:
    """The numbers of the codes from 0 to one beyond the largest, counted up binade by binade."""
    per = 1 << fmt.mantissa_bits
    binades, first = [np.arange(per) * 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)], 1
    if not fmt.subnormals:
        binades, first = [], 0
    assert fmt.bias is not None
    for exponent in range(first - fmt.bias, fmt.max_exponent + 2):
        binades.append((per + np.arange(per)) * 2.0 ** (exponent - fmt.mantissa_bits))
    values = np.concatenate(binades)[: fmt.max_code + 2]
    if fmt.zero:
        values[0] = 0.0
    return values
