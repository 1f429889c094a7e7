"""Runs any JAX function on (data, scale) pairs: the transformation, its recipes, stored states."""

from ..scaled import SqrtStored as SqrtStored
from ..scaled import Storage as Storage
from ..scalifying import RULES as RULES
from ..scalifying import Family as Family
from ..scalifying import register as register
from ..scalifying import rescale as rescale
from ..scalifying import rescale_gradient as rescale_gradient
from . import recipes as recipes
from ._autoscale import WithHistory as WithHistory
from ._autoscale import autoscale as autoscale
from ._explain import explain as explain
from ._narrow import quantize_params as quantize_params
from ._narrow import store as store
from ._operand_settings import Attention as Attention
from ._operand_settings import Operand as Operand
from ._operand_settings import Products as Products
from ._recipe import Recipe as Recipe

__all__ = ["RULES", "Family", "WithHistory", "register"]

# the classes of results and types, for annotations
from ._explain import Explanation as Explanation
from ._history import AmaxHistory as AmaxHistory
from ._recipe import KeepLike as KeepLike
from ._recipe import RecipeLike as RecipeLike
from ._recipe import RecipeName as RecipeName

_DOCUMENTED = dir()  # the reference has these names

# for other packages of scalewise, not for users
from ._autoscale import warn_of_second as warn_of_second
from ._boundaries import Boundaries as Boundaries
from ._boundaries import interpretation as interpretation
from ._history import OperandAmaxes as OperandAmaxes
from ._operand_settings import Role as Role
from ._operand_settings import operand_format as operand_format
from ._operands import Operands as Operands
from ._predict import between_activations as between_activations
from ._residuals import load as load
from ._sending import as_bits as as_bits
from ._sending import narrow_over as narrow_over
from ._setup import Setup as Setup
