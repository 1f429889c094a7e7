"""Scaled arrays: data times a scale, and the strategies that choose the scale."""

from ._amax import amax as amax
from ._array import ScaledArray as ScaledArray
from ._array import dequantize as dequantize
from ._array import rebalance as rebalance
from ._blocks import Mx as Mx
from ._power import exponent_of as exponent_of
from ._power import ldexp as ldexp
from ._power import power_of_two as power_of_two
from ._quantize import quantize as quantize
from ._quantize import quantize_measured as quantize_measured
from ._quantize import storable as storable
from ._safetensors import load_safetensors as load_safetensors
from ._safetensors import save_safetensors as save_safetensors
from ._scaling import Amax as Amax
from ._scaling import Delayed as Delayed
from ._scaling import LeastSquares as LeastSquares
from ._scaling import Propagated as Propagated
from ._scaling import Rms as Rms
from ._scaling import Unit as Unit
from ._scaling import to_top as to_top
from ._sizes import at_least as at_least
from ._sizes import is_known as is_known
from ._sizes import predicted_size as predicted_size
from ._strategy import SCALINGS as SCALINGS
from ._strategy import Scaling as Scaling
from ._strategy import check_scaling as check_scaling
