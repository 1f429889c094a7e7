"""The rounding modes: one table that says everything each of them does.

A mode acts on magnitudes. Between two neighbouring numbers of a format it either keeps the lower
one or goes up to the higher one; the table gives that choice twice, as a predicate of the position
between the neighbours (:attr:`Rounding.goes_up`) and as an integer addition
(:attr:`Rounding.addend`). Both use operators alone, so they serve NumPy's arrays and JAX's alike.
Every field is required: there is no mode of which a part is left to a default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Rest:
    """Where a magnitude lies between the number below it (included) and the one above.

    Attributes are boolean arrays of one shape.

    Attributes:
        nonzero: above the lower number.
        half: exactly in the middle.
        above_half: nearer to the higher number.
        drawn: whether a stochastic rounding's random bits send it up; None without random bits.
    """

    nonzero: Any
    half: Any
    above_half: Any
    drawn: Any = None


@dataclasses.dataclass(frozen=True)
class Rounding:
    """A rounding mode.

    Attributes:
        name: as users write it.
        goes_up: ``goes_up(rest, odd, negative)``: whether a magnitude becomes the higher of its two
            neighbours, given its :class:`Rest`, whether the lower neighbour's code is odd, and
            whether the number is negative.
        addend: ``addend(dropped, odd, negative, noise)``: the integer to add to a magnitude before
            its low bits are cut off, which does the same. ``dropped`` is ``2^d - 1`` for d low
            bits, ``odd`` is 0 or 1, ``negative`` has all bits set where the number is negative,
            ``noise`` holds random bits, of which the lowest d count.
        overflows: whether a finite positive number, and whether a finite negative one, that is
            rounded beyond the largest leaves the finite numbers (IEEE 754-2019, 7.4).
        max_error: the bound on the error, in units of the spacing of the format's numbers.
        underflows_to_zero: whether every magnitude that is small enough becomes zero.
        random: whether it takes random bits.
    """

    name: str
    goes_up: Callable[[Rest, Any, Any], Any]
    addend: Callable[[Any, Any, Any, Any], Any]
    overflows: tuple[bool, bool]
    max_error: float
    underflows_to_zero: bool
    random: bool


_MODES = (
    Rounding(
        "nearest_even",
        goes_up=lambda rest, odd, negative: rest.above_half | (rest.half & odd),
        addend=lambda dropped, odd, negative, noise: (dropped >> 1) + (odd & dropped),
        overflows=(True, True),
        max_error=0.5,
        underflows_to_zero=True,
        random=False,
    ),
    Rounding(
        "nearest_away",
        goes_up=lambda rest, odd, negative: rest.above_half | rest.half,
        addend=lambda dropped, odd, negative, noise: dropped - (dropped >> 1),
        overflows=(True, True),
        max_error=0.5,
        underflows_to_zero=True,
        random=False,
    ),
    Rounding(
        "toward_zero",
        goes_up=lambda rest, odd, negative: rest.nonzero & ~rest.nonzero,
        addend=lambda dropped, odd, negative, noise: dropped ^ dropped,
        overflows=(False, False),
        max_error=1.0,
        underflows_to_zero=True,
        random=False,
    ),
    Rounding(
        "toward_positive",
        goes_up=lambda rest, odd, negative: rest.nonzero & ~negative,
        addend=lambda dropped, odd, negative, noise: dropped & ~negative,
        overflows=(True, False),
        max_error=1.0,
        underflows_to_zero=False,
        random=False,
    ),
    Rounding(
        "toward_negative",
        goes_up=lambda rest, odd, negative: rest.nonzero & negative,
        addend=lambda dropped, odd, negative, noise: dropped & negative,
        overflows=(False, True),
        max_error=1.0,
        underflows_to_zero=False,
        random=False,
    ),
    Rounding(
        "away_from_zero",
        goes_up=lambda rest, odd, negative: rest.nonzero,
        addend=lambda dropped, odd, negative, noise: dropped,
        overflows=(True, True),
        max_error=1.0,
        underflows_to_zero=False,
        random=False,
    ),
    Rounding(
        "to_odd",
        goes_up=lambda rest, odd, negative: rest.nonzero & ~odd,
        addend=lambda dropped, odd, negative, noise: dropped & (odd - 1),  # unsigned: 0 or all bits
        overflows=(False, False),
        max_error=1.0,
        underflows_to_zero=False,
        random=False,
    ),
    Rounding(
        "stochastic",
        goes_up=lambda rest, odd, negative: rest.drawn,
        addend=lambda dropped, odd, negative, noise: noise & dropped,
        overflows=(True, True),
        max_error=1.0,
        underflows_to_zero=False,
        random=True,
    ),
)

ROUNDINGS: dict[str, Rounding] = {mode.name: mode for mode in _MODES}
"""Every rounding mode by its name."""

# ONNX's names for the roundings of a scale (E8M0); its "nearest" sends ties up.
SCALE_ROUNDINGS = {"up": "away_from_zero", "down": "toward_zero", "nearest": "nearest_away"}


def rounding_mode(rounding: Any, fmt: Any = None) -> Rounding:
    """The :class:`Rounding` of a name; a Rounding is itself.

    Args:
        rounding: one of :data:`ROUNDINGS`, or for a format without zero, a scale, also one of
            ONNX's names ``"up"``, ``"down"``, ``"nearest"``.
        fmt: the ``Format`` to round to, if ONNX's names count.

    Raises:
        ValueError: there is no such rounding.
    """
    if isinstance(rounding, Rounding):
        return rounding
    scale = {} if fmt is None or fmt.zero else SCALE_ROUNDINGS
    names = (*ROUNDINGS, *scale)
    if not isinstance(rounding, str) or rounding not in names:
        raise ValueError(f"rounding is {rounding!r}; accepted: {', '.join(map(repr, names))}")
    return ROUNDINGS[scale.get(rounding, rounding)]


def check_rounding(fmt: Any, rounding: Any) -> str:
    """The mode's own name, as :func:`rounding_mode` finds it.

    Raises:
        ValueError: there is no such rounding.
    """
    return rounding_mode(rounding, fmt).name
