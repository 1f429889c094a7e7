"""What is noted of each equation: counts while it runs, the rest from a sample, in one pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._rounding import WIDTH, power_of_two

SAMPLE = 1024  # numbers of each result, evenly spaced, of which more is asked than counts
LANES = ("low", "exact", "shadow")
BINS = 128  # of a histogram: exponents from LOWEST up; what lies outside goes to the ends
LOWEST = -96
FIELD = 2.0**26  # two counts in one float64 sum: one pass over the data instead of two
LIMIT = 2**26

COUNTS = (
    "visits", "elements", "overflowed", "flushed", "subnormal", "nan", "sampled", "added",
    "swamped", "cancelled",
)  # fmt: skip
FIRST = len(COUNTS)  # the turn at which something first overflowed or became NaN, or -1
PEAKS = ("amax", "bits")  # largest finite exact magnitude; most bits cancelled in one addition
SUMS = (
    "introduced2", "exact2", "inherited2", "shadow2", "drift", "drift_size", "bad", "compared",
)  # fmt: skip
TOPS = ("introduced_max", "relative_max", "shadow_max", "shadow_min_inverse")
_AT = {name: i for i, name in enumerate(COUNTS)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """One row for each equation; fixed shapes, so that loops can carry it.

    Attributes:
        formats: float64[n, 8], the format of each equation's results (see ``as_row``): an input.
        counts: float64[n, ...]: COUNTS, over all numbers of each result and all turns of all loops
            (the last four over the samples); FIRST; PEAKS.
        samples: float64[n, 3, SAMPLE], the lanes of the latest turn that isn't folded yet.
        folded: float64[n], how many visits are in the sums already.
        sums, tops: float64[n, ...], added up and largest over the turns.
        histogram: float64[n, BINS], exponents of the shadow's nonzero numbers.
    """

    formats: Any
    counts: Any
    samples: Any
    folded: Any
    sums: Any
    tops: Any
    histogram: Any


def blank(formats: np.ndarray) -> Statistics:
    """Statistics of a program that hasn't run yet, with the formats of its equations."""
    n = len(formats)
    assert formats.shape == (n, WIDTH)

    def zeros(*shape: int) -> jax.Array:
        return jnp.zeros((n, *shape), jnp.float64)

    return Statistics(
        formats=jnp.asarray(formats),
        counts=zeros(FIRST + 1 + len(PEAKS)).at[:, FIRST].set(-1.0),
        samples=zeros(len(LANES), SAMPLE),
        folded=zeros(),
        sums=zeros(len(SUMS)),
        tops=zeros(len(TOPS)),
        histogram=zeros(BINS),
    )


def note(
    state: Statistics,
    row: int | jax.Array,
    lanes: Sequence[jax.Array],
    addends: Sequence[jax.Array],
    sign: int,
    clean: jax.Array,
) -> tuple[Statistics, jax.Array]:
    """The state after one equation.

    Args:
        state: before it.
        row: the equation's.
        lanes: flat float64 arrays of one size: its low result, the exact one of the same low
            inputs, and the shadow's.
        addends: for an addition, samples of its two operands in the low lane.
        sign: 1 for an addition, -1 for a subtraction, else 0.
        clean: whether all low inputs were finite wherever the shadow's were.

    Returns:
        The state, and whether the low result isn't finite where the shadow is.
    """
    fmt = lax.dynamic_index_in_dim(state.formats, row, keepdims=False)
    before = lax.dynamic_index_in_dim(state.counts, row, keepdims=False)
    sample = jnp.stack([thin(x) for x in lanes])
    counts, peaks, broken = _count(lanes, addends, sign, fmt, clean)
    event = (counts[_AT["overflowed"]] > 0) | (counts[_AT["nan"]] > 0)
    first = jnp.where(event & (before[FIRST] < 0), before[0], before[FIRST])
    after = jnp.concatenate([
        before[:FIRST] + counts, first[None], jnp.maximum(before[FIRST + 1 :], peaks)
    ])  # fmt: skip
    state = dataclasses.replace(
        state,
        counts=lax.dynamic_update_slice(state.counts, after[None], (row, 0)),
        samples=lax.dynamic_update_slice(state.samples, sample[None], (row, 0, 0)),
    )
    return state, event | (~clean & broken)


def _count(lanes, addends, sign, fmt, clean) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One turn's addition to ``COUNTS``, its ``PEAKS``, and whether the low result is broken."""
    low, exact, shadow = lanes
    size, finite = jnp.abs(low), jnp.isfinite(exact)
    broken = ~jnp.isfinite(low) & jnp.isfinite(shadow)
    divided = clean & (size == jnp.inf) & ~finite  # of finite numbers: by zero, most often
    clamped = finite & (jnp.abs(exact) > fmt[2]) & (size >= fmt[2]) & jnp.isfinite(shadow)
    lost = clamped | (broken & (finite | divided))
    overflowed, flushed = _both(lost, (low == 0) & (exact != 0))
    undefined = broken & clean & ~finite & jnp.isnan(low)
    nan, subnormal = _both(undefined, (size > 0) & (size < power_of_two(fmt[1].astype(jnp.int64))))
    amax = jnp.max(jnp.where(finite, jnp.abs(exact), 0.0), initial=0.0)
    one, sampled = jnp.ones((), jnp.float64), min(SAMPLE, low.size)
    added, bits = jnp.zeros(3, jnp.float64), 0.0 * one
    if sign:
        added, bits = _addition(addends, sign, low, exact, fmt)
    whole = jnp.stack([one, one * low.size, overflowed, flushed, subnormal, nan, one * sampled])
    return (
        jnp.concatenate([whole, added]),
        jnp.stack([amax, bits]),
        ~jnp.isfinite(jnp.max(size, initial=0.0)),
    )


