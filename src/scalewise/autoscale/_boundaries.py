"""The interpretation behind ``store="boundaries"``: float32 in flight, narrow where stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..interpret import Boundary, Equation, Interpretation
from ..scaled import ScaledArray, quantize
from ._narrow import AtRest, at_rest, is_stored, put
from ._recipe import Recipe
from ._rules import RULES, Family
from ._value import InFlight, at_exponent, common_exponent, per_slice, settle


def compute_dtype(aval: Any) -> Any:
    """What a float is computed in: float64 stays, all else is float32."""
    return jnp.float64 if aval.dtype == jnp.float64 else jnp.float32


@dataclasses.dataclass(frozen=True)
class Boundaries(Interpretation):
    """Values in flight keep the compute dtype; what is stored is rounded as the recipe says.

    Attributes:
        recipe: the formats.
        traced: an argument came with an integer exponent, so exponents are numbers at run time.
    """

    recipe: Recipe
    traced: bool = False

    # -- in and out ------------------------------------------------------------------------------

    def is_argument(self, leaf: Any) -> bool:
        return is_stored(leaf)

    def abstract(self, leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_stored(leaf) else leaf

    def lift(self, x: Any, aval: Any) -> InFlight:
        dtype = compute_dtype(aval)
        if self.traced and has_exponent(x):
            return InFlight(x.data.astype(dtype), x.scale)
        return InFlight(jnp.asarray(x.value() if is_stored(x) else x).astype(dtype))

    def constant(self, x: np.ndarray, aval: Any) -> InFlight:
        dtype = compute_dtype(aval)
        data = jnp.asarray(np.asarray(x, dtype))
        return InFlight(data, uniform=float(x) if x.size == 1 else None)

    def lower(self, value: Any, aval: Any) -> jax.Array:
        return settle(awake(value)).astype(aval.dtype)

    def emit(self, value: Any, aval: Any, path: str) -> Any:
        value = awake(value)
        storage = self.recipe.stored_as(path, value.data.size)
        if storage is not None:
            return put(settle(value), storage)
        if not isinstance(value.exponent, int) and value.exponent.ndim == 0:
            return ScaledArray(value.data, value.exponent)
        return self.lower(value, aval)

    def cotangent(self, argument: Any, gradient: jax.Array) -> Any:
        if not is_stored(argument):
            return gradient
        # by the chain rule, to data and scale; the dtype is that of the data, as JAX has it
        return jax.vjp(lambda a: a.value(), argument)[1](gradient)[0]

    # -- where control flow meets ----------------------------------------------------------------

    def canonical(
        self, value: Any, aval: Any, boundary: Boundary, equation: Equation
    ) -> InFlight | AtRest:
        side = "backward" if equation.direction == "backward" else "forward"
        storage = self.recipe.storage
        if boundary == "stacked" and storage and equation.direction == "forward" and aval.shape:
            return value if isinstance(value, AtRest) else at_rest(value, storage)
        value = awake(value)
        if boundary == "carry" and self.recipe.carry is not None and aval.shape:
            value = at_rest(value, self.recipe.carry).wake()
        if not self.traced or boundary == "mapped":  # devices may have different exponents
            return InFlight(settle(value), 0, side)
        exponent = 0 if value.uniform is not None or per_slice(value) else value.exponent
        return InFlight(at_exponent(value, exponent), jnp.asarray(exponent, jnp.int32), side)

    def select(self, predicate: jax.Array, on_true: Any, on_false: Any) -> InFlight:
        exponent = common_exponent([on_true, on_false])
        data = lax.select(
            predicate, at_exponent(on_true, exponent), at_exponent(on_false, exponent)
        )
        return dataclasses.replace(on_true, data=data, exponent=exponent, memo={})

    def spread(self, value: Any, aval: Any) -> InFlight | AtRest:
        def rows(exponent):  # one exponent for each index of the axis that the scan walks
            if isinstance(exponent, int) or exponent.ndim:
                return exponent
            return jnp.broadcast_to(exponent, aval.shape[:1])

        if isinstance(value, AtRest):
            return dataclasses.replace(value, scale=rows(value.scale), own=rows(value.own))
        if value.uniform is not None:
            return InFlight(settle(value), 0, value.side)
        return dataclasses.replace(value, exponent=rows(value.exponent), memo={})

    def residual(self, value: Any, aval: Any) -> InFlight | AtRest:
        """What waits for the backward pass: narrow, and back in float32 only when it is read."""
        return self._stored(value) if isinstance(value, InFlight) else value

    # -- rounding --------------------------------------------------------------------------------

    def _stored(self, value: InFlight) -> InFlight | AtRest:
        """The value as the backward pass finds it in memory."""
        fmt = self.recipe.storage
        small = value.data.size < self.recipe.smallest
        if fmt is None or value.side != "forward" or value.uniform is not None or small:
            return value
        return at_rest(value, fmt)

    def operand(
        self, value: InFlight, equation: Equation
    ) -> tuple[jax.Array, int | jax.Array, jax.Array | None]:
        """A contraction's operand: data rounded to the recipe's format, and its two exponents.

        Returns:
            Data in the compute dtype, all of it values of the format; the value's own exponent;
            the rounding's scale, a power of two in the compute dtype (None: 1).
        """
        fmt = self.recipe.backward if value.side == "backward" else self.recipe.forward
        if fmt is None:
            return value.data, value.exponent, None
        if equation.direction == "backward" and value.side == "forward":
            copy = at_rest(value, fmt)
        else:
            if fmt not in value.memo:
                value.memo[fmt] = quantize(value.data, fmt)
            copy = value.memo[fmt]
        return copy.data.astype(value.data.dtype), value.exponent, copy.scale

    # -- equations -------------------------------------------------------------------------------

    def apply(
        self, state: Any, equation: Equation, inputs: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        rule = RULES[equation.name]
        inputs = [awake(x) for x in inputs]
        side = _side(equation, inputs, rule.family)
        if equation.direction == "backward" and rule.family is not Family.CONTRACTION:
            inputs = [awake(self._stored(x)) if isinstance(x, InFlight) else x for x in inputs]
        outs = rule.rule(self, equation, inputs)
        return state, [
            dataclasses.replace(y, side=side) if isinstance(y, InFlight) else y for y in outs
        ]


def has_exponent(x: Any) -> bool:
    """Whether an argument's scale is one int32 exponent, which then follows it to the outputs."""
    return isinstance(x, ScaledArray) and x.scale.dtype == jnp.int32 and x.scale.ndim == 0


def awake(x: Any) -> Any:
    return x.wake() if isinstance(x, AtRest) else x


def _side(equation: Equation, inputs: Sequence[Any], family: Family):
    """Where a result came from, which decides the format in which it will be an operand."""
    known = [x for x in inputs if isinstance(x, InFlight)]
    moved = family is Family.STRUCTURAL and any(x.uniform is None for x in known)
    if moved and all(x.side == "stored" for x in known):
        return "stored"
    # all else that a backward pass computes is linear in a cotangent, its first one a constant
    return "backward" if equation.direction == "backward" else "forward"
