"""Emulation: rounds every result to a format, exactly as a machine of that format would."""

from ._emulation import emulate as emulate

__all__ = []

# for other packages of scalewise, not for users
from ._emulation import EXACT as EXACT
from ._emulation import Constant as Constant
from ._emulation import Emulation as Emulation
from ._emulation import EmulationWithDraws as EmulationWithDraws
from ._emulation import OnDevice as OnDevice
from ._emulation import in_arithmetic as in_arithmetic
from ._emulation import is_exact as is_exact
from ._scatter import added_in_order as added_in_order
from ._scatter import rounds_each as rounds_each
