"""Warnings and errors where a device's matrix units don't multiply a recipe's formats."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from ..devices import Device, units_for
from ..formats import BlockFormat, Format
from ..interpret import Equation

Operands = Sequence[Format | BlockFormat | None]


def is_narrow_pair(formats: Operands) -> bool:
    """Returns whether both formats have fewer than 16 bits: a device may lack units for them."""
    return all(isinstance(f, BlockFormat) or (f is not None and f.bits < 16) for f in formats)


def require_native(pairs: Sequence[Operands], device: Device | None) -> None:
    """Raises ValueError unless a device's units multiply pairs of narrow formats.

    Args:
        pairs: the formats of the operands of each product; None for an operand in flight.
        device: whose units; None if unknown.
    """
    if device is None:
        raise ValueError("Recipe.native_products needs to know the units: name a Recipe.device")
    for pair in pairs:
        if is_narrow_pair(pair) and not _multiplies(device, pair):
            raise ValueError(
                f"Recipe.native_products: {_text(pair)} isn't multiplied by the matrix units of "
                f"{device.name}, which multiply {', '.join(device.pairs)}"
            )


class MissingUnits:
    """Warns, once for each pair of formats, that products are computed wide for lack of units."""

    def __init__(self):
        self.pairs: set[str] = set()

    def check(self, equation: Equation, formats: Operands, device: Device | None) -> None:
        """Warns if a known device, but no CPU, has no units for a contraction of two formats."""
        if device is None or device.platform == "cpu" or not is_narrow_pair(formats):
            return
        if equation.name == "dot_general" and _multiplies(device, formats):
            return
        what = _text(formats)
        if equation.name != "dot_general":
            what = f"{what} in {equation.name}"
        if what not in self.pairs:
            self.pairs.add(what)
            warnings.warn(
                f"autoscale: {equation.where()}: {device.name} has no matrix units for {what}: "
                'such products are computed in 16 bits from here on. "scalewise formats --device '
                f'{device.name}" lists those that it has.',
                UserWarning,
                stacklevel=2,
            )


def _multiplies(device: Device, formats: Operands) -> bool:
    a, b = (f for f in formats if f is not None)
    return units_for(a, b, device) is not None


def _text(formats: Operands) -> str:
    return " x ".join(sorted(f.name for f in formats if f is not None))
