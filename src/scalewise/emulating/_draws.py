"""Random draws under ``emulate``: computed in float64, rounded where they are used."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import ShapedArray
from ..interpret import Applied, Boundary, Equation, State, Value, is_float, map_floats, rebind
from ._emulation import Emulation, is_exact


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draw:
    """A value computed from random bits and constants alone, in float64 without rounding."""

    exact: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Constant:
    """A value that depends on no argument and no random bits, in float64, rounded and not.

    Attributes:
        exact, rounded: the value without rounding, and as the format has it.
        literal: whether it is a literal of the program, no result of arithmetic.
    """

    exact: jax.Array
    rounded: jax.Array
    literal: bool = dataclasses.field(default=False, metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class EmulationWithDraws(Emulation):
    """``Emulation`` that rounds a random draw once, rather than at each step from its bits.

    ``jax.random`` makes a float of random bits, and of that a normal or another variate. In a
    narrow format the first step would round numbers next to 1 up to 1, where the next step is
    infinite. A machine of that format has a sampler made for it. Here the draw is computed as the
    program has it, and rounded where it meets a value that depends on an argument, at a loop's
    carry, a branch or an output. A comparison reads it unrounded.
    """

    def constant(self, x: np.ndarray, aval: ShapedArray) -> Constant:
        return self.unrounded(x, super().constant(x, aval))

    def unrounded(self, x: np.ndarray, rounded: jax.Array) -> Constant:
        """Returns a constant with its value in the format."""
        return Constant(jnp.asarray(np.asarray(x, np.float64)), rounded, literal=True)

    def lower(self, value: Value, aval: ShapedArray) -> jax.Array:
        return super().lower(self._rounded(value), aval)

    def canonical(
        self, value: Value, aval: ShapedArray, boundary: Boundary, equation: Equation
    ) -> Value:
        return self._rounded(value)

    def residual(self, value: Value, aval: ShapedArray) -> Value:
        return self._rounded(value)

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        floats = [x for x, a in zip(inputs, equation.in_avals, strict=True) if is_float(a)]
        drawn = _is_drawn(equation, floats)
        constant = not drawn and _is_constant(equation, floats)
        exact = []
        if drawn or constant:
            wide = [x.exact if isinstance(x, Draw | Constant) else x for x in inputs]
            exact = rebind(equation, wide, jnp.float64)
        if drawn:
            return state, map_floats(lambda x, _: Draw(x), exact, equation.out_avals)
        compared = not any(map(is_float, equation.out_avals))
        plain = [x.exact if compared and isinstance(x, Draw) else self._rounded(x) for x in inputs]
        state, outs = super().apply(state, equation, plain)
        if constant:
            literal = is_exact(equation) and all(x.literal for x in floats)
            outs = [
                Constant(x, y, literal) if is_float(a) else y
                for x, y, a in zip(exact, outs, equation.out_avals, strict=True)
            ]
        return state, outs

    def _rounded(self, x: Value) -> jax.Array:
        if isinstance(x, Constant):
            return x.rounded
        return self._round(x.exact) if isinstance(x, Draw) else x


def _is_constant(equation: Equation, floats: Sequence[Value]) -> bool:
    complexes = any(jnp.issubdtype(a.dtype, jnp.complexfloating) for a in equation.in_avals)
    return not complexes and all(isinstance(x, Constant) for x in floats)


def _is_drawn(equation: Equation, floats: Sequence[Value]) -> bool:
    if not floats:
        return equation.name == "bitcast_convert_type" and is_float(equation.out_avals[0])
    drawn = any(isinstance(x, Draw) for x in floats)
    return drawn and all(isinstance(x, Draw | Constant) for x in floats)
