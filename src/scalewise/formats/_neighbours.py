"""A number in a format: its neighbours, their distance, and its bits."""

from __future__ import annotations

import dataclasses
import math
from decimal import Decimal

import numpy as np

from .._check import AnyFloat, checked
from . import _codes
from ._catalogue import format as format_
from ._format import Format

FormatSpec = Format | str | np.dtype | type


@checked
def next_up(fmt: FormatSpec, x: AnyFloat) -> float:
    """Returns the smallest number of the format above ``x``, as IEEE 754's nextUp.

    ``x`` is any number, whether the format represents it or not. If the format has no number above
    it, the result is infinity, or NaN in a format without infinities; NaN of NaN.

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
    code = _last_not_above(fmt, x)
    if code < fmt.max_code:
        return _number(fmt, code + 1)
    return math.inf if fmt.infinities else math.nan


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


def _below(fmt: Format, x: float) -> float | None:
    code = _last_not_above(fmt, x)
    if code >= 0 and _number(fmt, code) == x:
        code -= 1
    return _number(fmt, code) if code >= 0 else None


@dataclasses.dataclass(frozen=True, repr=False)
class Bits:
    """The fields of one code of a format, as :func:`bits` returns them."""

    format: Format
    code: int  # from 0 to ``2**format.bits - 1``
    sign: int | None  # 0 or 1; None in an unsigned format
    exponent: int  # as stored, with the bias
    fraction: int  # as stored, from 0 to ``2**format.mantissa_bits - 1``

    @property
    def value(self) -> float:
        """The number that the code stands for; it may be an infinity or NaN."""
        return float(self.format.decode(self.code))

    @property
    def power(self) -> int:
        """The power of two that the significand is multiplied by."""
        return (1 if self._leading == 0 else self.exponent) - self.format.bias

    @property
    def _leading(self) -> int:
        return 0 if self.exponent == 0 and (self.format.subnormals or self.value == 0) else 1

    def __str__(self) -> str:
        """Returns the bits of sign, exponent and fraction, separated by spaces."""
        fmt = self.format
        parts = ["" if self.sign is None else str(self.sign)]
        parts.append(f"{self.exponent:0{fmt.exponent_bits}b}")
        parts.append(f"{self.fraction:0{fmt.mantissa_bits}b}" if fmt.mantissa_bits else "")
        return " ".join(filter(None, parts))

    def __repr__(self) -> str:
        if not math.isfinite(self.value):
            return f"{self}  {self.formula}"
        shown, exact = repr(self.value), Decimal(self.value)
        shown = shown if Decimal(shown) == exact else str(exact).lower()
        return f"{self}  {self.formula} = {shown}"

    @property
    def formula(self) -> str:
        """The value in terms of the fields: ``-2^-3 * (1 + 256/1024)``, or ``inf``."""
        if not math.isfinite(self.value):
            return str(self.value)
        minus = "-" if self.sign and math.copysign(1, self.value) < 0 else ""
        steps = 1 << self.format.mantissa_bits
        return f"{minus}2^{self.power} * ({self._leading} + {self.fraction}/{steps})"


@checked
def bits(x: AnyFloat, fmt: FormatSpec = "fp32") -> Bits:
    """Returns the sign, exponent and fraction fields of ``x`` rounded to a format.

    The number is rounded to nearest, ties to even. ``str`` of the result has the bits alone,
    ``repr`` also the formula and the value, with all its digits.

    Example:
        >>> bits(0.15625, "fp16")
        0 01100 0100000000  2^-3 * (1 + 256/1024) = 0.15625
        >>> bits(-2.0**-24, "fp16"), str(bits(float("inf"), "e5m2"))
        (1 00000 0000000001  -2^-14 * (0 + 1/1024) = -5.9604644775390625e-8, '0 11111 00')
    """
    fmt = format_(fmt)
    code, width = int(fmt.encode(x)), fmt.exponent_bits + fmt.mantissa_bits
    fraction = code & ((1 << fmt.mantissa_bits) - 1)
    exponent = (code & ((1 << width) - 1)) >> fmt.mantissa_bits
    return Bits(fmt, code, code >> width if fmt.signed else None, exponent, fraction)
