"""Rounds results under ``rounds="every_op"``, and finds or propagates their scales."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ..formats import Format
from ..interpret import Equation, Value, outlined
from ..primitives import Family, having, names
from ..scaled import predicted_size, static_scale
from ._every_op_value import (
    EveryOpValue,
    bound_of_data,
    is_nonzero_constant,
    propagated_bound,
)
from ._families import propagated_power
from ._predict import terms_of
from ._recipe import Recipe
from ._rescale import TOP, bound_of, is_rescale, rescaled, rounded, zeros_exponent
from ._rules import FALLBACK, RULES, Rule
from ._value import Exponent, ScaledValue

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
    recipe: Recipe
    keeps_float32: bool = False

    @property
    def fmt(self) -> Format:
        assert self.recipe.residuals is not None
        return self.recipe.residuals

    @property
    def dtype(self) -> np.dtype:
        assert self.fmt.dtype is not None
        return self.fmt.dtype

    @property
    def propagates(self) -> bool:
        """Whether scales follow from operands' scales and from shapes alone, never from data."""
        return self.recipe.rescale == "never"

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
        bound = propagated_bound(self.recipe, equation, family, floats, constant)
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
        if self.recipe.rescale is None and full_range and self.recipe.arithmetic == "float32":
            return "max"
        return "l2" if self.propagates else self.recipe.rescale or "l2"
