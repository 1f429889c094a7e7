"""How a device's matrix units multiply numbers of two formats."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from ..formats import BLOCK_FORMATS, CATALOGUE, BlockFormat, Format
from ._table import Device


@dataclasses.dataclass(frozen=True)
class Units:
    """The formats in which a unit takes two operands.

    Attributes:
        formats: of the operands as the unit takes them.
        shifts: for each, the power of two that its numbers are divided by first, exactly; the
            product is multiplied by both. 0 where the unit takes the operand's own format.
        rate: of the product, relative to 16-bit operands.
    """

    formats: tuple[Format | BlockFormat, Format | BlockFormat]
    shifts: tuple[int, int]
    rate: float


def units_for(a: Format | BlockFormat, b: Format | BlockFormat, device: Device) -> Units | None:
    """Returns how a device's matrix units multiply two formats; None if none of them does.

    A unit for a format with another bias is used too, if that format holds every number times one
    power of two: TPUs before TPU7x multiply E4M3FN as E4M3B11FNUZ. An infinity becomes NaN if that
    format has none.

    Example:
        >>> from scalewise.formats import E4M3FN
        >>> from scalewise.devices import device
        >>> found = units_for(E4M3FN, E4M3FN, device("v6e"))
        >>> found.formats[0].name, found.shifts
        ('e4m3b11fnuz', (4, 4))
    """
    if rate := device.rate(a, b):
        return Units((a, b), (0, 0), rate)
    if isinstance(a, BlockFormat) or isinstance(b, BlockFormat):
        return None
    for (first, second), rate in device.products:
        if first in CATALOGUE and second in CATALOGUE:
            formats = CATALOGUE[first], CATALOGUE[second]
            shifts = shift_to(a, formats[0]), shift_to(b, formats[1])
            if shifts[0] is not None and shifts[1] is not None:
                return Units(formats, (shifts[0], shifts[1]), rate)
    return None


def shift_to(fmt: Format, other: Format) -> int | None:
    """Returns the k for which ``other`` holds ``x / 2**k`` for each finite number x of ``fmt``.

    The difference of their biases, if they have the same fields; otherwise None.
    """
    if fmt.bias is None or other.bias is None:
        return None
    fields = [
        (f.bits, f.signed, f.exponent_bits, f.mantissa_bits, f.subnormals) for f in (fmt, other)
    ]
    k = other.bias - fmt.bias
    if fields[0] != fields[1] or fmt.max > other.max * Fraction(2) ** k:
        return None
    return k


def partners_of(fmt: Format | BlockFormat, device: Device) -> dict[str, float]:
    """Returns the formats that a device's units multiply with one, and the rates."""
    known = BLOCK_FORMATS if isinstance(fmt, BlockFormat) else CATALOGUE
    found = {name: units_for(fmt, other, device) for name, other in known.items()}
    return {name: units.rate for name, units in found.items() if units is not None}


def best_units(fmt: Format | BlockFormat, device: Device) -> Units | None:
    """Returns units for two operands of a format, else the fastest for it and another format."""
    if own := units_for(fmt, fmt, device):
        return own
    partners = partners_of(fmt, device)
    known = BLOCK_FORMATS if isinstance(fmt, BlockFormat) else CATALOGUE
    other = max(partners, key=lambda name: partners[name], default=None)
    return None if other is None else units_for(fmt, known[other], device)
