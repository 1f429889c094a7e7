"""What is noted of each equation: counts over all its numbers, the rest from a sample of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._rounding import WIDTH, power_of_two

SAMPLE = 1024  # numbers of each result, evenly spaced, of which more is asked than counts
BINS = 128  # of a histogram: exponents from LOWEST up; what lies outside goes to the ends
LOWEST = -96
CHUNK, FIELD = 4096, 13  # counts up to CHUNK share an int64: one pass over the data for all
TALLY = ("overflowed", "flushed", "subnormal", "nan", "broken", "amax")

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
class Note:
    """What one result has to say, in shapes that don't depend on its own.

    Attributes:
        tally: float64[6], see TALLY, over all numbers.
        samples: float64[3, SAMPLE]: low, exact, shadow.
        addends: float64[2, SAMPLE]: of an addition, samples of its operands in the low lane.
        sign: 1 for an addition, -1 for a subtraction, else 0.
        count: how many numbers the result has.
    """

    tally: Any
    samples: Any
    addends: Any
    sign: Any
    count: Any


def blank(formats: np.ndarray) -> Statistics:
    """Statistics of a program that hasn't run yet, with the formats of its equations."""
    n = len(formats)
    assert formats.shape == (n, WIDTH)

    def zeros(*shape: int) -> jax.Array:
        return jnp.asarray(np.zeros((n, *shape)))

    counts = np.zeros((n, FIRST + 1 + len(PEAKS)))
    counts[:, FIRST] = -1.0
    return Statistics(
        formats=jnp.asarray(formats),
        counts=jnp.asarray(counts),
        sums=zeros(len(SUMS)),
        tops=zeros(len(TOPS)),
        histogram=zeros(BINS),
    )


