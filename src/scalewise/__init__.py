"""Low-precision arithmetic for JAX: what a narrow float format does to a program, and the cure."""

from . import formats as formats
from . import ops as ops
from .autocast import Policy as Policy
from .autocast import autocast as autocast
from .autoscale import Recipe as Recipe
from .autoscale import Rooted as Rooted
from .autoscale import Storage as Storage
from .autoscale import autoscale as autoscale
from .autoscale import recipes as recipes
from .autoscale import store as store
from .emulate import emulate as emulate
from .formats import Format as Format
from .formats import format as format
from .rounding import cast as cast
from .rounding import round_to as round_to
from .scaled import Amax as Amax
from .scaled import Delayed as Delayed
from .scaled import LeastSquares as LeastSquares
from .scaled import Mx as Mx
from .scaled import Propagated as Propagated
from .scaled import Rms as Rms
from .scaled import ScaledArray as ScaledArray
from .scaled import Unit as Unit
from .scaled import dequantize as dequantize
from .scaled import quantize as quantize
from .scaled import rebalance as rebalance
