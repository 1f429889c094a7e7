"""The expected results of casts, from thresholds, without any code of the casts.

Positive float32 numbers have the order of their bits, and a rounding is monotone, so the first
input that rounds to each code determines all results: between two such thresholds the result is
constant. The thresholds are computed from the format's numbers alone (their midpoints are exact in
float64).
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
    """A format, a rounding and a saturation, with the results that they give."""

    fmt: Format
    rounding: str = "nearest_even"
    saturate: bool | str = False

    def expected(self, first: int, count: int) -> np.ndarray:
        """Returns the bits of results for the inputs with bits ``first .. first + count - 1``.

        The inputs must have one sign. The bits of NaN are ``NAN``.
        """
        ends, results = self.runs(first, count)
        if len(results) > 1024:
            return np.repeat(results, np.diff(ends, prepend=0))
        bits, begin = np.empty(count, results.dtype), 0
        for end, result in zip(ends, results, strict=True):  # slices are faster for few runs
            bits[begin:end], begin = result, end
        return bits

    def runs(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ends of runs of equal results, counted from ``first``, and these results."""
        magnitude, negative = first & 0x7FFFFFFF, first >= 1 << 31
        starts, results = _segments(self, negative)
        low = np.searchsorted(starts, magnitude, side="right") - 1
        high = np.searchsorted(starts, magnitude + count, side="left")
        ends = np.concatenate([starts[low + 1 : high], [magnitude + count]]) - magnitude
        return ends, results[low:high]


@functools.lru_cache(maxsize=8)
def _segments(case: Case, negative: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns the magnitudes (float32 bits) at which the result changes, and the results' bits."""
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
    # an input of zero, whose result can differ from that of inputs that round to zero
    zero = -0.0 if negative and fmt.negative_zero else 0.0
    if not fmt.zero:
        zero = lowest
    starts = np.concatenate([[0], np.maximum(starts, 1)])
    values = np.concatenate([[zero], values])
    keep = np.concatenate([np.diff(starts) > 0, [True]])  # the last of several at one place
    bits = values.astype(np.float32).view(np.uint32)
    return starts[keep], np.where(np.isnan(values), np.uint32(NAN), bits)[keep]


def edges(fmt: Format, rounding: str, saturate: bool | str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns for each sign the inputs at and below each threshold and their results, as bits."""
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
    """Returns the rounding of magnitudes that is equivalent to a rounding of signed numbers."""
    if rounding not in ("toward_positive", "toward_negative"):
        return rounding
    return "away_from_zero" if (rounding == "toward_positive") != negative else "toward_zero"


def _thresholds(fmt: Format, rounding: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first magnitude that rounds to each number, and the numbers up to overflow."""
    values = _values(fmt)
    odd = np.arange(1, len(values)) % 2 == 1
    if (
        not fmt.zero
    ):  # half the smallest number, with code -1, stands for results below the smallest
        values = np.concatenate([[values[0] / 2], values])
        odd = np.concatenate([[False], odd])
    low, high = values[:-1].copy(), values[1:]
    middle = (low + high) / 2  # exact, with at most 25 significant bits
    if not fmt.zero:
        low[0] = 0.0  # every nonzero input rounds away from zero
    never, always = np.zeros(len(odd), bool), np.ones(len(odd), bool)
    at, inclusive = {
        "nearest_even": (middle, ~odd),
        "nearest_away": (middle, always),
        "toward_zero": (high, always),
        "away_from_zero": (low, never),
        "to_odd": (np.where(odd, low, high), ~odd),  # every input next to an odd code rounds to it
    }[rounding]
    with np.errstate(over="ignore"):
        first = at.astype(np.float32)
    wide = first.astype(np.float64)
    too_low = (wide < at) | ((wide == at) & ~inclusive)
    bits = np.minimum(first.view(np.uint32).astype(np.int64) + too_low, INFINITY)
    return np.concatenate([[0], bits]), values


def _values(fmt: Format) -> np.ndarray:
    """Returns the numbers of the codes from 0 to one beyond the largest, binade by binade."""
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
