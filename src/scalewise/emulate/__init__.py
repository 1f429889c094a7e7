"""Emulation: every result rounded to a format, exactly as a machine of that format would."""

from ._emulate import emulate as emulate
from ._emulation import EXACT as EXACT
from ._emulation import Emulation as Emulation
