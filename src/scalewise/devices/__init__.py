"""Devices: which operands their matrix units multiply, and which of them computes a program."""

from ._matrix_units import UNITS as UNITS
from ._matrix_units import MatrixUnit as MatrixUnit
from ._matrix_units import MatrixUnits as MatrixUnits
from ._matrix_units import matrix_unit as matrix_unit
from ._matrix_units import matrix_units as matrix_units
from ._table import DEVICES as DEVICES
from ._table import device as device
from ._table import present as present

__all__ = [
    "DEVICES", "UNITS", "MatrixUnit", "MatrixUnits", "device", "matrix_unit", "matrix_units",
    "present",
]  # fmt: skip

# the classes of results, for annotations
from ._table import Device as Device

_DOCUMENTED = dir()  # the reference has these names

# for other packages of scalewise, not for users
from ._matrix_units import MatrixUnitsLike as MatrixUnitsLike
from ._table import Units as Units
from ._table import best_units as best_units
from ._table import device_for as device_for
from ._table import partners_of as partners_of
from ._table import units_for as units_for
