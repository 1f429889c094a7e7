"""Numerically safe operations, and the arithmetic of a machine with one format to compute in."""

from . import functions as functions
from ._arithmetic import Arithmetic as Arithmetic
from ._auto import ulp_bound as ulp_bound
from ._methods import METHODS as _PUBLISHED
from ._norms import l2_norm as l2_norm
from ._sums import ORDERS as ORDERS
from ._sums import accumulate as accumulate
from ._tables import CastErrors as CastErrors
from ._tables import FunctionErrors as FunctionErrors
from ._tables import cast_table as cast_table
from ._tables import function_table as function_table
from .functions import isinf_sign as isinf_sign

METHODS = ("auto", *_PUBLISHED)
