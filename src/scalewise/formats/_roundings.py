"""The table of rounding modes, with everything that other code needs to know about each mode.

A mode rounds magnitudes: it replaces each by the lower or the higher of the two neighbouring
numbers of a format. The table defines this choice twice: as a predicate of the position between the
neighbours (:attr:`Rounding.goes_up`) and as an integer to add before truncation
(:attr:`Rounding.addend`). Both use operators only, and so accept arrays of NumPy and of JAX.
Every field is required: no mode relies on a default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Rest:
    """The positions of magnitudes between their lower neighbour (inclusive) and their higher one.

    The attributes are boolean arrays of one shape.
    """

    nonzero: Any  # above the lower neighbour
    half: Any  # exactly halfway
    above_half: Any  # nearer to the higher neighbour
    drawn: Any = None  # whether stochastic rounding rounds it up; None for other modes


@dataclasses.dataclass(frozen=True)
class Rounding:
    """A rounding mode.

    ``goes_up(rest, odd, negative)`` returns whether a magnitude becomes the higher of its
    neighbours, given whether the lower neighbour's code is odd, and whether the number is negative.
    ``addend(dropped, odd, negative, noise)`` returns the integer to add to a magnitude before its d
    lowest bits are truncated, with the same result. ``dropped`` is ``2^d - 1``, ``odd`` is 0 or 1,
    ``negative`` has all bits set where the number is negative, and ``noise`` holds random bits.
    """

    name: str  # that users pass as ``rounding``
    overflows: tuple[bool, bool]  # whether positive, and negative, numbers do (IEEE 754-2019, 7.4)
    max_error: float  # in units of the spacing of the format's numbers
    underflows_to_zero: bool  # whether every magnitude that is small enough becomes zero
    random: bool  # whether the mode uses random bits
    goes_up: Callable[[Rest, Any, Any], Any]
    addend: Callable[[Any, Any, Any, Any], Any]

    def __reduce_ex__(self, protocol):  # pickled by name, since the functions have none
        known = ROUNDINGS.get(self.name) is self
        return (rounding_mode, (self.name,)) if known else super().__reduce_ex__(protocol)


# name, overflows, max_error, underflows_to_zero, random
_MODES = (
    Rounding(
        "nearest_even", (True, True), 0.5, True, False,
        goes_up=lambda rest, odd, negative: rest.above_half | (rest.half & odd),
        addend=lambda dropped, odd, negative, noise: (dropped >> 1) + (odd & dropped),
    ),
    Rounding(
        "nearest_away", (True, True), 0.5, True, False,
        goes_up=lambda rest, odd, negative: rest.above_half | rest.half,
        addend=lambda dropped, odd, negative, noise: dropped - (dropped >> 1),
    ),
    Rounding(
        "toward_zero", (False, False), 1.0, True, False,
        goes_up=lambda rest, odd, negative: rest.nonzero & ~rest.nonzero,
        addend=lambda dropped, odd, negative, noise: dropped ^ dropped,
    ),
    Rounding(
        "toward_positive", (True, False), 1.0, False, False,
        goes_up=lambda rest, odd, negative: rest.nonzero & ~negative,
        addend=lambda dropped, odd, negative, noise: dropped & ~negative,
    ),
    Rounding(
        "toward_negative", (False, True), 1.0, False, False,
        goes_up=lambda rest, odd, negative: rest.nonzero & negative,
        addend=lambda dropped, odd, negative, noise: dropped & negative,
    ),
    Rounding(
        "away_from_zero", (True, True), 1.0, False, False,
        goes_up=lambda rest, odd, negative: rest.nonzero,
        addend=lambda dropped, odd, negative, noise: dropped,
    ),
    # unsigned: 0 or all bits
    Rounding(
        "to_odd", (False, False), 1.0, False, False,
        goes_up=lambda rest, odd, negative: rest.nonzero & ~odd,
        addend=lambda dropped, odd, negative, noise: dropped & (odd - 1),
    ),
    Rounding(
        "stochastic", (True, True), 1.0, False, True,
        goes_up=lambda rest, odd, negative: rest.drawn,
        addend=lambda dropped, odd, negative, noise: noise & dropped,
    ),
)  # fmt: skip


ROUNDINGS: dict[str, Rounding] = {mode.name: mode for mode in _MODES}
"""Every rounding mode by its name."""

# ONNX's names for the roundings of a scale (E8M0); "nearest" rounds ties up.
SCALE_ROUNDINGS = {"up": "away_from_zero", "down": "toward_zero", "nearest": "nearest_away"}


def rounding_mode(rounding: Any, fmt: Any = None) -> Rounding:
    """Returns a :class:`Rounding` by name; a Rounding is returned as it is.

    ONNX's names ``"up"``, ``"down"``, ``"nearest"`` are for scale formats (without zero) alone.
    """
    if isinstance(rounding, Rounding):
        return rounding
    scale = {} if fmt is None or fmt.zero else SCALE_ROUNDINGS
    names = (*ROUNDINGS, *scale)
    if not isinstance(rounding, str) or rounding not in names:
        raise ValueError(f"rounding is {rounding!r}; expected one of {', '.join(map(repr, names))}")
    return ROUNDINGS[scale.get(rounding, rounding)]
