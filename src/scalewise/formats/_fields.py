"""The bits of a number in a format: sign, exponent field and fraction field."""

from __future__ import annotations

import dataclasses
import math

from .._check import AnyFloat, checked
from ._format import Format
from ._neighbours import FormatSpec
from ._neighbours import format_ as named


@dataclasses.dataclass(frozen=True, repr=False)
class Bits:
    """The fields of one code of a format, as :func:`bits` returns them.

    Attributes:
        format: the format.
        code: the code, an integer from 0 to ``2**format.bits - 1``.
        sign: the sign bit, 0 or 1; None in an unsigned format.
        exponent: the exponent field as stored, with the bias.
        fraction: the fraction field as stored, from 0 to ``2**format.mantissa_bits - 1``.
    """

    format: Format
    code: int
    sign: int | None
    exponent: int
    fraction: int

    @property
    def value(self) -> float:
        """The number that the code stands for; it may be an infinity or NaN."""
        return float(self.format.decode(self.code))

    @property
    def power(self) -> int:
        """The power of two that the significand is multiplied by."""
        assert self.format.bias is not None
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
        equals = f" = {self.value!r}" if math.isfinite(self.value) else ""
        return f"{self}  {self.formula}{equals}"

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

    Args:
        x: any number; it is rounded to nearest, ties to even, if the format doesn't have it.
        fmt: any format, or a name or dtype of one.

    Returns:
        A :class:`Bits`; ``str`` of it has the bits alone, ``repr`` also the formula and the value.

    Raises:
        ValueError: an unknown format.

    Example:
        >>> bits(0.15625, "fp16")
        0 01100 0100000000  2^-3 * (1 + 256/1024) = 0.15625
        >>> bits(-2.0**-24, "fp16"), str(bits(float("inf"), "e5m2"))
        (1 00000 0000000001  -2^-14 * (0 + 1/1024) = -5.960464477539063e-08, '0 11111 00')
    """
    fmt = named(fmt)
    return fields_of(fmt, int(fmt.encode(x)))


def fields_of(fmt: Format, code: int) -> Bits:
    width = fmt.exponent_bits + fmt.mantissa_bits
    fraction = code & ((1 << fmt.mantissa_bits) - 1)
    exponent = (code & ((1 << width) - 1)) >> fmt.mantissa_bits
    return Bits(fmt, code, code >> width if fmt.signed else None, exponent, fraction)