def positions(count: Any, size: int) -> jax.Array:
    """Where the samples of ``count`` numbers stand; the last ones again where there are fewer."""
    spread = jnp.arange(SAMPLE) * jnp.maximum(count // SAMPLE, 1)
    return jnp.minimum(spread, size - 1)


def sample(low: jax.Array, exact: jax.Array, shadow: jax.Array, count: Any) -> jax.Array:
    """The samples of a :class:`Note`."""
    at = positions(count, low.size)
    return jnp.stack([x[at].astype(jnp.float64) for x in (low, exact, shadow)])


def counted(
    low: jax.Array, exact: jax.Array, shadow: jax.Array, fmt: jax.Array, count: Any, marks: Any
) -> tuple[jax.Array, jax.Array]:
    """One pass over a result; a second one where something isn't finite or is too large.

    Args:
        low, exact, shadow: flat: its low result, the exact one of the same low inputs in float64,
            and the shadow's, with padding behind the first ``count``.
        fmt: the row of its format.
        count: how many numbers it has.
        marks: of each low input whether it wasn't finite somewhere where the shadow's was.

    Returns:
        Tally (see :class:`Note`), and whether the result is marred in turn.
    """
    marred = functools.reduce(jnp.logical_or, marks)
    inside = lax.iota(jnp.int32, low.size) < count.astype(jnp.int32)
    size, zero, infinity = jnp.abs(low), low == 0, np.float64(np.inf).view(np.int64)
    bits = lax.bitcast_convert_type(jnp.abs(exact), jnp.int64)  # in the order of the numbers
    bits = jnp.where(inside, jnp.where(size < jnp.inf, bits, infinity), 0)
    normal = power_of_two(fmt[1].astype(jnp.int64)).astype(low.dtype)
    often, most = _packed([zero & (bits != 0), inside & ~zero & (size < normal)], bits)

    def seldom():
        flags = _flags(low, exact, shadow, fmt, ~marred)
        finite = jnp.where(jnp.isfinite(exact) & inside, jnp.abs(exact), 0.0)
        return _packed([f & inside for f in flags], lax.bitcast_convert_type(finite, jnp.int64))

    def never():
        return jnp.zeros(3, jnp.int64), most

    usual = most <= lax.bitcast_convert_type(fmt[2], jnp.int64)
    rare, most = lax.cond(usual, never, seldom)
    amax = lax.bitcast_convert_type(most, jnp.float64)
    overflowed, nan, broken = rare
    tally = jnp.stack([overflowed, *often, nan, broken]).astype(jnp.float64)
    marred = (overflowed > 0) | (nan > 0) | (marred & (broken > 0))
    return jnp.concatenate([tally, amax[None]]), marred


def _packed(flags: Sequence[jax.Array], bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many of each flag are set, and the largest of ``bits``: one pass, up to four flags."""
    packed = jnp.zeros((), jnp.int64)
    for i, flag in enumerate(flags):
        packed = packed + jnp.where(flag, np.int64(1) << (FIELD * i), 0)
    width = min(CHUNK, bits.size)
    packed, bits = lax.reduce(
        (packed.reshape(-1, width), bits.reshape(-1, width)),
        (np.int64(0), np.int64(0)),
        lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1])),
        (1,),
    )
    shifts = FIELD * jnp.arange(len(flags))
    counts = jnp.sum((packed[:, None] >> shifts[None]) & (2**FIELD - 1), axis=0)
    return counts, jnp.max(bits)


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
    before = lax.dynamic_index_in_dim(state.counts, row, keepdims=False)
    overflowed, flushed, subnormal, nan, _, amax = note.tally
    count = lax.convert_element_type(note.count, jnp.float64)
    sampled = jnp.minimum(count, SAMPLE)
    mask = jnp.arange(SAMPLE, dtype=jnp.float64) < sampled
    added, bits = _addition(note, fmt, mask)
    one = jnp.ones((), jnp.float64)
    counts = [one, count, overflowed, flushed, subnormal, nan, sampled, *added]
    event = (overflowed > 0) | (nan > 0)
    first = jnp.where(event & (before[FIRST] < 0), before[0], before[FIRST])
    peaks = jnp.maximum(before[FIRST + 1 :], jnp.stack([amax, bits]))
    after = jnp.concatenate([before[:FIRST] + jnp.stack(counts), first[None], peaks])
    sums, tops = _measures(note.samples, mask, fmt)
    _, _, shadow = note.samples
    weights = jnp.where(mask & (shadow != 0) & jnp.isfinite(shadow), 1.0, 0.0)
    bins = jnp.clip(_exponent(shadow) - LOWEST, 0, BINS - 1).astype(jnp.int32)
    return dataclasses.replace(
        state,
        counts=lax.dynamic_update_slice(state.counts, after[None], (row, 0)),
        sums=state.sums.at[row].add(sums),
        tops=state.tops.at[row].max(tops),
        histogram=state.histogram.at[row, bins].add(weights),
    )


def _addition(note: Note, fmt, mask):
    """How many additions there were of two numbers, changed nothing, cancelled; and most bits."""
    (low, exact, _), (a, b) = note.samples, note.addends
    sign = lax.convert_element_type(note.sign, jnp.float64)
    both = mask & (sign != 0) & (a != 0) & (b != 0)
    swamped = both & ((low == a) | (low == sign * b)) & (low != exact)
    wide = jnp.where(exact != 0, _exponent(exact), _exponent(jnp.maximum(abs(a), abs(b))) - fmt[0])
    bits = jnp.where(both, jnp.maximum(_exponent(a), _exponent(b)) - wide, 0.0)
    bits = jnp.where(jnp.isfinite(exact), jnp.clip(bits, 0.0, fmt[0] + 1), 0.0)
    total = jnp.sum(jnp.stack([both, swamped, bits > fmt[0] / 2]), axis=1, dtype=jnp.float64)
    return total, jnp.max(bits)


def _exponent(x: jax.Array) -> jax.Array:
    field = (lax.bitcast_convert_type(jnp.abs(x), jnp.int64) >> 52) - 1023
    return field.astype(jnp.float64)


def _measures(samples, mask, fmt):
    """Sums and largest over the numbers that are finite in all lanes.

    A unit in the last place is the format's spacing at the shadow's number, that of its subnormals
    under its normal range.
    """
    y, e, s = samples
    whole = mask & jnp.isfinite(y) & jnp.isfinite(e) & jnp.isfinite(s)
    introduced, inherited, size = y - e, y - s, jnp.abs(s)
    relative = jnp.where(e != 0, jnp.abs(introduced) / jnp.abs(e), 0.0)
    inverse = jnp.where(size > 0, 1 / jnp.where(size > 0, size, 1.0), 0.0)
    sums = [introduced**2, e * e, inherited**2, s * s, introduced, jnp.abs(introduced)]
    sums = jnp.where(whole[None], jnp.stack(sums), 0.0)
    numbers = jnp.stack([mask & ~jnp.isfinite(s), whole]).astype(jnp.float64)
    unit = jnp.clip(jnp.maximum(_exponent(s), fmt[1]) - fmt[0], -1022, 1022)
    ulps = jnp.abs(inherited) / power_of_two(unit.astype(jnp.int64))
    tops = jnp.stack([jnp.abs(introduced), relative, size, inverse, ulps])
    return (
        jnp.sum(jnp.concatenate([sums, numbers]), axis=1),
        jnp.max(jnp.where(whole[None], tops, 0.0), axis=1),
    )
