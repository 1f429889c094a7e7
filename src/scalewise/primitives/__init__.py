"""The table of JAX's primitives, from which all interpretations read, and typed parameters."""

from . import params as params
from ._table import AUTOCAST as AUTOCAST
from ._table import FACTS as FACTS
from ._table import NANS as NANS
from ._table import POLES as POLES
from ._table import PRIMITIVES as PRIMITIVES
from ._table import Family as Family
from ._table import Primitive as Primitive
from ._table import having as having
from ._table import names as names
from .params import ParameterError as ParameterError
