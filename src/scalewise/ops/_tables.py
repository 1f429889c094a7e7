"""The exact error of every function over every input of a format, and of the casts to it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._check import checked
from .._extras import require
from .._resolve import as_format
from ..formats import Format, FormatLike
from ..rounding import round_bits, to_float64
from .functions import FUNCTIONS, Elementary, Mpf

LIBRARY_ERROR = 2.0**-40  # 4,096 ulps of float64: far more than NumPy's functions err
SMALLEST = math.ulp(0.0)  # float64's smallest number
DIGITS = 300  # bits in mpmath: more than what x - tanh(x) cancels
BINADE = 1 << 23


@dataclasses.dataclass(frozen=True)
class FunctionErrors:
    """The errors of a function's results against the exact ones.

    Absolute and relative errors are over the inputs where both are finite, relative and in ulps
    where the exact value isn't zero. An ulp is the spacing of the format at the exact value.

    Attributes:
        name: the function's.
        domain: of the inputs: ``"all"`` finite numbers of the format, or the ``"normal"`` ones.
        arithmetic: ``"native"``: computed in the storage type; else the type it was computed in.
        count: inputs where the function is defined: the exact value is a real number.
        max_absolute, mean_absolute, max_relative, mean_relative, max_ulp: errors.
        correctly_rounded: share of ``count`` whose result is the exact value rounded to the format,
            overflow to infinity included.
        worst: the input with the largest error in ulps (infinite where only one side is finite).
    """

    name: str
    domain: str
    arithmetic: str
    count: int
    max_absolute: float
    mean_absolute: float
    max_relative: float
    mean_relative: float
    max_ulp: float
    correctly_rounded: float
    worst: float


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


Domain = Literal["all", "normal"]


@checked
def function_table(
    fmt: FormatLike,
    names: Iterable[str] | None = None,
    domain: Domain | Sequence[Domain] = "all",
) -> Iterator[FunctionErrors]:
    """Yields the errors of elementary functions over every input of a domain.

    Each function comes twice: computed in the format's own dtype as JAX does it under ``jit``, and
    in float32 with one rounding. The exact values are found by NumPy in float64, wherever an error
    of 2^-40 could not change their rounding (Ziv's test), and by mpmath with 300 bits elsewhere.

    Args:
        fmt: a format of up to 16 bits with a storage dtype.
        names: of functions in ``functions.FUNCTIONS``; all if not given.
        domain: ``"all"``: every finite number of the format; ``"normal"``: those that are neither
            zero nor subnormal, as published tables have them; or several of these.

    Raises:
        ValueError: another format, or an unknown function or domain.

    Example:
        >>> _, rsqrt = function_table("fp16", ["rsqrt"], domain="normal")
        >>> round(rsqrt.max_absolute, 6)
        0.031227
    """
    fmt = as_format(fmt, "function_table")
    if fmt.bits > 16 or fmt.dtype is None or not fmt.zero:
        raise ValueError(
            f"function_table: {fmt.name} isn't tabulated; expected formats of up to 16 bits with "
            "a storage dtype and a zero"
        )
    domains = (domain,) if isinstance(domain, str) else tuple(domain)
    return _rows(fmt, known(names, "function_table"), domains)


def known(names: Iterable[str] | None, where: str) -> list[str]:
    """Returns names of functions, by default all; raises ValueError for an unknown one."""
    names = list(FUNCTIONS if names is None else names)
    if unknown := [n for n in names if n not in FUNCTIONS]:
        raise ValueError(
            f"{where}: names has {unknown[0]!r}; expected some of {', '.join(FUNCTIONS)}"
        )
    return names


def finite(fmt: Format) -> np.ndarray:
    """Returns all finite numbers of a format, ascending."""
    values = fmt.values()
    return np.unique(values[np.isfinite(values)])


def exactly(function: Elementary, x: float, where: str) -> Mpf:
    """Returns a value to 300 bits."""
    mpmath = require("mpmath", "tables", where)
    with mpmath.workprec(DIGITS):
        if isinstance(function.exact, str):
            return getattr(mpmath, function.exact)(mpmath.mpf(x))
        return function.exact(mpmath, mpmath.mpf(x))


def _rows(fmt: Format, names: list[str], domains: tuple[str, ...]) -> Iterator[FunctionErrors]:
    x = finite(fmt)
    if "all" not in domains:
        x = x[np.abs(x) >= float(fmt.smallest_normal)]
    normal = np.abs(x) >= float(fmt.smallest_normal)
    for name in names:
        function = FUNCTIONS[name]
        exact, rounded = reference(fmt, function, x)
        for arithmetic in ("native", "float32"):
            got = _computed(fmt, function, x, arithmetic)
            if got is None:
                continue
            for domain in domains:
                chosen = normal if domain == "normal" else np.ones_like(normal)
                numbers = [v[chosen] for v in (x, got, exact, rounded)]
                yield _compare(fmt, (name, domain, arithmetic), *numbers)


def reference(fmt: Format, function: Elementary, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the exact values, rounded to float64 and rounded to the format.

    NaN where the function isn't a real number. A value below float64's range is its smallest
    number: a result that became zero has a relative error of 1.
    """
    with np.errstate(all="ignore"):
        if function.library is None:
            exact, doubtful = np.full(x.shape, np.nan), np.ones(x.shape, bool)
        else:
            exact = function.library(x)
            low, high = exact * (1 - LIBRARY_ERROR), exact * (1 + LIBRARY_ERROR)
            doubtful = fmt.encode(low) != fmt.encode(high)
            doubtful |= (exact == 0) & (x != 0)  # zero, or a number below float64's range
        rounded = fmt.decode(fmt.encode(exact))
    for i in np.flatnonzero(doubtful):
        exact[i], rounded[i] = _precisely(fmt, function, float(x[i]))
    return exact, rounded


def _precisely(fmt: Format, function: Elementary, x: float) -> tuple[float, float]:
    """Returns one value by mpmath and its rounding, by comparison with the midpoint."""
    mpmath = require("mpmath", "tables", "function_table")
    with mpmath.workprec(DIGITS):
        try:
            y = exactly(function, x, "function_table")
        except (ZeroDivisionError, ValueError):  # a pole, as IEEE 754 has it
            return np.nan, np.nan
        if isinstance(y, mpmath.mpc) or mpmath.isnan(y):
            return np.nan, np.nan
        near = float(y)
        # what float64 rounds to a midpoint is moved to the side on which it lies
        if abs(near) < 2.0**1000:
            if y > near:
                near = np.nextafter(near, np.inf)
            elif y < near:
                near = np.nextafter(near, -np.inf)
        value = float(y) or (math.copysign(SMALLEST, float(mpmath.sign(y))) if y else 0.0)
        return value, float(fmt.decode(fmt.encode(near)))


def _computed(
    fmt: Format, function: Elementary, x: np.ndarray, arithmetic: str
) -> np.ndarray | None:
    """Returns results in float64; None if JAX doesn't have that arithmetic."""
    dtype = np.dtype(fmt.dtype)
    stored = jnp.asarray(x.astype(dtype))
    run = function.definition if arithmetic == "native" else partial(function, compute=arithmetic)
    try:
        with jax.numpy_dtype_promotion("standard"):
            return np.asarray(jax.jit(run)(stored)).astype(np.float64)
    except (TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
        return None


def _compare(
    fmt: Format,
    what: tuple[str, str, str],
    x: np.ndarray,
    got: np.ndarray,
    exact: np.ndarray,
    rounded: np.ndarray,
) -> FunctionErrors:
    defined = ~np.isnan(exact)
    x, got, exact, rounded = (v[defined] for v in (x, got, exact, rounded))
    right = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
    both = np.isfinite(got) & np.isfinite(rounded)
    with np.errstate(all="ignore"):
        error = np.where(both, np.abs(got - exact), 0.0)
        relative = np.where(both & (exact != 0), error / np.abs(exact), 0.0)
        exponent = np.clip(np.frexp(exact)[1] - 1, fmt.min_exponent, fmt.max_exponent)
        ulps = np.where(both, error / np.ldexp(1.0, exponent - fmt.mantissa_bits), 0.0)
        ulps = np.where(both | right, ulps, np.inf)
    compared = max(int(both.sum()), 1)
    return FunctionErrors(
        *what,
        count=len(x),
        max_absolute=float(error.max(initial=0)),
        mean_absolute=float(error.sum() / compared),
        max_relative=float(relative.max(initial=0)),
        mean_relative=float(relative.sum() / compared),
        max_ulp=float(ulps.max(initial=0)),
        correctly_rounded=float(right.mean()) if len(x) else 1.0,
        worst=float(x[np.argmax(ulps)]) if len(x) else float("nan"),
    )


@checked
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
