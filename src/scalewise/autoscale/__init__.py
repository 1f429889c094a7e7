"""Runs any JAX function on (data, scale) pairs: the transformation, its recipes, stored states."""

from .._callable import make_callable
from ..primitives import Family as Family
from . import recipes as recipes
from ._autoscale import autoscale as autoscale
from ._autoscale import interpretation as interpretation
from ._boundaries import Boundaries as Boundaries
from ._delayed import AmaxHistory as AmaxHistory
from ._delayed import WithHistory as WithHistory
from ._every_op import EveryOp as EveryOp
from ._explain import Explanation as Explanation
from ._explain import ExplanationRow as ExplanationRow
from ._explain import explain as explain
from ._narrow import SqrtStored as SqrtStored
from ._narrow import is_stored as is_stored
from ._narrow import store as store
from ._narrow import store_array as store_array
from ._operand_settings import Operand as Operand
from ._operand_settings import Products as Products
from ._overrides import FormatOverrides as FormatOverrides
from ._overrides import scope_parts as scope_parts
from ._recipe import Recipe as Recipe
from ._recipe import Storage as Storage
from ._rescale import rescale as rescale
from ._rescale import rescale_gradient as rescale_gradient
from ._rules import RULES as RULES
from ._schedule import Schedule as Schedule

make_callable(__name__)