def _both(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many of each are true, by one sum where float64 holds both counts."""
    if a.size >= LIMIT:
        return jnp.sum(a, dtype=jnp.float64), jnp.sum(b, dtype=jnp.float64)
    packed = jnp.sum(jnp.where(a, 1.0, 0.0) + jnp.where(b, FIELD, 0.0))
    high = jnp.floor(packed / FIELD)
    return packed - high * FIELD, high


def thin(x: jax.Array) -> jax.Array:
    """At most SAMPLE numbers, evenly spaced."""
    x = jnp.ravel(x)
    return x if x.size <= SAMPLE else x[:: x.size // SAMPLE][:SAMPLE]


def _addition(addends, sign, low, exact, fmt):
    """How many additions there were of two numbers, changed nothing, cancelled; and most bits."""
    a, b = addends
    low, exact = thin(low), thin(exact)
    both = (a != 0) & (b != 0)
    swamped = both & ((low == a) | (low == sign * b)) & (low != exact)
    wide = jnp.where(exact != 0, _exponent(exact), _exponent(jnp.maximum(abs(a), abs(b))) - fmt[0])
    bits = jnp.where(both, jnp.maximum(_exponent(a), _exponent(b)) - wide, 0.0)
    bits = jnp.where(jnp.isfinite(exact), jnp.clip(bits, 0.0, fmt[0] + 1), 0.0)
    cancelled = bits > fmt[0] / 2
    total = jnp.sum(jnp.stack([both, swamped, cancelled]), axis=1, dtype=jnp.float64)
    return total, jnp.max(bits, initial=0.0)


def _exponent(x: jax.Array) -> jax.Array:
    field = (lax.bitcast_convert_type(jnp.abs(x), jnp.int64) >> 52) - 1023
    return field.astype(jnp.float64)


def fold(state: Statistics, low: int, high: int) -> Statistics:
    """The samples of rows ``low`` to ``high`` taken into the sums, all rows by one computation."""
    part = slice(low, high)
    counts = state.counts[part]
    visits = counts[:, 0]
    taken = jnp.minimum(counts[:, 1] / jnp.maximum(visits, 1.0), SAMPLE)
    fresh = visits > state.folded[part]
    mask = (jnp.arange(SAMPLE, dtype=jnp.float64)[None] < taken[:, None]) & fresh[:, None]
    y, e, s = (state.samples[part, i] for i in range(3))
    sums, tops = _measures(y, e, s, mask)
    return dataclasses.replace(
        state,
        folded=state.folded.at[part].set(visits),
        sums=state.sums.at[part].add(sums),
        tops=state.tops.at[part].max(tops),
        histogram=state.histogram.at[part].add(_histogram(s, mask)),
    )


def _measures(y, e, s, mask):
    """Sums and largest over each row's numbers that are finite in all lanes."""
    whole = mask & jnp.isfinite(y) & jnp.isfinite(e) & jnp.isfinite(s)

    def total(x):
        return jnp.sum(jnp.where(whole, x, 0.0), axis=1)

    def largest(x):
        return jnp.max(jnp.where(whole, x, 0.0), axis=1)

    introduced, inherited = y - e, y - s
    size = jnp.abs(s)
    sums = [
        total(introduced**2),
        total(e * e),
        total(inherited**2),
        total(s * s),
        total(introduced),
        total(jnp.abs(introduced)),
        jnp.sum(mask & ~jnp.isfinite(s), axis=1, dtype=jnp.float64),
        jnp.sum(whole, axis=1, dtype=jnp.float64),
    ]
    relative = jnp.where(e != 0, jnp.abs(introduced) / jnp.abs(e), 0.0)
    inverse = jnp.where(size > 0, 1 / jnp.where(size > 0, size, 1.0), 0.0)
    tops = [largest(jnp.abs(introduced)), largest(relative), largest(size), largest(inverse)]
    return jnp.stack(sums, axis=1), jnp.stack(tops, axis=1)


def _histogram(s: jax.Array, mask: jax.Array) -> jax.Array:
    """Counts of exponents, a row each, by one scatter."""
    counted = mask & (s != 0) & jnp.isfinite(s)
    bins = jnp.clip(_exponent(s) - LOWEST, 0, BINS - 1).astype(jnp.int32)
    rows = jnp.broadcast_to(jnp.arange(len(s), dtype=jnp.int32)[:, None], s.shape)
    weights = counted.astype(jnp.float64)
    return jnp.zeros((len(s), BINS), jnp.float64).at[rows, bins].add(weights)
