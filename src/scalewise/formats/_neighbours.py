"""Neighbours of a number in a format, and the distance between them."""

from __future__ import annotations

import math

from . import _codes
from ._format import Format


def next_up(fmt: Format, x: float) -> float:
    """The smallest number of the format above ``x``, as IEEE 754's nextUp.

    Args:
        fmt: any format of at most 52 mantissa bits.
        x: any number, of the format or not.

    Returns:
        Exact in float64. Above the largest number: infinity, or NaN in a format without one. NaN
        gives NaN. Below the largest magnitude of a negative number: that number.

    Example:
        >>> from scalewise.formats import E4M3FN
        >>> next_up(E4M3FN, 1.0), next_up(E4M3FN, 1.06), next_up(E4M3FN, -0.0)
        (1.125, 1.125, 0.001953125)
    """
    if math.isnan(x):
        return x
    if x < 0 and fmt.signed:
        below = _below(fmt, -x)
        return 0.0 if below is None else -below
    if x < 0:
        return _number(fmt, 0)
    return _above(fmt, x)


def next_down(fmt: Format, x: float) -> float:
    """The largest number of the format below ``x``: ``-next_up(-x)``, and NaN in an unsigned or
    zero-less format where nothing lies below.

    Example:
        >>> from scalewise.formats import E5M2
        >>> next_down(E5M2, 1.0), next_down(E5M2, 0.0) == -(2.0**-16)
        (0.875, True)
    """
    if math.isnan(x):
        return x
    if fmt.signed:
        return -next_up(fmt, -x)
    below = _below(fmt, x) if x > 0 else None
    return math.nan if below is None else below


def ulp(fmt: Format, x: float) -> float:
    """The spacing of the format's numbers in the binade of ``x`` (Goldberg's ulp).

    Below the smallest normal number, the spacing of the subnormals; above the largest number,
    that of the last binade; NaN for NaN and infinities.

    Example:
        >>> from scalewise.formats import FP16
        >>> ulp(FP16, 1.5), ulp(FP16, 65504.0), ulp(FP16, 0.0) == 2.0**-24
        (0.0009765625, 32.0, True)
    """
    if not math.isfinite(x):
        return math.nan
    exponent = math.frexp(x)[1] - 1 if x else fmt.min_exponent
    exponent = min(max(exponent, fmt.min_exponent), fmt.max_exponent)
    return math.ldexp(1.0, exponent - fmt.mantissa_bits)


def _number(fmt: Format, code: int) -> float:
    return float(_codes.decode(fmt, code))


def _last_not_above(fmt: Format, x: float) -> int:
    """The largest positive finite code whose number isn't above ``x``; -1 if there is none."""
    low, high = -1, fmt.max_code
    while low < high:
        middle = (low + high + 1) // 2
        if _number(fmt, middle) <= x:
            low = middle
        else:
            high = middle - 1
    return low


def _above(fmt: Format, x: float) -> float:
    code = _last_not_above(fmt, x)
    if code < fmt.max_code:
        return _number(fmt, code + 1)
    return math.inf if fmt.infinities else math.nan


def _below(fmt: Format, x: float) -> float | None:
    """The largest number below a positive ``x``, or None."""
    code = _last_not_above(fmt, x)
    if code >= 0 and _number(fmt, code) == x:
        code -= 1
    return _number(fmt, code) if code >= 0 else None
