"""Statistics of each equation: counts over all its numbers, errors over a sample of them."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...emulating import is_exact, rounds_each
from ...interpret import Equation, is_float
from ...primitives import having, names
from .._thresholds import SUM_LOST
from ._cells import Cell
from ._interpretations import computes_in_float32
from ._kernels import computed

SAMPLE = 1024  # numbers of each result, evenly spaced, over which errors are measured
BINS = 128  # of a histogram: exponents from LOWEST up; exponents outside go to the end bins
LOWEST = -96
TOGETHER = 1 << 18  # numbers of visits that are counted in one pass

ACCUMULATES = having("accumulates")
ADDS = having("adds")
SUBTRACTS = names(lambda row: row.autocast == "difference")
EVENTS = ("operands", "operands_saturated", "operands_flushed", "operands_latent")
COUNTS = (
    "visits", "elements", "overflowed", "flushed", "subnormal", "nan", "sampled", "added",
    "swamped", "cancelled", "reference_nan", "decided", "differ", *EVENTS,
    "introduced2", "exact2", "inherited2", "reference2", "drift", "drift_size",
    "reference_non_finite", "compared",
)  # fmt: skip
# Largest finite exact magnitude; most bits cancelled in one addition; the format's largest number.
MAXIMA = ("amax", "bits", "limit", "reference_max", "reference_min_inverse", "ulps")


@dataclasses.dataclass(frozen=True, eq=False)
class Visit:
    """One computation of an equation in both runs.

    Attributes:
        ins: the operands, before a recipe rounds them.
        outs: the results.
        fmt: the parameters of the format that a float result has (see ``format_params``).
        rounded: whether a recipe rounds operands, so that the exact results of ``outs`` are those
            of other operands.
        events: counts of the operands' numbers that are rounded, by ``EVENTS``; () without any.
    """

    ins: Sequence[Cell]
    outs: Sequence[Cell]
    fmt: np.ndarray
    rounded: bool = False
    events: Sequence[float] = ()


def is_discrete(aval: Any) -> bool:
    return getattr(aval.dtype, "kind", "") in "iub"


def records(equation: Equation) -> bool:
    """Returns whether an equation's float results are rounded."""
    return any(map(is_float, equation.out_avals)) and not is_exact(equation)


def decides(equation: Equation) -> bool:
    """Returns whether it makes predicates, indices or counts of floats, which may differ; the rows
    that a decomposition swaps are a part of its result."""
    if computes_in_float32(equation) or not any(map(is_float, equation.in_avals)):
        return False
    return any(map(is_discrete, equation.out_avals))


