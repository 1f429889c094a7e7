"""What is noted of each equation: counts over all its numbers, the rest from a sample of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._rounding import WIDTH, power_of_two

SAMPLE = 1024  # numbers of each result, evenly spaced, of which more is asked than counts
BINS = 128  # of a histogram: exponents from LOWEST up; what lies outside goes to the ends
LOWEST = -96
PARTS = 32  # of a result that are counted on their own: more than one core, and no tree of sums

# What a program is told about an equation, all of it data: its format (see ``as_row``), how many
# numbers its result has, whether it is an addition (1, -1), which operation, whose operands are
# whole arrays rather than one number.
COUNT, SIGN, OPERATION, WHOLE = WIDTH, WIDTH + 1, WIDTH + 2, WIDTH + 3
ABOUT = WHOLE + 2

COUNTS = (
    "visits", "elements", "overflowed", "flushed", "subnormal", "nan", "sampled", "added",
    "swamped", "cancelled",
)  # fmt: skip
FIRST = len(COUNTS)  # the turn at which something first overflowed or became NaN, or -1
PEAKS = ("amax", "bits")  # largest finite exact magnitude; most bits cancelled in one addition
SUMS = (
    "introduced2", "exact2", "inherited2", "shadow2", "drift", "drift_size", "bad", "compared",
)  # fmt: skip
TOPS = ("introduced_max", "relative_max", "shadow_max", "shadow_min_inverse", "ulps")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """One row for each equation; fixed shapes, so that loops can carry it.

    Attributes:
        formats: float64[n, 8], the format of each equation's results (see ``as_row``): an input.
        counts: float64[n, ...]: COUNTS, over all numbers of each result and all turns of all loops
            (the last four over the samples); FIRST; PEAKS.
        sums, tops: float64[n, ...], of the samples, added up and largest over the turns.
        histogram: float64[n, BINS], exponents of the shadow's nonzero numbers, of the samples.
    """

    formats: Any
    counts: Any
    sums: Any
    tops: Any
    histogram: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tally:
    """Counts over all numbers of each part of a result, as the loops that count hand them over.

    Attributes:
        flushed, subnormal: integers[PARTS].
        largest: integers[PARTS], the bits of the largest exact magnitude, infinite where the low
            number isn't finite; all three as wide as the lane's floats.
        overflowed, nan: int64[PARTS]; 0 unless ``largest`` says that there may be any.
        finite: int64[PARTS], then the bits of the largest finite exact magnitude, in float64.
    """

    flushed: Any
    subnormal: Any
    largest: Any
    overflowed: Any
    nan: Any
    finite: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Note:
    """What one result has to say, in shapes that don't depend on its own.

    Attributes:
        tally: of all its numbers.
        samples: float64[5, SAMPLE]: low, exact, shadow; of an addition, both operands in the low
            lane.
        about: float64[ABOUT].
    """

    tally: Any
    samples: Any
    about: Any


def blank(formats: np.ndarray) -> Statistics:
    """Statistics of a program that hasn't run yet, with the formats of its equations."""
    n = len(formats)
    assert formats.shape == (n, WIDTH)

    counts = np.zeros((n, FIRST + 1 + len(PEAKS)))
    counts[:, FIRST] = -1.0
    sums, tops, histogram = (np.zeros((n, width)) for width in (len(SUMS), len(TOPS), BINS))
    numbers = Statistics(formats, counts, sums, tops, histogram)
    return jax.device_put(numbers, may_alias=False)  # its memory is handed on from note to note


