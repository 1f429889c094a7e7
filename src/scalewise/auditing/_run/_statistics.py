"""Statistics of each equation: counts over all its numbers, errors over a sample of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ...rounding import FORMAT_PARAMS, power_of_two
from .._thresholds import SUM_LOST
from ._pair import Flag

SAMPLE = 1024  # numbers of each result, evenly spaced, over which errors are measured
BINS = 128  # of a histogram: exponents from LOWEST up; exponents outside go to the end bins
LOWEST = -96
PARTS = 32  # of a result, counted separately: this uses several cores and needs no tree of sums

# Indices into an equation's op_params, the data that a compiled program gets of it. The format
# comes first (see ``format_params``); then the number of elements of its result, the sign of an
# addition (1 or -1, ONE_BY_ONE if each of several rounds, else 0), the operation, and for each of
# two operands whether it is an array.
COUNT, SIGN, OPERATION, IS_ARRAY = range(FORMAT_PARAMS, FORMAT_PARAMS + 4)
OP_PARAMS = IS_ARRAY + 2
ONE_BY_ONE = 2

COUNTS = (
    "visits", "elements", "overflowed", "flushed", "subnormal", "nan", "sampled", "added",
    "swamped", "cancelled", "reference_nan", "decided", "differ",
    "operands", "operands_saturated", "operands_flushed", "operands_latent",
)  # fmt: skip
# The visit at which an overflow, a NaN, another decision or a saturated operand came first, or -1.
FIRST = len(COUNTS)
VISITS, OVERFLOWED, NAN, DECIDED, DIFFER, SATURATED = map(
    COUNTS.index, ("visits", "overflowed", "nan", "decided", "differ", "operands_saturated")
)
EVENTS = slice(DECIDED, FIRST)  # counted by `add_events`, apart from a result's numbers
# Largest finite exact magnitude; most bits cancelled in one addition; the format's largest number.
PEAKS = ("amax", "bits", "limit")
SUMS = (
    "introduced2", "exact2", "inherited2", "reference2", "drift", "drift_size",
    "reference_non_finite", "compared",
)  # fmt: skip
MAXIMA = ("introduced_max", "relative_max", "reference_max", "reference_min_inverse", "ulps")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of all equations, one row each; shapes are fixed, so that loops can carry it.

    All are float64[n, ...].

    Attributes:
        formats: the format of each equation's results (see ``format_params``).
        counts: COUNTS, summed over all visits (from "sampled" to "cancelled" over
            the samples only; "decided" and "differ" over the predicates, indices and counts among
            the results, in which the runs may differ; "operands" and what follows over operands
            that the equation rounds before it computes); FIRST; PEAKS.
        sums, maxima: over the samples of all visits.
        histogram: exponents of the reference run's nonzero sampled numbers.
    """

    formats: jax.Array
    counts: jax.Array
    sums: jax.Array
    maxima: jax.Array
    histogram: jax.Array


class Tally(NamedTuple):
    """Counts over each of PARTS parts of a result, before they are added up: integers[PARTS]."""

    flushed: jax.Array
    subnormal: jax.Array
    largest: jax.Array  # the bits of the largest exact magnitude, infinite for a non-finite number
    overflowed: jax.Array  # this and what follows: zeros unless ``largest`` shows that there may be
    nan: jax.Array
    reference_nan: jax.Array
    finite: jax.Array  # the bits of the largest finite exact magnitude


COUNTED = len(Tally._fields) * PARTS
RECORD = COUNTED + 5 * SAMPLE + OP_PARAMS  # numbers of a packed record


class Record(NamedTuple):
    """The statistics of one result, in shapes that don't depend on the result's shape."""

    tally: Tally  # counts over all its numbers
    # float64[5, SAMPLE]: low, exact and reference values; both low operands of an addition
    samples: jax.Array
    op_params: jax.Array  # float64[OP_PARAMS], with the format that the result has

    def packed(self) -> jax.Array:
        """Returns all of it as float64[RECORD]: each array of a program costs compile time."""
        counts = jnp.stack([x.astype(jnp.int64) for x in self.tally])
        counts = lax.bitcast_convert_type(counts, jnp.float64)
        return jnp.concatenate([counts.ravel(), self.samples.ravel(), self.op_params])

    @classmethod
    def unpacked(cls, packed: jax.Array) -> Record:
        counts, samples, op_params = jnp.split(packed, [COUNTED, COUNTED + 5 * SAMPLE])
        counts = lax.bitcast_convert_type(counts, jnp.int64).reshape(-1, PARTS)
        return cls(Tally(*counts), samples.reshape(5, SAMPLE), op_params)


