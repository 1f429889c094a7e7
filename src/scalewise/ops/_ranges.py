"""The inputs of a format at which a function's result overflows, or becomes zero."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from .._check import checked
from .._resolve import as_format
from ..formats import Format, FormatLike
from ._tables import exactly, finite, known
from .functions import FUNCTIONS, Elementary

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


@checked
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
        while i < len(x) and small[i] and exactly(function, float(x[i]), "function_ranges") == 0:
            small[i] = False
            i += 1
    return small


def _intervals(x: np.ndarray, chosen: np.ndarray) -> tuple[Interval, ...]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]]).astype(int)))
    return tuple((float(x[a]), float(x[b - 1])) for a, b in edges.reshape(-1, 2))
