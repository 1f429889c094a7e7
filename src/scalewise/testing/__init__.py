"""Comparisons for the unit tests of operators: errors in units of a format's last place."""

from ._close import ULPS as ULPS
from ._close import assert_allclose as assert_allclose
from ._close import ulps_between as ulps_between

globals()["__all__"] = [name for name in dir() if not name.startswith("_")]  # help() lists them
