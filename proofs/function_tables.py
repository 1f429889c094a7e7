"""Exact errors of casts, and the inputs at which functions leave a format's range, for pages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from proofs.function_errors import exactly, finite, known
from scalewise._resolve import as_format
from scalewise.formats import Format, FormatLike
from scalewise.ops.functions import FUNCTIONS, Elementary
from scalewise.rounding import round_bits, to_float64

BINADE = 1 << 23
Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class FunctionRange:
    """Where a function leaves the range of a format.

    Attributes:
        name: the function's.
        overflows: intervals of inputs, both ends included, at which the value rounds beyond the
            largest number. A pole, such as the logarithm's at 0, isn't one.
        flushes: intervals at which the value isn't zero, but rounds to zero.
    """

    name: str
    overflows: tuple[Interval, ...]
    flushes: tuple[Interval, ...]


def function_ranges(fmt: FormatLike, names: Iterable[str] | None = None) -> Iterator[FunctionRange]:
    """Yields the inputs of a format at which each elementary function overflows or becomes zero.

    Every finite number of the format is tried; values are computed in float64.

    Args:
        fmt: a format of up to 16 bits with a zero, or the name or dtype of one.
        names: of functions in ``functions.FUNCTIONS``; all if not given.

    Raises:
        ValueError: a wider format, or an unknown function.

    Example:
        >>> [exp] = function_ranges("fp16", ["exp"])
        >>> exp.overflows
        ((11.09375, 65504.0),)
    """
    fmt = as_format(fmt, "function_ranges")
    if fmt.bits > 16 or not fmt.zero:
        raise ValueError(f"function_ranges: {fmt.name} is no format of up to 16 bits with a zero")
    return _ranges(fmt, known(names, "function_ranges"))


def _ranges(fmt: Format, names: list[str]) -> Iterator[FunctionRange]:
    x = finite(fmt)
    for name in names:
        with jax.enable_x64(True):
            y = np.asarray(FUNCTIONS[name].definition(jnp.asarray(x)))
        rounded = fmt.decode(fmt.encode(y))
        overflows = ~np.isfinite(rounded) & ~np.isnan(y) & ~_poles(y)
        flushes = _flushed(FUNCTIONS[name], x, y, rounded)
        yield FunctionRange(name, _intervals(x, overflows), _intervals(x, flushes))


def _poles(y: np.ndarray) -> np.ndarray:
    infinite = np.isinf(y)
    beside = np.zeros_like(infinite)
    beside[1:] |= infinite[:-1]
    beside[:-1] |= infinite[1:]
    return infinite & ~beside


def _flushed(function: Elementary, x: np.ndarray, y: np.ndarray, rounded: np.ndarray) -> np.ndarray:
    """Returns which values round to zero without being zero.

    Zeros of float64 beside such values are too small for float64. mpmath decides on zeros of
    float64, such as sinc's at integers.
    """
    small = (rounded == 0) & (y != 0)
    zero = (y == 0) & (x != 0)
    for _ in range(2):  # from the left, and from the right
        for i in range(1, len(x)):
            if small[i - 1] and zero[i]:
                small[i] = True
        small, zero = small[::-1], zero[::-1]
    first = small & ~np.concatenate([[False], small[:-1]])
    for i in np.flatnonzero(first):
        while i < len(x) and small[i] and exactly(function, float(x[i])) == 0:
            small[i] = False
            i += 1
    return small


def _intervals(x: np.ndarray, chosen: np.ndarray) -> tuple[Interval, ...]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]]).astype(int)))
    return tuple((float(x[a]), float(x[b - 1])) for a, b in edges.reshape(-1, 2))


@dataclasses.dataclass(frozen=True)
class CastErrors:
    """The errors of the cast from float32 over all numbers of a domain, or over a distribution.

    Attributes:
        domain: ``"all"``: from the smallest positive number of the format to the largest;
            ``"normal"``: from the smallest normal one.
        count: of float32 numbers in it.
        max_absolute, max_relative, mean_absolute, mean_relative: errors.
    """

    domain: str
    count: int
    max_absolute: float
    max_relative: float
    mean_absolute: float
    mean_relative: float


def cast_table(
    fmt: FormatLike, distribution: Literal["float32", "log_uniform"] = "float32"
) -> list[CastErrors]:
    """Returns the errors of the cast from all positive float32 numbers in the format's range.

    No sample: every bit pattern from the format's smallest number to its largest. Negative ones are
    their mirror image.

    Args:
        fmt: a format of up to 16 bits, each of whose numbers float32 holds, or a name of one.
        distribution: ``"log_uniform"``: the exact expectations for real numbers whose logarithm is
            uniformly distributed over the range, which samples approach that are drawn so; the
            count is then 0.

    Raises:
        ValueError: a wider format, or an unknown distribution.

    Example:
        >>> [_, normal] = cast_table("fp16", "log_uniform")
        >>> round(normal.mean_relative, 7)
        0.0001761
    """
    fmt = as_format(fmt, "cast_table")
    if fmt.bits > 19:
        raise ValueError(f"cast_table: {fmt.name} is no narrow format; expected up to 19 bits")
    if distribution == "log_uniform":
        lows = {"all": fmt.smallest, "normal": fmt.smallest_normal}
        return [_log_uniform(fmt, domain, float(low)) for domain, low in lows.items()]
    first = int(np.float32(float(fmt.smallest)).view(np.uint32))
    last = int(np.float32(float(fmt.max)).view(np.uint32))
    normal = int(np.float32(float(fmt.smallest_normal)).view(np.uint32))
    parts = [_cast_errors(fmt, max(first, normal), last)]
    if first < normal:
        parts.append(_cast_errors(fmt, first, normal - 1))
    counts, sums, maxima = (np.array([p[i] for p in parts]) for i in range(3))
    table = []
    for domain, chosen in (("all", slice(None)), ("normal", slice(1))):
        count, (absolute, relative) = counts[chosen].sum(), sums[chosen].sum(axis=0)
        errors = (*maxima[chosen].max(axis=0), absolute / count, relative / count)
        table.append(CastErrors(domain, int(count), *map(float, errors)))
    return table


def _log_uniform(fmt: Format, domain: str, low: float) -> CastErrors:
    """Returns the expected errors of rounding log-uniform numbers from ``low`` to the largest.

    Between two midpoints all numbers are rounded to one, and both integrals have closed forms.
    """
    values, high = finite(fmt), float(fmt.max)
    values = values[values >= 0]
    middles = (values[1:] + values[:-1]) / 2
    a = np.clip(np.concatenate([[0.0], middles]), low, high)
    b = np.clip(np.concatenate([middles, [high]]), low, high)
    a, b, v = (x[b > a] for x in (a, b, values))
    below, above = np.log(v / a), np.log(b / v)
    absolute = (v * below - (v - a)) + ((b - v) - v * above)
    relative = (v / a - 1 - below) + (above - (1 - v / b))
    means = (float(x.sum()) / math.log(high / low) for x in (absolute, relative))
    distance = np.maximum(v - a, b - v)
    largest = float(distance.max()), float(np.maximum((v - a) / a, (b - v) / b).max())
    return CastErrors(domain, 0, *largest, *means)


def _cast_errors(fmt: Format, first: int, last: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Returns count, sums and maxima of (absolute, relative) errors over float32's bit patterns.

    Rounding commutes with powers of two where both formats have normal numbers: all binades
    but the last two have the first one's errors, scaled.
    """
    normal = max(int(np.float32(float(fmt.smallest_normal)).view(np.uint32)), BINADE)
    parts, start, whole = [], first, None  # whole: the errors of a binade, over its first number
    with jax.enable_x64(True):
        while start <= last:
            end = min((start // BINADE + 1) * BINADE - 1, last)
            unit = np.array([float(np.uint32(start).view(np.float32)), 1.0])
            regular = start >= normal and start % BINADE == 0 and end + 1 + BINADE <= last
            if whole is None or not regular:
                chunk = _chunk(fmt, np.uint32(start), np.uint32(end))
                parts.append([np.asarray(x) for x in chunk])
                whole = [x / unit for x in parts[-1]] if regular else whole
            else:
                parts.append([x * unit for x in whole])
            start = end + 1
    sums, maxima = zip(*parts, strict=True)
    return last - first + 1, np.sum(sums, axis=0), np.max(maxima, axis=0)


@partial(jax.jit, static_argnums=0)
def _chunk(fmt: Format, start: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
    bits = start + lax.iota(jnp.uint32, BINADE)
    x = lax.bitcast_convert_type(bits, jnp.float32)
    inside = bits <= last
    exact = to_float64(x)
    absolute = jnp.where(inside, jnp.abs(to_float64(round_bits(x, fmt)) - exact), 0.0)
    relative = jnp.where(inside, absolute / exact, 0.0)
    both = jnp.stack([absolute, relative])
    return both.sum(axis=1), both.max(axis=1)
