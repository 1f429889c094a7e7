"""Comparisons for the unit tests of operators: errors in units of a format's last place."""

from ._close import assert_allclose as assert_allclose
from ._close import ulps_between as ulps_between

__all__ = ["assert_allclose", "ulps_between"]

# the default tolerances
from ._close import ULPS as ULPS
