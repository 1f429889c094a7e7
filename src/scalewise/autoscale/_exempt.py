"""``keep`` under ``store="every_op"``: what is exempt is computed and kept in another format."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from ..interpret import Boundary, Equation
from ._every_op import EveryOp, is_independent, widened
from ._keep import Exceptions
from ._rules import Family
from ._search import TOP
from ._value import InFlight


@dataclasses.dataclass(frozen=True)
class Unrounded(EveryOp):
    """The same rules on float32 data, which keep their exponent but aren't rounded."""

    unrounds: ClassVar[bool] = True

    def _result(
        self, y: InFlight, equation: Equation, family: Family, common: Any, inputs: Sequence[Any]
    ) -> InFlight:
        if common is not None:
            y = dataclasses.replace(y, exponent=common)
        return y if y.uniform is not None else self.rescaled(y)

    def rounded(self, x: InFlight, bound: int = TOP) -> InFlight:
        return x


@dataclasses.dataclass(frozen=True)
class EveryOpBut(EveryOp):
    """Each result rounded to ``recipe.storage``, except where ``recipe.keep`` says otherwise.

    An exempt equation's results are float32 behind an exponent (or FP16, or BF16: as ``keep``
    says), and so are arguments and constants until somebody who isn't exempt reads them: then they
    are rounded, once. A loop's carry and what meets in a branch are in ``storage`` always.
    """

    exceptions: Exceptions = dataclasses.field(default_factory=lambda: Exceptions(()))

    @functools.cached_property
    def unrounded(self) -> EveryOp:
        plain = dataclasses.replace(self.recipe, keep=(), rescale="max", arithmetic="float32")
        return Unrounded(plain, self.record)

    def lift(self, x: Any, aval: Any) -> InFlight:
        return self.unrounded.lift(x, aval)

    def constant(self, x: np.ndarray, aval: Any) -> InFlight:
        return self.unrounded.constant(x, aval)

    def canonical(self, value: Any, aval: Any, boundary: Boundary, equation: Equation) -> InFlight:
        return super().canonical(_stored(value, self), aval, boundary, equation)

    def select(self, predicate: jax.Array, on_true: Any, on_false: Any) -> InFlight:
        return super().select(predicate, _stored(on_true, self), _stored(on_false, self))

    def apply(
        self, state: Any, equation: Equation, inputs: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        fmt = self.exceptions.find(equation, self.fmt)
        if fmt is None:
            plain = [widened(x) if isinstance(x, InFlight) else x for x in inputs]
            return self.unrounded.apply(state, equation, plain)
        if fmt == self.fmt:
            return super().apply(state, equation, [_stored(x, self) for x in inputs])
        other = EveryOp(dataclasses.replace(self.recipe, keep=(), storage=fmt), self.record)
        return other.apply(state, equation, [_stored(x, other) for x in inputs])


def _stored(x: Any, by: EveryOp) -> Any:
    """A value in the format of another interpretation, rounded when it is first asked for."""
    if not isinstance(x, InFlight) or x.data.dtype == by.dtype:
        return x
    if x.uniform is None and is_independent(x):  # rounded when it meets what isn't
        return x
    if by.dtype not in x.memo:
        known = x.uniform is not None
        x.memo[by.dtype] = by.rounded(x) if known else by.lifted(widened(x))
    return x.memo[by.dtype]