def statistics(
    equation: Equation, visits: Sequence[Visit]
) -> tuple[dict[str, float], tuple[int, ...]]:
    """Returns the statistics of an equation by name, ``COUNTS`` and ``MAXIMA``, and "first", the
    visit at which an overflow, a NaN, another decision or a saturated operand came first, or -1;
    then the histogram of the exponents of the reference run's nonzero sampled numbers.

    From "sampled" to "cancelled", and from "introduced2" on, counts are over the samples only;
    "decided" and "differ" over the predicates, indices and counts among the results; "operands"
    and what follows over operands that the equation rounds before it computes.
    """
    found: dict[str, float] = collections.defaultdict(float)
    found.update(dict.fromkeys((*COUNTS, *MAXIMA), 0.0), visits=float(len(visits)), first=-1.0)
    histogram = np.zeros(BINS, np.int64)
    at = next((i for i, a in enumerate(equation.out_avals) if is_float(a)), -1)
    size = max(int(np.prod(equation.out_avals[at].shape)), 1)
    per = max(TOGETHER // size, 1)
    for start in range(0, len(visits), per):
        some = visits[start : start + per]
        events = np.zeros(len(some), bool)
        if at >= 0 and records(equation):
            events |= _count(found, histogram, equation, some, at)
        if decides(equation):
            events |= _count_decisions(found, equation, some)
        events |= _count_operands(found, some)
        if found["first"] < 0 and events.any():
            found["first"] = float(start + np.argmax(events))
    return dict(found), tuple(histogram.tolist())


def _count(
    found: dict[str, float],
    histogram: np.ndarray,
    equation: Equation,
    visits: Sequence[Visit],
    at: int,
) -> np.ndarray:
    """Adds what some visits count; returns at which of them a number overflowed or became NaN."""
    low = _rows([v.outs[at].low for v in visits])
    reference = _rows([v.outs[at].reference for v in visits])
    exact = _rows([_exact(equation, v, at) for v in visits])
    fmt = visits[0].fmt
    size, magnitude = np.abs(low), np.where(np.isfinite(exact), np.abs(exact), 0.0)
    normal = 2.0 ** float(fmt[1])
    found["elements"] += low.size
    found["limit"] = max(found["limit"], float(fmt[2]))
    found["amax"] = max(found["amax"], float(magnitude.max(initial=0.0)))
    found["flushed"] += np.count_nonzero((low == 0) & (exact != 0))
    found["subnormal"] += np.count_nonzero((size > 0) & (size < normal))
    found["reference_nan"] += np.count_nonzero(np.isnan(reference))
    events = np.zeros(len(visits), bool)
    if not (size.max(initial=0.0) < fmt[2] and magnitude.max(initial=0.0) < fmt[2]):
        clean = np.array([not any(map(_is_lost, v.ins)) for v in visits])[:, None]
        overflowed, nan = _out_of_range(low, exact, reference, fmt, clean)
        found["overflowed"] += np.count_nonzero(overflowed)
        found["nan"] += np.count_nonzero(nan)
        events = np.any(overflowed | nan, axis=1)
    which = _sampled(equation, exact)
    samples = [np.take_along_axis(x, which, 1) for x in (low, exact, reference)]
    found["sampled"] += which.size
    _measure(found, histogram, samples, fmt)
    if equation.name in ADDS or equation.name in ACCUMULATES or rounds_each(equation):
        _measure_additions(found, equation, visits, which, samples, fmt)
    return events


def _rows(arrays: Sequence[Any]) -> np.ndarray:
    """Returns arrays of one shape as the rows of one array; a single one without a copy."""
    flat = [np.asarray(x, np.float64).reshape(1, -1) for x in arrays]
    return flat[0] if len(flat) == 1 else np.concatenate(flat)


def _exact(equation: Equation, visit: Visit, at: int) -> Any:
    if not visit.rounded:
        return visit.outs[at].exact
    return computed(equation, [x.low for x in visit.ins])[at]


def _is_lost(x: Cell) -> bool:
    if not x.is_float or not x.differs:
        return False
    return bool(np.any(~np.isfinite(x.low) & np.isfinite(x.reference)))


def _out_of_range(
    low: np.ndarray, exact: np.ndarray, reference: np.ndarray, fmt: np.ndarray, clean: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    size, finite = np.abs(low), np.isfinite(exact)
    non_finite = ~np.isfinite(low) & np.isfinite(reference)
    divided = clean & (size == np.inf) & ~finite  # infinite from finite inputs: usually x / 0
    half = np.ldexp(1.0, int(np.frexp(fmt[2])[1]) - 2 - int(fmt[0]))
    beyond = np.abs(exact) > fmt[2] + half  # what is closer is rounded to the largest number
    clamped = finite & beyond & (size >= fmt[2]) & np.isfinite(reference)
    overflowed = clamped | (non_finite & (finite | divided))
    return overflowed, non_finite & clean & ~finite & np.isnan(low)


def sample_positions(n: int) -> np.ndarray:
    """Returns the places of at most SAMPLE of ``n`` numbers, evenly spaced."""
    return np.arange(n) if n <= SAMPLE else np.arange(SAMPLE) * n // SAMPLE


def _sampled(equation: Equation, exact: np.ndarray) -> np.ndarray:
    """Returns the places of the sampled numbers of each visit. Of many sums that round one by one
    they are the largest: those to which most is added have lost most, and are few."""
    count, n = exact.shape
    if n <= SAMPLE or not rounds_each(equation):
        return np.broadcast_to(sample_positions(n), (count, min(n, SAMPLE)))
    largest = np.where(np.isnan(exact), np.inf, np.abs(exact))
    return np.argpartition(-largest, SAMPLE, axis=1)[:, :SAMPLE]


def _exponent(x: np.ndarray) -> np.ndarray:
    """Returns the exponents of two: -1023 of zeros, 1024 of infinities and NaN."""
    return ((np.ascontiguousarray(np.abs(x)).view(np.int64) >> 52) - 1023).astype(np.float64)


def _measure(
    found: dict[str, float], histogram: np.ndarray, samples: Sequence[np.ndarray], fmt: np.ndarray
) -> None:
    """Adds up the errors of numbers that are finite in both runs.

    A unit in the last place is the format's spacing at the reference run's number; below the
    format's normal range it is the spacing of its subnormal numbers.
    """
    compared = np.logical_and.reduce([np.isfinite(x) for x in samples])
    found["reference_non_finite"] += np.count_nonzero(~np.isfinite(samples[2]))
    found["compared"] += np.count_nonzero(compared)
    y, e, s = (x[compared] for x in samples)
    made, carried, size = y - e, y - s, np.abs(s)
    sums = {
        "introduced2": made**2, "exact2": e * e, "inherited2": carried**2, "reference2": s * s,
        "drift": made, "drift_size": np.abs(made),
    }  # fmt: skip
    for name, x in sums.items():
        found[name] += float(np.sum(x))
    exponents = _exponent(s)
    unit = np.clip(np.maximum(exponents, fmt[1]) - fmt[0], -1022, 1022).astype(int)
    nonzero = size > 0
    maxima = {
        "ulps": np.ldexp(np.abs(carried), -unit), "reference_max": size,
        "reference_min_inverse": 1 / size[nonzero],
    }  # fmt: skip
    for name, x in maxima.items():
        found[name] = max(found[name], float(x.max(initial=0.0)))
    finite = samples[2][(samples[2] != 0) & np.isfinite(samples[2])]
    bins = np.clip(_exponent(finite) - LOWEST, 0, BINS - 1).astype(int)
    histogram += np.bincount(bins, minlength=BINS)


def _measure_additions(
    found: dict[str, float],
    equation: Equation,
    visits: Sequence[Visit],
    which: np.ndarray,
    samples: Sequence[np.ndarray],
    fmt: np.ndarray,
) -> None:
    """Counts which samples are additions of two nonzero numbers, which of them returned one operand
    unchanged, which cancelled over half the bits, and how many bits cancelled at most.

    Of several additions that round one by one, those returned some unchanged whose sum is off by
    more than they would be with errors that have both signs."""
    low, exact, _ = samples
    sign, several = -1.0 if equation.name in SUBTRACTS else 1.0, rounds_each(equation)
    shape = equation.out_avals[0].shape

    def operand(i: int) -> np.ndarray:
        flat = _rows([np.broadcast_to(v.ins[i].low, shape) for v in visits])
        return np.take_along_axis(flat, which, 1)

    if several:
        a = operand(0)
        b = exact - a
    elif equation.name in ADDS:
        a, b = operand(0), operand(1)
    else:  # it accumulates: numbers to which something is added
        a, b = exact, operand(0)
        b = np.where(exact != b, b, 0.0)
    both = (b != 0) if several else (a != 0) & (b != 0)
    unit = np.exp2(np.clip(np.maximum(_exponent(exact), fmt[1]) - fmt[0], -1022, 1022))
    same = np.abs(low - exact) > SUM_LOST * unit if several else (low == a) | (low == sign * b)
    largest = np.maximum(_exponent(a), _exponent(b))
    wide = np.where(exact != 0, _exponent(exact), largest - fmt[0])
    bits = np.where(both & np.isfinite(exact), np.clip(largest - wide, 0.0, fmt[0] + 1), 0.0)
    found["added"] += np.count_nonzero(both)
    found["swamped"] += np.count_nonzero(both & (low != exact) & same)
    found["cancelled"] += np.count_nonzero(bits > fmt[0] / 2)
    found["bits"] = max(found["bits"], float(bits.max(initial=0.0)))


def _count_decisions(
    found: dict[str, float], equation: Equation, visits: Sequence[Visit]
) -> np.ndarray:
    places = [i for i, a in enumerate(equation.out_avals) if is_discrete(a)]
    pairs = [[v.outs[i] for i in places] for v in visits]
    differ = np.array([sum(int(np.sum(x.low != x.reference)) for x in own) for own in pairs])
    found["decided"] += sum(np.size(x.low) for x in itertools.chain(*pairs))
    found["differ"] += int(differ.sum())
    return differ > 0


def _count_operands(found: dict[str, float], visits: Sequence[Visit]) -> np.ndarray:
    for visit in visits:
        for name, count in zip(EVENTS, visit.events, strict=False):
            found[name] += count
    return np.array([len(v.events) > 0 and v.events[1] > 0 for v in visits])
