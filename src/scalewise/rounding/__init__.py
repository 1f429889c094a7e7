"""Rounding: float to the nearest value of a format, bit for bit, once."""

from ._round import cast as cast
from ._round import round_to as round_to