def empty_statistics(formats: np.ndarray) -> Statistics:
    n = len(formats)
    assert formats.shape == (n, FORMAT_PARAMS)

    counts = np.zeros((n, FIRST + 1 + len(PEAKS)))
    counts[:, FIRST] = -1.0
    sums, maxima, histogram = (np.zeros((n, width)) for width in (len(SUMS), len(MAXIMA), BINS))
    arrays = formats, counts, sums, maxima, histogram
    return Statistics(*jax.device_put(arrays, may_alias=False))  # each update gets the buffers


def sample_positions(n: jax.Array, size: int) -> jax.Array:
    """Returns SAMPLE indices spread over ``n`` of ``size`` numbers; ``n`` and up are padding."""
    at = jnp.arange(SAMPLE)
    spread = lax.div(at * n.astype(jnp.int64), np.int64(SAMPLE))
    return jnp.minimum(jnp.where(n > SAMPLE, spread, at), size - 1)


def count(
    low: jax.Array,
    exact: Callable[[DTypeLike], jax.Array],
    reference: jax.Array,
    op_params: jax.Array,
    taints: Sequence[Flag],
) -> tuple[Tally, jax.Array]:
    """Counts a result's events in one pass, in two if a number is non-finite or too large.

    Each intermediate array costs a loop to compile and to run. The second pass therefore computes
    cheap values again, and counts stay integers in PARTS parts. Returns also whether the result is
    tainted; ``exact`` returns the exact result of the same low inputs in the dtype given.
    """

    def inside():
        return lax.iota(jnp.int32, low.size) < op_params[COUNT].astype(jnp.int32)

    tainted = functools.reduce(jnp.logical_or, taints)
    within, size, zero = inside(), jnp.abs(low), low == 0
    magnitude = jnp.where(size < jnp.inf, jnp.abs(exact(low.dtype)), jnp.inf)
    magnitude = jnp.where(within, magnitude, 0)
    normal = power_of_two(op_params[1].astype(jnp.int64)).astype(low.dtype)
    always = _count_parts([zero & (magnitude != 0), within & ~zero & (size < normal)], magnitude)

    def second_pass():
        wide, within = exact(jnp.float64), inside()
        flags = _flags(low, wide, reference, op_params[:FORMAT_PARAMS], ~tainted)
        wide = jnp.where(jnp.isfinite(wide) & within, jnp.abs(wide), 0.0)
        flags = [f & within for f in (*flags, jnp.isnan(reference))]
        overflowed, nan, reference_nan, finite = _count_parts(flags, wide)
        return (overflowed, nan, reference_nan, finite), is_tainted(low, reference)

    def no_events():
        return (jnp.zeros(PARTS, jnp.int64),) * 4, jnp.zeros((), bool)

    largest = lax.bitcast_convert_type(_float(always[-1]), jnp.int64)
    in_range = _float(jnp.max(largest)) < op_params[2]
    rare, result_tainted = lax.cond(in_range, no_events, second_pass)
    return Tally(*[*always[:-1], largest, *rare]), result_tainted


def is_tainted(low: jax.Array, reference: jax.Array) -> jax.Array:
    return jnp.any(~jnp.isfinite(low) & jnp.isfinite(reference))


def _count_parts(flags: Sequence[jax.Array], size: jax.Array) -> Sequence[jax.Array]:
    """One pass over integers, which XLA vectorises; nonnegative floats sort as their bits do."""
    integer = jnp.int32 if size.dtype == jnp.float32 else jnp.int64
    columns = [f.astype(integer) for f in flags] + [lax.bitcast_convert_type(size, integer)]
    joins = [lax.add] * len(flags) + [lax.max]
    return lax.reduce(
        [x.reshape(PARTS, -1) for x in columns],
        [np.zeros((), integer)] * len(columns),
        lambda a, b: [join(x, y) for join, x, y in zip(joins, a, b, strict=True)],
        (1,),
    )


