"""Numerically safe operations, and the arithmetic of a machine that has one float format."""

from . import functions as functions
from ._arithmetic import ORDERS as ORDERS
from ._arithmetic import Arithmetic as Arithmetic
from ._arithmetic import accumulate as accumulate
from ._auto import ulp_bound as ulp_bound
from ._contractions import Accumulator as Accumulator
from ._contractions import conv_general_dilated as conv_general_dilated
from ._contractions import dot_general as dot_general
from ._contractions import matmul as matmul
from ._methods import METHODS as _PUBLISHED
from ._methods import beta_high as beta_high
from ._methods import beta_low as beta_low
from ._norms import l2_norm as l2_norm
from ._norms import layer_norm as layer_norm
from ._norms import rms_norm as rms_norm
from ._reductions import cross_entropy as cross_entropy
from ._reductions import log_softmax as log_softmax
from ._reductions import logsumexp as logsumexp
from ._reductions import mean as mean
from ._reductions import softmax as softmax
from ._reductions import sum as sum
from ._reductions import var as var
from .functions import isinf_sign as isinf_sign

NORM_METHODS = ("auto", *_PUBLISHED)

__all__ = [
    "NORM_METHODS", "ORDERS", "Accumulator", "Arithmetic", "accumulate", "beta_high", "beta_low",
    "conv_general_dilated", "cross_entropy", "dot_general", "functions", "isinf_sign", "l2_norm",
    "layer_norm", "log_softmax", "logsumexp", "matmul", "mean", "rms_norm", "softmax", "sum",
    "ulp_bound", "var",
]  # fmt: skip

# for other packages of scalewise, not for users
from ._matrix_units import unit_product as unit_product
from ._operation import Cotangent as Cotangent
from ._operation import Tangent as Tangent
from ._operation import in_format as in_format
