"""Comparisons for the unit tests of operators: errors in units of a format's last place."""

from .._public import own_names
from ._close import assert_allclose as assert_allclose
from ._close import ulps_between as ulps_between

globals()["__all__"] = own_names(dir())  # help() lists them

# the default tolerances
from ._close import ULPS as ULPS
