"""The values of ``Recipe.results``, and how they are rounded and get or propagate scales."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..formats import Format
from ..interpret import Equation, Value, is_float, outlined
from ..primitives import Family, having, names
from ..scaled import predicted_size, static_scale
from ._align import MASK, TOP, bound_of, is_rescale, rescaled, rounded, zeros_exponent
from ._families import propagated_power
from ._predict import terms_of
from ._recipe import Results
from ._rules import FALLBACK, RULES, Rule
from ._value import Exponent, Memo, ScaledValue

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
    results: Results,
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
        bound_aligned(results, x) if family is Family.ALIGNED else bound_of_data(x) for x in floats
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
    if results.rescale is not None:
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


def constant_limit(results: Results) -> int:
    return 14 if results.rescale == "max" else 7


def bound_aligned(results: Results, x: ScaledValue) -> int:
    if not x.constant_value or not math.isfinite(x.constant_value):
        return bound_of_data(x) if x.constant_value is None else 0
    return TOP if abs(x.constant_value) >= 2.0**MASK else constant_limit(results)


# Families whose results need the format's whole range (of aligned operands, one may be a mask).
FULL_RANGE = (Family.FALLBACK, Family.POWER, Family.ALIGNED)
# Primitives whose rules find the exponent of their result from data.
PACKED = having("packed")
READ_DATA = names(lambda row: row.family is Family.CONTRACTIVE) | {"reduce_prod"}


def propagating_rule(name: str) -> Rule:
    if name == "integer_pow":
        return Rule(Family.POWER, propagated_power)
    return FALLBACK if name in READ_DATA else RULES[name]


def static_exponent(equation: Equation) -> int:
    """Returns log2 of the static scale of a sum: sqrt(n), rounded, for n terms; else 0."""
    if equation.name in ("dot_general", "conv_general_dilated"):
        terms = terms_of(equation)
    elif equation.name == "reduce_sum":
        whole, rest = equation.in_avals[0].shape, equation.out_avals[0].shape
        terms = predicted_size(whole) // predicted_size(rest)
    else:
        return 0
    return math.frexp(static_scale(terms))[1] - 1


@dataclasses.dataclass(frozen=True)
class ResultRounding:
    results: Results
    keeps_float32: bool = False

    @property
    def fmt(self) -> Format:
        return self.results.format

    @property
    def dtype(self) -> np.dtype:
        assert self.fmt.dtype is not None
        return self.fmt.dtype

    @property
    def propagates(self) -> bool:
        """Whether scales follow from operands' scales and from shapes alone, never from data."""
        return self.results.rescale == "never"

    def lifted(self, x: ScaledValue) -> ScaledValue:
        return self.clipped(x) if self.propagates else self.rescaled(x, full_range=True)

    def result(
        self,
        y: ScaledValue,
        equation: Equation,
        family: Family,
        common: Exponent | None,
        inputs: Sequence[Value],
    ) -> ScaledValue:
        optimizer = equation.direction == "update"
        if common is not None:
            y = ScaledValue(
                y.data, common, constant_value=y.constant_value if self.keeps_float32 else None
            )
        if self.keeps_float32:
            return y if y.constant_value is not None else self.rescaled(y)
        if equation.name in PACKED:
            if not self.propagates:
                y = dataclasses.replace(self, keeps_float32=True).rescaled(y)
            return EveryOpValue(y.data, y.exponent, y.origin, packed=True)
        if is_rescale(equation):
            return self.rescaled(y)
        if self.propagates:
            static = static_exponent(equation)
            data = y.data * y.data.dtype.type(2.0**-static) if static else y.data
            return self.clipped(dataclasses.replace(y, data=data, exponent=y.exponent + static))
        floats = [x for x in inputs if isinstance(x, ScaledValue)]
        if family in (Family.STRUCTURAL, Family.ORDERED) or y.constant_value is not None:
            return self.rounded(y, max(map(bound_of_data, floats)))
        constant = any(x.constant_value is not None for x in floats)
        if equation.name == "div" and is_nonzero_constant(floats[1]) and not optimizer:
            half = y.data.dtype.type(0.5)  # the constant's data lie above 1/2
            y = ScaledValue(y.data * half, y.exponent + 1)
        bound = propagated_bound(self.results, equation, family, floats, constant)
        if bound is None or bound > TOP:
            return self.rescaled(y, full_range=optimizer or family in FULL_RANGE)
        if family is Family.POWER:
            y = dataclasses.replace(y, exponent=zeros_exponent(y.exponent))
        return self.rounded(y, bound)

    def rounded(self, x: ScaledValue, bound: int = TOP) -> ScaledValue:
        """Returns the value rounded once; finite data, below ``2**bound``, stay finite."""
        if self.keeps_float32:
            return x
        data = x.data
        if data.dtype != self.dtype:
            (data,) = outlined(rounded, (self.fmt, bound > TOP), data.astype(jnp.float32))
        return EveryOpValue(data, x.exponent, x.origin, x.constant_value, bound=min(bound, TOP))

    def clipped(self, x: ScaledValue) -> ScaledValue:
        """Returns the value rounded at its scale; data beyond the format's largest saturate."""
        return self.rounded(x, TOP + 1)

    def rescaled(self, x: ScaledValue, *, full_range: bool = False) -> ScaledValue:
        measure = self._measure(full_range)
        exponent = jnp.asarray(x.exponent, jnp.int32)
        options = (measure, self.fmt, not self.keeps_float32)
        data, exponent = outlined(rescaled, options, x.data, exponent)
        bound = TOP if self.keeps_float32 else min(bound_of(measure, data.size), TOP)
        y = EveryOpValue(data, exponent, x.origin, bound=bound)
        y.memo.measure = measure
        return y

    def _measure(self, full_range: bool) -> str:
        # propagated scales assume data of unit size
        if self.results.rescale is None and full_range and self.results.arithmetic == "float32":
            return "max"
        return "l2" if self.propagates else self.results.rescale or "l2"