def _float(bits: jax.Array) -> jax.Array:
    dtype = jnp.float32 if bits.dtype == jnp.int32 else jnp.float64
    return lax.bitcast_convert_type(bits, dtype).astype(jnp.float64)


def _flags(low, exact, reference, fmt, clean) -> Sequence[jax.Array]:
    size, finite = jnp.abs(low).astype(jnp.float64), jnp.isfinite(exact)
    non_finite = ~jnp.isfinite(low) & jnp.isfinite(reference)
    divided = clean & (size == jnp.inf) & ~finite  # infinite from finite inputs: usually x / 0
    half = power_of_two(jnp.frexp(fmt[2])[1].astype(jnp.int64) - 2 - fmt[0].astype(jnp.int64))
    beyond = jnp.abs(exact) > fmt[2] + half  # what is closer is rounded to the largest number
    clamped = finite & beyond & (size >= fmt[2]) & jnp.isfinite(reference)
    overflowed = clamped | (non_finite & (finite | divided))
    return overflowed, non_finite & clean & ~finite & jnp.isnan(low)


def summaries(state: Statistics, indices: jax.Array, records: Sequence[jax.Array]):
    return jax.vmap(lambda x, fmt: summarize(Record.unpacked(x), fmt))(
        jnp.stack(records), state.formats[indices]
    )


def add_visits(
    state: Statistics, indices: jax.Array, counts, peaks, sums, maxima, histogram
) -> Statistics:
    before = state.counts[indices]
    event = (counts[:, OVERFLOWED] > 0) | (counts[:, NAN] > 0)
    first = jnp.where(event & (before[:, FIRST] < 0), before[:, VISITS], before[:, FIRST])
    peaks = jnp.maximum(before[:, FIRST + 1 :], peaks)
    after = jnp.concatenate([before[:, :FIRST] + counts, first[:, None], peaks], 1)
    return dataclasses.replace(
        state,
        counts=state.counts.at[indices].set(after),
        sums=state.sums.at[indices].add(sums),
        maxima=state.maxima.at[indices].max(maxima),
        histogram=state.histogram.at[indices].add(histogram),
    )


def add_events(
    state: Statistics, indices: jax.Array, events: jax.Array, visited: jax.Array
) -> Statistics:
    """Returns the statistics with a visit of equations that decide or round operands: with
    ``events`` for the counts EVENTS of each, and 1 where the visit has to be counted, else 0."""
    before = state.counts[indices]
    new = before.at[:, EVENTS].add(events).at[:, VISITS].add(visited)
    at = before[:, VISITS] + visited - 1
    event = (new[:, DIFFER] > 0) | (new[:, SATURATED] > 0)
    first = jnp.where(event & (before[:, FIRST] < 0), at, before[:, FIRST])
    new = new.at[:, FIRST].set(first)
    return dataclasses.replace(state, counts=state.counts.at[indices].set(new))


