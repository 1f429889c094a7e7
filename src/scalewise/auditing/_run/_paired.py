"""Two interpretations side by side: each float array is a pair, through control flow too."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..._jax import ShapedArray, Tracer
from ..._types import PyTree
from ...interpret import Argument, Boundary, Equation, Interpretation, Value, is_float
from ...rounding import format_params
from ._equation import lift_any, lift_from_table, round_draw
from ._interpretations import Reference, Runs, TableEmulation
from ._pair import (
    Decision,
    Draw,
    Pair,
    flat,
    low_of,
    padded_size,
    reference_of,
    shaped,
    uncommitted,
)
from ._specialize import kind_of_run


@dataclasses.dataclass(eq=False)
class Paired(Interpretation):
    """The values of two runs, lifted, joined where control flow joins, and lowered together."""

    # any interpretation; :class:`TableEmulation` takes each equation's format from the state
    low: Interpretation
    reference: Reference  # in float32 or float64
    compiling: bool = False  # whether a loop is being compiled as a whole

    decides = True

    def opens(self, equation: Equation) -> bool:
        return self.low.opens(equation)

    def context(self) -> contextlib.AbstractContextManager[object]:
        return jax.enable_x64(True)

    @property
    def runs(self) -> Runs:
        return Runs(self.low, self.reference)

    @property
    def carrier(self) -> DTypeLike:
        """The dtype that holds the low-precision run's numbers, if ``low`` emulates a format."""
        assert isinstance(self.low, TableEmulation)
        return self.low.carrier

    def is_argument(self, leaf: object) -> bool:
        return self.low.is_argument(leaf)

    def abstract(self, leaf: Argument) -> Argument:
        return self.low.abstract(leaf)

    def lifts(self, aval: ShapedArray) -> bool:
        return True

    def lift(self, x: Argument, aval: ShapedArray) -> Value:
        if not is_float(aval):
            return self.unrounded(x, aval)
        if isinstance(self.low, TableEmulation):
            x = flat(x, padded_size(math.prod(aval.shape)))
            return Pair(*self.call(lift_from_table, self.runs, x, self.low.params_of(aval)))
        shape = aval.shape
        if kind_of_run(self.low).elementwise:
            x = flat(x, padded_size(math.prod(shape)))
            shape = x.shape
        laid_out = jax.ShapeDtypeStruct(shape, aval.dtype)
        return Pair(*self.call(lift_any, self.runs, laid_out, x))

    def unrounded(self, x: Argument, aval: ShapedArray) -> Value:
        """Returns an array of the program's own dtype; complex numbers in the reference's, too."""
        wide, x = self.reference.complex_dtype(aval.dtype), uncommitted(x)
        return x if wide is None else Decision(x, jnp.asarray(x, wide))

    def lower(self, value: Value, aval: ShapedArray) -> jax.Array:
        if not is_float(aval):
            return low_of(value)
        return self.low.lower(shaped(value, aval).low, aval)

    def canonical(
        self, value: Value, aval: ShapedArray, boundary: Boundary, equation: Equation
    ) -> Value:
        value = self.rounded(value)
        if not isinstance(value, Pair):
            if not self.compiling:
                return value
            # of one type before and after a loop's body, which may compute it from floats
            return Decision(low_of(value), reference_of(value))
        value = shaped(value, aval)
        return Pair(
            self.low.canonical(value.low, aval, boundary, equation),
            self.reference.canonical(value.reference, aval, boundary, equation),
            jnp.asarray(value.tainted),
        )

    def decisions(self, chosen: Value) -> Sequence[jax.Array]:
        return chosen.ways if isinstance(chosen, Decision) else (chosen,)

    def join(self, results: Sequence[Value]) -> Value:
        own, other = results
        if isinstance(own, Pair):
            return dataclasses.replace(own, reference=other.reference)
        return Decision(low_of(own), reference_of(other))

    def unfinished(
        self, equation: Equation, going: Sequence[jax.Array], value: Value, aval: ShapedArray
    ) -> Value:
        if not isinstance(value, Pair) or len(going) < 2:
            return value
        own, other = (jnp.broadcast_to(jnp.any(way), aval.shape) for way in going)
        nan = jnp.full(aval.shape, jnp.nan, aval.dtype)
        tainted = value.tainted | jnp.any(going[0])
        nans = Pair(self.low.lift(nan, aval), self.reference.lift(nan, aval), tainted)
        nans = self.canonical(nans, aval, "carry", equation)
        return self.select(Decision(own, other), nans, value)

    def select(self, predicate: Value, on_true: Value, on_false: Value) -> Value:
        own, other = low_of(predicate), reference_of(predicate)
        if isinstance(on_true, Pair):
            low = self.low.select(own, on_true.low, on_false.low)
            reference = self.reference.select(other, on_true.reference, on_false.reference)
            return Pair(low, reference, on_true.tainted | on_false.tainted)
        if not any(isinstance(x, Decision) for x in (predicate, on_true, on_false)):
            return jnp.where(own, on_true, on_false)
        low = jnp.where(own, low_of(on_true), low_of(on_false))
        reference = jnp.where(other, reference_of(on_true), reference_of(on_false))
        return Decision(low, reference)

    def unstack(self, value: Value, aval: ShapedArray) -> Value:
        value = self.rounded(value)
        if not isinstance(value, Pair):
            return value
        value = shaped(value, aval)
        spread = jnp.broadcast_to if isinstance(value.tainted, Tracer) else np.broadcast_to
        return Pair(
            self.low.unstack(value.low, aval),
            self.reference.unstack(value.reference, aval),
            spread(value.tainted, aval.shape[:1]),
        )

    def stack(self, value: Value, aval: ShapedArray) -> Value:
        if not isinstance(value, Pair):
            return value
        return Pair(
            self.low.stack(value.low, aval),
            self.reference.stack(value.reference, aval),
            value.tainted.any(),
        )

    def rounded(self, value: Value) -> Value:
        if not isinstance(value, Draw):
            return value
        assert isinstance(self.low, TableEmulation)
        params = format_params(self.low.fmt, self.low.saturate)
        return self.call(round_draw, self.runs, value, params)

    def call(self, f: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
        """Calls a jitted function; a subclass may compile it instead."""
        return f(*arguments)
