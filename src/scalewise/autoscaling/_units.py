"""The matrix units of a product, and warnings and errors where a device has none for it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from ..devices import Device, Units, units_for
from ..formats import BlockFormat, Format
from ..interpret import Equation

Operands = Sequence[Format | BlockFormat | None]
GROUPED = ("ragged_dot", "ragged_dot_general")


def is_narrow_pair(formats: Operands) -> bool:
    return all(isinstance(f, BlockFormat) or (f is not None and f.bits < 16) for f in formats)


def require_native(pairs: Sequence[Operands], device: Device | None) -> None:
    if device is None:
        raise ValueError("Recipe.native_products needs to know the units: name a Recipe.device")
    for pair in pairs:
        a, b = pair
        if is_narrow_pair(pair) and units_for(a, b, device) is None:  # pyright: ignore
            raise ValueError(
                f"Recipe.native_products: {_text(pair)} isn't multiplied by the matrix units of "
                f"{device.name}, which multiply {', '.join(device.pairs)}"
            )


def units_of(
    equation: Equation, a: Format | BlockFormat, b: Format | BlockFormat, device: Device
) -> Units | None:
    """Returns the units that multiply two operands as they are; None if XLA doesn't let them.

    XLA expands a grouped product to a dense one on a GPU. Convolutions take 16 bits at least.
    """
    blocks = isinstance(a, BlockFormat) or isinstance(b, BlockFormat)
    grouped = equation.name in GROUPED and not blocks and device.platform == "cuda"
    return units_for(a, b, device) if equation.name == "dot_general" or grouped else None


class MissingUnits:
    """Warns, once for each pair of formats, that products are computed wide for lack of units."""

    def __init__(self):
        self.pairs: set[str] = set()

    def check(self, equation: Equation, formats: Operands, device: Device | None) -> None:
        a, b = formats
        if device is None or device.platform == "cpu" or not is_narrow_pair(formats):
            return
        assert a is not None
        assert b is not None
        if units_of(equation, a, b, device) is not None:
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


def _text(formats: Operands) -> str:
    return " x ".join(sorted(f.name for f in formats if f is not None))
