"""The base of interpretations on (data, scale) pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import type_like
from .._types import PyTree
from ..interpret import (
    COMPLEX,
    CONTRACTIONS,
    Applied,
    Argument,
    Equation,
    Interpretation,
    State,
    Value,
)
from ..primitives import Family, names
from ..rounding import EncodedArray
from ..scaled import ScaledArray, SqrtStored, is_stored
from ._overrides import FormatOverrides
from ._rules import CONTRACTS, Flight, PrimitiveRule, contraction_of
from ._value import ScaledValue

SPARSE = names(lambda row: row.family is Family.SPARSE)


class PairInterpretation(Interpretation):
    """An interpretation on (data, scale) pairs. Arguments may be stored arrays."""

    NARROW: ClassVar = CONTRACTIONS  # these round their operands, unless they are complex
    overrides: FormatOverrides

    def opens(self, equation: Equation) -> bool:
        return True

    def unlifted(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        if equation.of_complex and equation.name in self.NARROW:
            self.overrides.warn(equation, COMPLEX)
        return super().unlifted(state, equation, inputs)

    def is_argument(self, leaf: object) -> bool:
        return is_stored(leaf)

    def abstract(self, leaf: Argument) -> Argument:
        if not is_stored(leaf):
            return leaf
        data = leaf.root.data if isinstance(leaf, SqrtStored) else leaf.data
        # if no dtype is stated, results of a quantized array have that of the other operands
        unstated = isinstance(leaf, ScaledArray) and leaf.value_dtype is None
        weak = unstated and is_quantized(leaf)
        return type_like(leaf.shape, leaf.dtype, data, weak=weak)

    def tangent(self, argument: Argument, tangent: PyTree) -> jax.Array:
        if not is_stored(argument):
            return tangent
        return jax.jvp(lambda a: a.value(), (argument,), (tangent,))[1]

    def by_rule(
        self,
        rule: PrimitiveRule,
        flight: Flight,
        multiply: Callable[[Equation, Sequence[ScaledValue]], Value],
        equation: Equation,
        inputs: Sequence[Value],
    ) -> list[Value]:
        """Returns an equation's results by its rule; those of contractions by ``multiply``."""
        if equation.name in SPARSE:
            what = "has no rule: the operands of a sparse product stay in float32."
            self.overrides.warn(equation, what)
        found = contraction_of(equation, inputs) if equation.name in CONTRACTS else None
        if found is None:
            return rule.rule(flight, equation, inputs)
        product = multiply(found.equation, found.values)
        return [product if found.finish is None else found.finish(product)]


def is_quantized(x: object) -> bool:
    """Returns whether a ScaledArray has axes, and at most 8 bits."""
    if not isinstance(x, ScaledArray) or not x.ndim:
        return False
    if isinstance(x.data, EncodedArray):
        return x.data.format.bits <= 8
    return jnp.issubdtype(x.data.dtype, jnp.floating) and np.dtype(x.data.dtype).itemsize == 1
