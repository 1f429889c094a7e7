"""``keep`` under ``rounds="every_op"``: computes and keeps exempt equations in another format."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import numpy as np

from .._jax import ShapedArray
from ..interpret import Applied, Argument, Boundary, Equation, State, Value
from ..primitives import Family
from ._every_op import EveryOp
from ._every_op_value import is_independent, widened
from ._overrides import FormatOverrides
from ._search import TOP
from ._value import Exponent, ScaledValue


@dataclasses.dataclass(frozen=True)
class Unrounded(EveryOp):
    """Applies the same rules to float32 data, which have an exponent but aren't rounded."""

    keeps_float32: ClassVar[bool] = True

    def _result(
        self,
        y: ScaledValue,
        equation: Equation,
        family: Family,
        common: Exponent | None,
        inputs: Sequence[Value],
    ) -> ScaledValue:
        if common is not None:
            y = dataclasses.replace(y, exponent=common)
        return y if y.constant_value is not None else self.rescaled(y)

    def rounded(self, x: ScaledValue, bound: int = TOP) -> ScaledValue:
        return x


@dataclasses.dataclass(frozen=True)
class EveryOpWithOverrides(EveryOp):
    """Rounds results to ``recipe.residuals``, except where ``recipe.keep`` names another format.

    An exempt equation's results are float32 with an exponent (or FP16, or BF16, as ``keep`` says).
    Arguments and constants are float32, too, until an equation that isn't exempt reads them and
    rounds them, once. A loop's carry and a branch's results are always in ``residuals``.
    """

    overrides: FormatOverrides = dataclasses.field(default_factory=lambda: FormatOverrides(()))

    @functools.cached_property
    def unrounded(self) -> EveryOp:
        plain = dataclasses.replace(self.recipe, keep=(), rescale="max", arithmetic="float32")
        return Unrounded(plain, self.record)

    def lift(self, x: Argument, aval: ShapedArray) -> ScaledValue:
        return self.unrounded.lift(x, aval)

    def constant(self, x: np.ndarray, aval: ShapedArray) -> ScaledValue:
        return self.unrounded.constant(x, aval)

    def canonical(
        self, value: Value, aval: ShapedArray, boundary: Boundary, equation: Equation
    ) -> ScaledValue:
        return super().canonical(_stored(value, self), aval, boundary, equation)

    def select(
        self, predicate: jax.Array, on_true: ScaledValue, on_false: ScaledValue
    ) -> ScaledValue:
        return super().select(predicate, _stored(on_true, self), _stored(on_false, self))

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        fmt = self.overrides.find(equation, self.fmt)
        if fmt is None:
            plain = [widened(x) if isinstance(x, ScaledValue) else x for x in inputs]
            return self.unrounded.apply(state, equation, plain)
        if fmt == self.fmt:
            return super().apply(state, equation, [_stored(x, self) for x in inputs])
        other = EveryOp(dataclasses.replace(self.recipe, keep=(), residuals=fmt), self.record)
        return other.apply(state, equation, [_stored(x, other) for x in inputs])


def _stored(x: Value, by: EveryOp) -> Value:
    """Returns a value in the format of another interpretation, rounded only once."""
    if not isinstance(x, ScaledValue) or x.data.dtype == by.dtype:
        return x
    if x.constant_value is None and is_independent(x):  # rounded when it meets a dependent value
        return x
    if by.dtype not in x.memo.changed:
        known = x.constant_value is not None
        x.memo.changed[by.dtype] = by.rounded(x) if known else by.lifted(widened(x))
    return x.memo.changed[by.dtype]
