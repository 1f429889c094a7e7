"""The table of JAX's primitives, from which all interpretations read, and typed parameters."""

from . import params as params
from ._row import AUTOCAST as AUTOCAST
from ._row import FACTS as FACTS
from ._row import NANS as NANS
from ._row import POLES as POLES
from ._row import PRIMITIVES as PRIMITIVES
from ._row import Family as Family
from ._row import Primitive as Primitive
from ._row import having as having
from ._row import names as names
from .params import ParameterError as ParameterError