def positions(count: Any, size: int) -> jax.Array:
    """Where the samples of ``count`` numbers stand; the last ones again where there are fewer."""
    spread = jnp.arange(SAMPLE) * jnp.maximum(count.astype(jnp.int64) // SAMPLE, 1)
    return jnp.minimum(spread, size - 1)


def counted(
    low: jax.Array,
    exact: Callable[[Any], jax.Array],
    shadow: jax.Array,
    about: jax.Array,
    marks: Sequence[Any],
) -> tuple[Tally, jax.Array]:
    """One pass over a result; a second one where something isn't finite or is too large.

    What is cheap is computed again in the second pass rather than handed over, and sums are left in
    parts, and in integers: each value that is made is one more loop to compile, and to run.

    Args:
        low, shadow: flat: its low result and the shadow's, with padding behind the first numbers.
        exact: the exact result of the same low inputs in the dtype given.
        about: float64[ABOUT].
        marks: of each low input whether it wasn't finite somewhere where the shadow's was.

    Returns:
        The counts, and whether the result is marred in turn.
    """

    def inside():
        return lax.iota(jnp.int32, low.size) < about[COUNT].astype(jnp.int32)

    def marred():
        return functools.reduce(jnp.logical_or, marks)

    within, size, zero = inside(), jnp.abs(low), low == 0
    wide = jnp.where(size < jnp.inf, jnp.abs(exact(low.dtype)), jnp.inf)
    wide = jnp.where(within, wide, 0)
    normal = power_of_two(about[1].astype(jnp.int64)).astype(low.dtype)
    often = _parts([zero & (wide != 0), within & ~zero & (size < normal)], wide)

    def seldom():
        wide, within = exact(jnp.float64), inside()
        flags = [f & within for f in _flags(low, wide, shadow, about[:WIDTH], ~marred())]
        wide = jnp.where(jnp.isfinite(wide) & within, jnp.abs(wide), 0.0)
        overflowed, nan, broken, finite = _parts(flags, wide)
        made = (jnp.maximum(overflowed, nan) > 0) | (marred() & (broken > 0))
        return (overflowed, nan, finite), jnp.any(made)

    def never():
        return (jnp.zeros(PARTS, jnp.int64),) * 3, jnp.zeros((), bool)

    rare, mark = lax.cond(_float(jnp.max(often[-1])) < about[2], never, seldom)
    return Tally(*often, *rare), mark


def _parts(flags: Sequence[jax.Array], size: jax.Array) -> Sequence[jax.Array]:
    """Of each part of a result how often each flag is set, and the bits of the largest size.

    One pass, in integers (nonnegative floats are in their bits' order), which XLA vectorises.
    """
    integer = jnp.int32 if size.dtype == jnp.float32 else jnp.int64
    columns = [f.astype(integer) for f in flags] + [lax.bitcast_convert_type(size, integer)]
    joined = [lax.add] * len(flags) + [lax.max]
    return lax.reduce(
        [x.reshape(PARTS, -1) for x in columns],
        [np.zeros((), integer)] * len(columns),
        lambda a, b: [join(x, y) for join, x, y in zip(joined, a, b, strict=True)],
        (1,),
    )


def _float(bits: jax.Array) -> jax.Array:
    """What float these are the bits of, in float64."""
    dtype = jnp.float32 if bits.dtype == jnp.int32 else jnp.float64
    return lax.bitcast_convert_type(bits, dtype).astype(jnp.float64)


def _flags(low, exact, shadow, fmt, clean) -> Sequence[jax.Array]:
    """For each number: overflowed, NaN born here, not finite."""
    size, finite = jnp.abs(low).astype(jnp.float64), jnp.isfinite(exact)
    broken = ~jnp.isfinite(low) & jnp.isfinite(shadow)
    divided = clean & (size == jnp.inf) & ~finite  # of finite numbers: by zero, most often
    clamped = finite & (jnp.abs(exact) > fmt[2]) & (size >= fmt[2]) & jnp.isfinite(shadow)
    lost = clamped | (broken & (finite | divided))
    return lost, broken & clean & ~finite & jnp.isnan(low), ~jnp.isfinite(low)


def take(state: Statistics, row: Any, note: Note) -> Statistics:
    """The state with one more visit of a row."""
    fmt = lax.dynamic_index_in_dim(state.formats, row, keepdims=False)
    return added(state, row, *measured(note, fmt))


def added(state: Statistics, row: Any, counts, peaks, sums, tops, histogram) -> Statistics:
    """The state with what was :func:`measured` of a visit."""
    before = lax.dynamic_index_in_dim(state.counts, row, keepdims=False)
    names = dict(zip(COUNTS, counts, strict=True))
    event = (names["overflowed"] > 0) | (names["nan"] > 0)
    first = jnp.where(event & (before[FIRST] < 0), before[0], before[FIRST])
    peaks = jnp.maximum(before[FIRST + 1 :], peaks)
    after = jnp.concatenate([before[:FIRST] + counts, first[None], peaks])
    return dataclasses.replace(
        state,
        counts=lax.dynamic_update_slice(state.counts, after[None], (row, 0)),
        sums=state.sums.at[row].add(sums),
        tops=state.tops.at[row].max(tops),
        histogram=state.histogram.at[row].add(histogram),
    )


def measured(note: Note, fmt: jax.Array) -> tuple[jax.Array, ...]:
    """What a note adds to its row: counts, peaks, sums, tops and histogram, in their order."""
    tally, count = note.tally, note.about[COUNT]
    often, seldom = (tally.flushed, tally.subnormal), (tally.overflowed, tally.nan)
    events = [jnp.sum(x).astype(jnp.float64) for x in (*seldom, *often)]
    largest, finite = _float(jnp.max(tally.largest)), _float(jnp.max(tally.finite))
    amax = jnp.where(largest < note.about[2], largest, finite)
    sampled = jnp.minimum(count, SAMPLE)
    mask = jnp.arange(SAMPLE, dtype=jnp.float64) < sampled
    *additions, bits = _addition(note, fmt, mask)
    sums, tops = _measures(note.samples[:3], mask, fmt)
    columns = [*additions, *sums, bits, *tops]
    joins = [lax.add] * (len(columns) - len(tops) - 1) + [lax.max] * (len(tops) + 1)
    whole = lax.reduce(  # one pass
        [x.astype(jnp.float64) for x in columns],
        [np.float64(0)] * len(columns),
        lambda a, b: [join(x, y) for join, x, y in zip(joins, a, b, strict=True)],
        (0,),
    )
    n, m = len(additions), len(additions) + len(sums)
    one = jnp.ones((), jnp.float64)
    overflowed, nan, flushed, subnormal = events
    counts = [one, count, overflowed, flushed, subnormal, nan, sampled, *whole[:n]]
    parts = counts, [amax, whole[m]], whole[n:m], whole[m + 1 :]
    return *[jnp.stack(x) for x in parts], _histogram(note.samples[2], mask)


def _histogram(shadow: jax.Array, mask: jax.Array) -> jax.Array:
    """How many numbers have which exponent; in integers, which XLA scatters fastest."""
    bins = jnp.clip(_exponent(shadow) - LOWEST, 0, BINS - 1).astype(jnp.int32)
    bins = jnp.where(mask & (shadow != 0) & jnp.isfinite(shadow), bins, BINS)  # of none
    counts = jnp.zeros(BINS + 1, jnp.int32).at[bins].add(1, mode="promise_in_bounds")
    return counts[:BINS].astype(jnp.float64)


def _addition(note: Note, fmt, mask) -> list[jax.Array]:
    """Which are additions of two numbers, changed nothing, cancelled; and how many bits."""
    (low, exact, _, a, b), sign = note.samples, note.about[SIGN]
    both = mask & (sign != 0) & (a != 0) & (b != 0)
    swamped = both & ((low == a) | (low == sign * b)) & (low != exact)
    wide = jnp.where(exact != 0, _exponent(exact), _exponent(jnp.maximum(abs(a), abs(b))) - fmt[0])
    bits = jnp.where(both, jnp.maximum(_exponent(a), _exponent(b)) - wide, 0.0)
    bits = jnp.where(jnp.isfinite(exact), jnp.clip(bits, 0.0, fmt[0] + 1), 0.0)
    return [both, swamped, bits > fmt[0] / 2, bits]


def _exponent(x: jax.Array) -> jax.Array:
    field = (lax.bitcast_convert_type(jnp.abs(x), jnp.int64) >> 52) - 1023
    return field.astype(jnp.float64)


def _measures(samples, mask, fmt) -> tuple[list[jax.Array], list[jax.Array]]:
    """What is added up and what is compared, of the numbers that are finite in all lanes.

    A unit in the last place is the format's spacing at the shadow's number, that of its subnormals
    under its normal range.
    """
    y, e, s = samples
    whole = mask & jnp.isfinite(y) & jnp.isfinite(e) & jnp.isfinite(s)
    introduced, inherited, size = y - e, y - s, jnp.abs(s)
    relative = jnp.where(e != 0, jnp.abs(introduced) / jnp.abs(e), 0.0)
    inverse = jnp.where(size > 0, 1 / jnp.where(size > 0, size, 1.0), 0.0)
    unit = jnp.clip(jnp.maximum(_exponent(s), fmt[1]) - fmt[0], -1022, 1022)
    ulps = jnp.abs(inherited) * power_of_two(-unit.astype(jnp.int64))
    sums = [introduced**2, e * e, inherited**2, s * s, introduced, jnp.abs(introduced)]
    tops = [jnp.abs(introduced), relative, size, inverse, ulps]
    sums, tops = ([jnp.where(whole, x, 0.0) for x in part] for part in (sums, tops))
    return [*sums, mask & ~jnp.isfinite(s), whole], tops
