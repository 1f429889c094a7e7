"""The values of ``rounds="every_op"``, and what is known of their data before they are computed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..interpret import Equation, is_float
from ..primitives import Family, having, names
from ._align import MASK
from ._recipe import Recipe
from ._rescale import TOP
from ._value import Memo, ScaledValue

# Operations whose results are numbers of the format if their operand's elements are.
EXACT = having("exact") & names(lambda row: row.family is Family.HOMOGENEOUS)
KEEPS_SCALE = having("keeps_scale") | EXACT
# Operations among these whose results a constant may make much smaller than their operands.
BOUNDED = having("selects")
ADDS = having("adds")


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class EveryOpValue(ScaledValue):
    """A value of :class:`EveryOp`.

    Attributes:
        bound: log2 of the largest magnitude that finite data can have.
        independent: whether it depends on no float argument, but on constants, integers and random
            bits alone. Its data are then in the compute dtype, its exponent is 0.
        packed: whether it holds matrices of several magnitudes, which no scale fits. Its data are
            then in the compute dtype.
    """

    STATIC: ClassVar = ("origin", "constant_value", "log2_std", "bound", "independent", "packed")

    bound: int = TOP
    independent: bool = False
    packed: bool = False


def is_independent(x: ScaledValue) -> bool:
    return x.constant_value is not None or (isinstance(x, EveryOpValue) and x.independent)


def is_packed(x: ScaledValue) -> bool:
    return isinstance(x, EveryOpValue) and x.packed


def bound_of_data(x: ScaledValue) -> int:
    """Returns log2 of the largest finite data; a constant's are between 1/2 and 1."""
    if x.constant_value is not None:
        return 0
    return x.bound if isinstance(x, EveryOpValue) else TOP


def is_nonzero_constant(x: ScaledValue) -> bool:
    return bool(x.constant_value) and math.isfinite(x.constant_value or 0)


def may_bound(x: ScaledValue) -> bool:
    if x.constant_value is None:
        return is_independent(x)
    return is_nonzero_constant(x) and abs(x.constant_value) < 2.0**MASK


def widest_dtype(equation: Equation) -> DTypeLike:
    own = [a.dtype for a in equation.in_avals + equation.out_avals if is_float(a)]
    return jnp.float64 if np.dtype("float64") in own else jnp.float32


def widened(x: ScaledValue, dtype: DTypeLike = jnp.float32) -> ScaledValue:
    return dataclasses.replace(x, data=x.data.astype(dtype), memo=Memo())


def propagated_bound(
    recipe: Recipe,
    equation: Equation,
    family: Family,
    floats: Sequence[ScaledValue],
    constant: bool,
) -> int | None:
    """Returns log2 of a result's largest data; None if its scale is to be found from the data.

    Propagated scales suffice if the operands' sizes determine the result's: for a product, or
    the sum of two. Sums of many, products of matrices, quotients and functions without a rule
    are smaller than any bound by an unknown factor: a chain of such operations left data at a
    thousandth of unit size, and gradients were lost.
    """
    name = equation.name
    bounds = [
        bound_aligned(recipe, x) if family is Family.ALIGNED else bound_of_data(x) for x in floats
    ]
    if any(map(is_packed, floats)) or (name == "select_n" and not constant):
        return None  # the chosen elements determine its scale
    if name in BOUNDED and any(map(may_bound, floats)):
        return None  # clip(x, -1, 1) and where(ok, x, 1) lose 1 at a huge x's scale
    if name in KEEPS_SCALE:
        return max(bounds)
    if family is Family.INVARIANT:
        return 0
    if constant and name == "mul":
        return sum(bounds)
    if name == "div" and is_nonzero_constant(floats[1]) and equation.direction != "update":
        return bounds[0]
    if recipe.rescale is not None:
        return None
    match name:
        case "mul":
            return sum(bounds)
        case _ if name in ADDS:
            return max(bounds) + 1
        case "rem":
            return bounds[0]
        case "sqrt" | "cbrt":
            return max(bounds) // 2 + 2
    return None


def constant_limit(recipe: Recipe) -> int:
    return 14 if recipe.rescale == "max" else 7


def bound_aligned(recipe: Recipe, x: ScaledValue) -> int:
    if not x.constant_value or not math.isfinite(x.constant_value):
        return bound_of_data(x) if x.constant_value is None else 0
    return TOP if abs(x.constant_value) >= 2.0**MASK else constant_limit(recipe)
