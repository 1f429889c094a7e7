"""Emulation: every result rounded to a format, exactly as a machine of that format would."""

from ._emulate import EXACT as EXACT
from ._emulate import Emulation as Emulation
from ._emulate import emulate as emulate
