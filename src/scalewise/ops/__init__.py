"""Numerically safe operations, and the arithmetic of a machine with one format to compute in."""

from ._arithmetic import Arithmetic as Arithmetic
from ._auto import ulp_bound as ulp_bound
from ._methods import METHODS as _PUBLISHED
from ._norms import l2_norm as l2_norm
from ._sums import ORDERS as ORDERS
from ._sums import accumulate as accumulate

METHODS = ("auto", *_PUBLISHED)