def summarize(record: Record, fmt: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the counts, peaks, sums, maxima and histogram of one visit, in this order."""
    tally, size = record.tally, record.op_params[COUNT]
    per_part = (
        tally.overflowed, tally.nan, tally.flushed, tally.subnormal, tally.reference_nan
    )  # fmt: skip
    totals_of = [jnp.sum(x).astype(jnp.float64) for x in per_part]
    overflowed, nan, flushed, subnormal, reference_nan = totals_of
    largest, finite = _float(jnp.max(tally.largest)), _float(jnp.max(tally.finite))
    amax = jnp.where(largest < record.op_params[2], largest, finite)
    sampled = jnp.minimum(size, SAMPLE)
    mask = jnp.arange(record.samples.shape[1], dtype=jnp.float64) < sampled
    *additions, bits = _addition_measures(record, fmt, mask)
    sums, maxima = _error_measures(record.samples[:3], mask, fmt)
    columns = [*additions, *sums, bits, *maxima]
    joins = [lax.add] * (len(columns) - len(maxima) - 1) + [lax.max] * (len(maxima) + 1)
    totals = lax.reduce(  # one pass
        [x.astype(jnp.float64) for x in columns],
        [np.float64(0)] * len(columns),
        lambda a, b: [join(x, y) for join, x, y in zip(joins, a, b, strict=True)],
        (0,),
    )
    n, m = len(additions), len(additions) + len(sums)
    one = jnp.ones((), jnp.float64)
    counts = [one, size, overflowed, flushed, subnormal, nan, sampled, *totals[:n], reference_nan]
    counts += [0 * one] * (EVENTS.stop - EVENTS.start)
    peaks = [amax, totals[m], record.op_params[2]]
    parts = counts, peaks, totals[n:m], totals[m + 1 :]
    return *[jnp.stack(x) for x in parts], _histogram(record.samples[2], mask)


def _histogram(reference: jax.Array, mask: jax.Array) -> jax.Array:
    bins = jnp.clip(_exponent(reference) - LOWEST, 0, BINS - 1).astype(jnp.int32)
    in_a_bin = mask & (reference != 0) & jnp.isfinite(reference)
    bins = jnp.where(in_a_bin, bins, BINS)  # the surplus bin is dropped below
    counts = jnp.zeros(BINS + 1, jnp.int32).at[bins].add(1, mode="promise_in_bounds")
    return counts[:BINS].astype(jnp.float64)


def _addition_measures(record: Record, fmt, mask) -> list[jax.Array]:
    """Returns which samples are additions of two nonzero numbers, which of them returned one
    operand unchanged, which cancelled over half the bits, and how many bits cancelled.

    Of several additions that round one by one, those returned some unchanged whose sum is off by
    more than they would be with errors that have both signs."""
    (low, exact, _, a, b), sign = record.samples, record.op_params[SIGN]
    several = sign == ONE_BY_ONE
    b = jnp.where(several, exact - a, b)
    both = mask & (sign != 0) & (several | (a != 0)) & (b != 0)
    unit = power_of_two((jnp.maximum(_exponent(exact), fmt[1]) - fmt[0]).astype(jnp.int64))
    lost = jnp.abs(low - exact) > SUM_LOST * unit
    swamped = both & (low != exact) & jnp.where(several, lost, (low == a) | (low == sign * b))
    wide = jnp.where(exact != 0, _exponent(exact), _exponent(jnp.maximum(abs(a), abs(b))) - fmt[0])
    bits = jnp.where(both, jnp.maximum(_exponent(a), _exponent(b)) - wide, 0.0)
    bits = jnp.where(jnp.isfinite(exact), jnp.clip(bits, 0.0, fmt[0] + 1), 0.0)
    return [both, swamped, bits > fmt[0] / 2, bits]


def _exponent(x: jax.Array) -> jax.Array:
    field = (lax.bitcast_convert_type(jnp.abs(x), jnp.int64) >> 52) - 1023
    return field.astype(jnp.float64)


def _error_measures(samples, mask, fmt) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the columns of SUMS and of MAXIMA for numbers that are finite in both runs.

    A unit in the last place is the format's spacing at the reference run's number; below the
    format's normal range it is the spacing of its subnormal numbers.
    """
    y, e, s = samples
    compared = mask & jnp.isfinite(y) & jnp.isfinite(e) & jnp.isfinite(s)
    introduced, inherited, size = y - e, y - s, jnp.abs(s)
    relative = jnp.where(e != 0, jnp.abs(introduced) / jnp.abs(e), 0.0)
    inverse = jnp.where(size > 0, 1 / jnp.where(size > 0, size, 1.0), 0.0)
    unit = jnp.clip(jnp.maximum(_exponent(s), fmt[1]) - fmt[0], -1022, 1022)
    ulps = jnp.abs(inherited) * power_of_two(-unit.astype(jnp.int64))
    sums = [introduced**2, e * e, inherited**2, s * s, introduced, jnp.abs(introduced)]
    maxima = [jnp.abs(introduced), relative, size, inverse, ulps]
    sums, maxima = ([jnp.where(compared, x, 0.0) for x in part] for part in (sums, maxima))
    return [*sums, mask & ~jnp.isfinite(s), compared], maxima
