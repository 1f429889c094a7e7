"""The values of ``store="every_op"``, and what is known of their data before they are computed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..interpret import Equation, is_float
from ._align import MASK
from ._search import TOP
from ._value import ScaledValue


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class EveryOpValue(ScaledValue):
    """A value of :class:`EveryOp`.

    Attributes:
        bound: log2 of the largest magnitude that finite data can have.
        independent: whether it depends on no float argument, but on constants, integers and random
            bits alone. Its data are then in the compute dtype, its exponent is 0.
    """

    bound: int = TOP
    independent: bool = False

    def tree_flatten(self):
        static = (self.origin, self.constant_value, self.log2_std, self.bound, self.independent)
        if isinstance(self.exponent, int):
            return (self.data,), (self.exponent, *static)
        return (self.data, self.exponent), (None, *static)

    @classmethod
    def tree_unflatten(cls, static, children):
        exponent, origin, constant_value, log2_std, bound, independent = static
        data, *rest = children
        exponent = rest[0] if rest else exponent
        return cls(
            data, exponent, origin, constant_value, log2_std, bound=bound, independent=independent
        )


def is_independent(x: Any) -> bool:
    """Returns whether a value depends on no float argument."""
    return x.constant_value is not None or (isinstance(x, EveryOpValue) and x.independent)


def bound_of_data(x: ScaledValue) -> int:
    """Returns log2 of the largest finite data; a constant's are between 1/2 and 1."""
    if x.constant_value is not None:
        return 0
    return x.bound if isinstance(x, EveryOpValue) else TOP


def is_nonzero_constant(x: ScaledValue) -> bool:
    return bool(x.constant_value) and math.isfinite(x.constant_value or 0)


def may_bound(x: ScaledValue) -> bool:
    """Returns whether an operand is made of constants, unless it is zero or stands for an
    infinity."""
    if x.constant_value is None:
        return is_independent(x)
    return is_nonzero_constant(x) and abs(x.constant_value) < 2.0**MASK


def widest_dtype(equation: Equation) -> Any:
    """Returns float64 if a float operand or result of the equation is float64, otherwise
    float32."""
    own = [a.dtype for a in equation.in_avals + equation.out_avals if is_float(a)]
    return jnp.float64 if np.dtype("float64") in own else jnp.float32


def widened(x: ScaledValue, dtype: DTypeLike = jnp.float32) -> ScaledValue:
    """Returns the value with its data in a compute dtype."""
    return dataclasses.replace(x, data=x.data.astype(dtype), memo={})
