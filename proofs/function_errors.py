"""The exact error of every elementary function over every input of a format.

`docs/functions.md` has the figures.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
from scipy.special import erf, erfc

from scalewise._resolve import as_format
from scalewise.formats import Format, FormatLike
from scalewise.ops.functions import FUNCTIONS, Elementary

Mpmath: TypeAlias = Any  # the module mpmath
Mpf: TypeAlias = Any  # a number of mpmath, of any precision

LIBRARY_ERROR = 2.0**-40  # 4,096 ulps of float64: far more than NumPy's functions err
SMALLEST = math.ulp(0.0)  # float64's smallest number
DIGITS = 300  # bits in mpmath: more than what x - tanh(x) cancels


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


Domain = Literal["all", "normal"]


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
    names = list(FUNCTIONS if names is None else names)
    if unknown := [n for n in names if n not in FUNCTIONS]:
        raise ValueError(
            f"{where}: names has {unknown[0]!r}; expected some of {', '.join(FUNCTIONS)}"
        )
    return names


def finite(fmt: Format) -> np.ndarray:
    values = fmt.values()
    return np.unique(values[np.isfinite(values)])


class Exact(NamedTuple):
    """A function in mpmath, by name or given mpmath, and in NumPy, within a few ulps of float64."""

    exact: str | Callable[[Mpmath, Mpf], Mpf]
    library: Callable[[np.ndarray], np.ndarray] | None = None


def _gelu_tanh(m: Mpmath, x: Mpf) -> Mpf:
    # x (1 + tanh z) / 2, without the cancellation at very negative z
    z = m.sqrt(2 / m.pi) * (x + m.mpf("0.044715") * x**3)
    return x / (1 + m.exp(-2 * z))


def _gelu_tanh_library(x: np.ndarray) -> np.ndarray:
    z = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return x / (1 + np.exp(-2 * z))


def _squareplus(x: np.ndarray) -> np.ndarray:
    root = np.hypot(x, 2)  # without the cancellation where x is negative, or the overflow
    return np.where(x < 0, 2 / (root + np.abs(x)), (x + root) / 2)


def _clip(x: Mpf, low: float, high: float) -> Mpf:
    return min(max(x, low), high)


def _floor_based(rounding: Callable[[Mpf], int]) -> Callable[[Mpmath, Mpf], Mpf]:
    return lambda m, x: m.mpf(int(rounding(x)))


def _of_all(names: str) -> Iterator[tuple[Any, ...]]:
    """Yields the rows of functions that mpmath and NumPy have under one name."""
    for name in names.split():
        own = name.replace("a", "arc", 1) if name.startswith("a") else name
        yield name, name, getattr(np, own)


_ELU = lambda m, x: x if x > 0 else m.expm1(x), lambda x: np.where(x > 0, x, np.expm1(x))
_SELU = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
_ROWS: tuple[tuple[Any, ...], ...] = (
    *_of_all("sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh exp"),
    ("exp2", lambda m, x: m.mpf(2) ** x, np.exp2),
    *_of_all("expm1 log"),
    ("log2", lambda m, x: m.log(x, 2), np.log2),
    *_of_all("log10 log1p sqrt"),
    ("rsqrt", lambda m, x: 1 / m.sqrt(x), lambda x: 1 / np.sqrt(x)),
    ("cbrt", lambda m, x: m.sign(x) * m.cbrt(abs(x)), np.cbrt),
    ("square", lambda m, x: x * x, np.square),
    ("reciprocal", lambda m, x: 1 / x, lambda x: 1 / x),
    ("negative", lambda m, x: -x, np.negative),
    ("abs", lambda m, x: abs(x), np.abs),
    ("sign", lambda m, x: m.sign(x), np.sign),
    ("floor", _floor_based(math.floor), np.floor),
    ("ceil", _floor_based(math.ceil), np.ceil),
    ("trunc", _floor_based(int), np.trunc),
    ("round", _floor_based(lambda x: round(float(x))), np.rint),
    ("relu", lambda m, x: max(x, m.mpf(0)), lambda x: np.maximum(x, 0)),
    ("relu6", lambda m, x: _clip(x, 0, 6), lambda x: np.clip(x, 0, 6)),
    ("hard_tanh", lambda m, x: _clip(x, -1, 1), lambda x: np.clip(x, -1, 1)),
    ("hard_sigmoid",
     lambda m, x: _clip(x + 3, 0, 6) / m.mpf(6), lambda x: np.clip(x + 3, 0, 6) / 6),
    ("hard_swish",
     lambda m, x: x * _clip(x + 3, 0, 6) / m.mpf(6), lambda x: x * (np.clip(x + 3, 0, 6) / 6)),
    ("leaky_relu",
     lambda m, x: x if x >= 0 else x * m.mpf("0.01"), lambda x: np.where(x < 0, x * 0.01, x)),
    ("sigmoid", lambda m, x: 1 / (1 + m.exp(-x)), lambda x: 1 / (1 + np.exp(-x))),
    ("log_sigmoid",
     lambda m, x: -m.log1p(m.exp(-x)), lambda x: -np.logaddexp(0, -x)),
    ("silu", lambda m, x: x / (1 + m.exp(-x)), lambda x: x / (1 + np.exp(-x))),
    ("softplus", lambda m, x: m.log1p(m.exp(x)), lambda x: np.logaddexp(0, x)),
    ("softsign", lambda m, x: x / (1 + abs(x)), lambda x: x / (1 + np.abs(x))),
    ("squareplus", lambda m, x: (x + m.sqrt(x * x + 4)) / 2, _squareplus),
    ("tanh_shrink", lambda m, x: x - m.tanh(x)),
    ("mish",
     lambda m, x: x * m.tanh(m.log1p(m.exp(x))), lambda x: x * np.tanh(np.logaddexp(0, x))),
    ("gelu",
     lambda m, x: x * m.erfc(-x / m.sqrt(2)) / 2, lambda x: x * erfc(-x / np.sqrt(2)) / 2),
    ("gelu_tanh", _gelu_tanh, _gelu_tanh_library),
    ("elu", *_ELU),
    ("celu", *_ELU),
    ("selu",
     lambda m, x: m.mpf(_SELU[1]) * (x if x > 0 else m.mpf(_SELU[0]) * m.expm1(x)),
     lambda x: _SELU[1] * np.where(x > 0, x, _SELU[0] * np.expm1(x))),
    ("erf", "erf", erf),
    ("erfc", "erfc", erfc),
    ("sinc", lambda m, x: m.sincpi(x)),
    ("deg2rad", lambda m, x: x * m.pi / 180, np.deg2rad),
    ("rad2deg", lambda m, x: x * 180 / m.pi, np.rad2deg),
)  # fmt: skip
EXACT = {name: Exact(*rest) for name, *rest in _ROWS}


def exactly(function: Elementary, x: float) -> Mpf:
    exact = EXACT[function.name].exact
    with mpmath.workprec(DIGITS):
        if isinstance(exact, str):
            return getattr(mpmath, exact)(mpmath.mpf(x))
        return exact(mpmath, mpmath.mpf(x))


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
        library = EXACT[function.name].library
        if library is None:
            exact, doubtful = np.full(x.shape, np.nan), np.ones(x.shape, bool)
        else:
            exact = library(x)
            low, high = exact * (1 - LIBRARY_ERROR), exact * (1 + LIBRARY_ERROR)
            doubtful = fmt.encode(low) != fmt.encode(high)
            doubtful |= (exact == 0) & (x != 0)  # zero, or a number below float64's range
        rounded = fmt.decode(fmt.encode(exact))
    for i in np.flatnonzero(doubtful):
        exact[i], rounded[i] = _precisely(fmt, function, float(x[i]))
    return exact, rounded


def _precisely(fmt: Format, function: Elementary, x: float) -> tuple[float, float]:
    """Returns one value by mpmath and its rounding, by comparison with the midpoint."""
    with mpmath.workprec(DIGITS):
        try:
            y = exactly(function, x)
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
