"""The neighbours of a number in a format, and their distance: next_up, next_down, ulp."""

from __future__ import annotations

import math

import numpy as np

from .._check import AnyFloat, checked
from . import _codes
from ._catalogue import format as format_
from ._format import Format

FormatSpec = Format | str | np.dtype | type


@checked
def next_up(fmt: FormatSpec, x: AnyFloat) -> float:
    """Returns the smallest number of the format above ``x``, as IEEE 754's nextUp.

    Args:
        fmt: any format, or a name or dtype of one.
        x: any number, whether the format represents it or not.

    Returns:
        The exact number. If the format has no number above ``x``: infinity, or NaN in a format
        without infinities. NaN if ``x`` is NaN.

    Example:
        >>> from scalewise.formats import E4M3FN
        >>> next_up(E4M3FN, 1.0), next_up(E4M3FN, 1.06), next_up(E4M3FN, -0.0)
        (1.125, 1.125, 0.001953125)
    """
    fmt = format_(fmt)
    if math.isnan(x):
        return x
    if x < 0 and fmt.signed:
        below = _below(fmt, -x)
        return 0.0 if below is None else -below
    if x < 0:
        return _number(fmt, 0)
    return _above(fmt, x)


@checked
def next_down(fmt: FormatSpec, x: AnyFloat) -> float:
    """Returns the largest number of the format below ``x``, as IEEE 754's nextDown.

    That is ``-next_up(-x)`` in a signed format. In an unsigned format without a number below
    ``x``, it is NaN.

    Example:
        >>> from scalewise.formats import E5M2
        >>> next_down(E5M2, 1.0), next_down(E5M2, 0.0) == -(2.0**-16)
        (0.875, True)
    """
    fmt = format_(fmt)
    if math.isnan(x):
        return x
    if fmt.signed:
        return -next_up(fmt, -x)
    below = _below(fmt, x) if x > 0 else None
    return math.nan if below is None else below


@checked
def ulp(fmt: FormatSpec, x: AnyFloat) -> float:
    """Returns the spacing of the format's numbers in the binade of ``x`` (Goldberg's ulp).

    Below the smallest normal number this is the spacing of the subnormals, and above the largest
    number that of the last binade. NaN and infinities give NaN.

    Example:
        >>> from scalewise.formats import FP16
        >>> ulp(FP16, 1.5), ulp(FP16, 65504.0), ulp(FP16, 0.0) == 2.0**-24
        (0.0009765625, 32.0, True)
    """
    fmt = format_(fmt)
    if not math.isfinite(x):
        return math.nan
    exponent = math.frexp(x)[1] - 1 if x else fmt.min_exponent
    exponent = min(max(exponent, fmt.min_exponent), fmt.max_exponent)
    return math.ldexp(1.0, exponent - fmt.mantissa_bits)


def _number(fmt: Format, code: int) -> float:
    return float(_codes.decode(fmt, code))


def _last_not_above(fmt: Format, x: float) -> int:
    """Returns the largest positive finite code whose number is at most ``x``; -1 if none is."""
    code = int(_codes.encode(fmt, abs(x), "toward_zero", True))
    return code if _number(fmt, code) <= x else -1


def _above(fmt: Format, x: float) -> float:
    code = _last_not_above(fmt, x)
    if code < fmt.max_code:
        return _number(fmt, code + 1)
    return math.inf if fmt.infinities else math.nan


def _below(fmt: Format, x: float) -> float | None:
    code = _last_not_above(fmt, x)
    if code >= 0 and _number(fmt, code) == x:
        code -= 1
    return _number(fmt, code) if code >= 0 else None
