"""Scaled arrays: data times a scale, operations on them, the strategies that choose the scale."""

from . import scaled_tree as scaled_tree
from ._array import ScaledArray as ScaledArray
from ._array import dequantize as dequantize
from ._array import rebalance as rebalance
from ._convert import as_scaled as as_scaled
from ._convert import asarray as asarray
from ._convert import dynamic_rescale as dynamic_rescale
from ._kv_cache import KVCache as KVCache
from ._operations import abs as abs
from ._operations import add as add
from ._operations import cast_data as cast_data
from ._operations import clip as clip
from ._operations import concatenate as concatenate
from ._operations import cos as cos
from ._operations import div as div
from ._operations import erf as erf
from ._operations import exp as exp
from ._operations import gelu as gelu
from ._operations import integer_pow as integer_pow
from ._operations import log as log
from ._operations import maximum as maximum
from ._operations import minimum as minimum
from ._operations import mul as mul
from ._operations import neg as neg
from ._operations import relu as relu
from ._operations import rsqrt as rsqrt
from ._operations import sigmoid as sigmoid
from ._operations import sin as sin
from ._operations import sqrt as sqrt
from ._operations import square as square
from ._operations import sub as sub
from ._operations import tanh as tanh
from ._operations import where as where
from ._quantize import quantize as quantize
from ._rules import RULES as RULES
from ._safetensors import load_safetensors as load_safetensors
from ._safetensors import save_safetensors as save_safetensors
from ._scaling import Amax as Amax
from ._scaling import Delayed as Delayed
from ._scaling import Fixed as Fixed
from ._scaling import FourOverSix as FourOverSix
from ._scaling import LeastSquares as LeastSquares
from ._scaling import MsEden as MsEden
from ._scaling import Mx as Mx
from ._scaling import Quest as Quest
from ._scaling import Unit as Unit
from ._scaling import find_optimal_scaling as find_optimal_scaling
from ._stored import SqrtStored as SqrtStored
from ._stored import Storage as Storage
from ._sums import conv as conv
from ._sums import cumsum as cumsum
from ._sums import dot_general as dot_general
from ._sums import log_softmax as log_softmax
from ._sums import matmul as matmul
from ._sums import max as max
from ._sums import mean as mean
from ._sums import min as min
from ._sums import softmax as softmax
from ._sums import sum as sum
from .scaled_tree import is_scaled as is_scaled

__all__ = [
    "RULES", "abs", "add", "as_scaled", "asarray", "cast_data", "clip", "concatenate", "conv",
    "cos", "cumsum", "div", "dot_general", "dynamic_rescale", "erf", "exp", "find_optimal_scaling",
    "gelu", "integer_pow", "is_scaled", "load_safetensors", "log", "log_softmax", "matmul", "max",
    "maximum", "mean", "min", "minimum", "mul", "neg", "relu", "rsqrt", "save_safetensors",
    "scaled_tree", "sigmoid", "sin", "softmax", "sqrt", "square", "sub", "sum", "tanh", "where",
]  # fmt: skip

# tables
from ._rules import ScaleRule as ScaleRule
from ._scaling import SCALINGS as SCALINGS
from ._scaling import Scaling as Scaling

_DOCUMENTED = dir()  # the reference has these names

# for other packages of scalewise, not for users
from ._amax import amax as amax
from ._amax import amax_by_keys as amax_by_keys
from ._amax import at_least as at_least
from ._amax import is_known as is_known
from ._amax import predicted_size as predicted_size
from ._amax import to_top as to_top
from ._array import wide_value as wide_value
from ._blocks import in_range as in_range
from ._blocks import merge_blocks as merge_blocks
from ._blocks import nan_scales as nan_scales
from ._blocks import over_scales as over_scales
from ._blocks import over_tiles as over_tiles
from ._blocks import round_in_blocks as round_in_blocks
from ._blocks import rounds_in_blocks as rounds_in_blocks
from ._blocks import scales_of as scales_of
from ._blocks import split_blocks as split_blocks
from ._blocks import tensor_scale_of as tensor_scale_of
from ._blocks import usable as usable
from ._convert import scaled_down as scaled_down
from ._power import HIGHEST as HIGHEST
from ._power import LOWEST as LOWEST
from ._power import ZERO_EXPONENT as ZERO_EXPONENT
from ._power import exponent_of as exponent_of
from ._power import layout as layout
from ._power import ldexp as ldexp
from ._power import power_of_two as power_of_two
from ._power import quotient as quotient
from ._power import split_power as split_power
from ._quantize import quantize_measured as quantize_measured
from ._quantize import storable as storable
from ._rules import EXPONENTS as EXPONENTS
from ._rules import INVERSE_ROOT as INVERSE_ROOT
from ._rules import KEPT as KEPT
from ._rules import LARGER as LARGER
from ._rules import POWER as POWER
from ._rules import ROOT as ROOT
from ._rules import UNSCALED as UNSCALED
from ._rules import combined as combined
from ._rules import static_scale as static_scale
from ._safetensors import DTYPES as DTYPES
from ._safetensors import NAMES as NAMES
from ._safetensors import header_of as header_of
from ._safetensors import join_parts as join_parts
from ._safetensors import parts_of as parts_of
from ._scaling import Axes as Axes
from ._scaling import Scales as Scales
from ._scaling import shown as shown
from ._stored import State as State
from ._stored import is_stored as is_stored
from ._stored import storage_of as storage_of
from ._stored import store_array as store_array
