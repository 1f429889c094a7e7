"""Runs any JAX function on (data, scale) pairs: the transformation, its recipes, stored states."""

from ..primitives import Family as Family
from . import recipes as recipes
from ._autoscale import Schedule as Schedule
from ._autoscale import autoscale as autoscale
from ._delayed import WithHistory as WithHistory
from ._explain import explain as explain
from ._narrow import SqrtStored as SqrtStored
from ._narrow import quantize_params as quantize_params
from ._narrow import store as store
from ._operand_settings import Operand as Operand
from ._operand_settings import Products as Products
from ._recipe import Recipe as Recipe
from ._recipe import Results as Results
from ._recipe import Storage as Storage
from ._rescale import rescale as rescale
from ._rescale import rescale_gradient as rescale_gradient
from ._rules import RULES as RULES
from ._rules import register as register

__all__ = ["RULES", "Family", "WithHistory", "register"]

# the classes of results and types, for annotations
from ._explain import Explanation as Explanation
from ._history import AmaxHistory as AmaxHistory
from ._recipe import KeepLike as KeepLike
from ._recipe import RecipeLike as RecipeLike

_DOCUMENTED = dir()  # the reference has these names

# for other packages of scalewise, not for users
from ._autoscale import interpretation as interpretation
from ._boundaries import Boundaries as Boundaries
from ._every_op import EveryOp as EveryOp
from ._history import OperandAmaxes as OperandAmaxes
from ._narrow import is_stored as is_stored
from ._narrow import store_array as store_array
from ._operand_settings import Role as Role
from ._operand_settings import operand_format as operand_format
from ._operand_settings import shown as shown
from ._operands import Operands as Operands
from ._overrides import FormatOverrides as FormatOverrides
from ._overrides import Place as Place
from ._overrides import Places as Places
from ._overrides import Scope as Scope
from ._overrides import scope_parts as scope_parts
from ._predict import between_activations as between_activations
from ._residuals import load as load
from ._setup import Setup as Setup
from ._value import Memo as Memo
from ._value import ScaledValue as ScaledValue
from ._value import materialize as materialize
