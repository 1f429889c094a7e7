"""A loss scale, tried without changing the program: the backward pass carries ``2**power``.

The scale enters where a backward pass begins, at the literal 1 that is the loss's own gradient;
every operation that is linear in the gradient passes it on; it is divided out, in float32, where
anything else reads a gradient: the optimizer, gradient clipping, an output. Operations that aren't
linear in the gradient are computed on unscaled numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import ShapedArray
from ...autocasting import Autocast, Policy
from ...autoscaling import RULES, Family
from ...interpret import (
    Applied,
    Argument,
    Boundary,
    Equation,
    Interpretation,
    Program,
    State,
    Value,
    is_float,
    run,
)
from ...primitives import having

# Primitives linear in one operand, given the others, that belong to no family.
BILINEAR = having("bilinear")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Tagged:
    """A value of an autocast run, and whether the loss scale multiplies it."""

    value: Value
    scaled: bool = dataclasses.field(metadata={"static": True})

    @property
    def scale_invariant(self) -> bool:
        constant = self.value.constant_value
        return constant is not None and (constant == 0 or math.isinf(constant))


@dataclasses.dataclass(frozen=True)
class LossScaled(Interpretation):
    """An autocast run whose backward pass carries ``2**power``."""

    low: Autocast  # the run without the scale
    power: int  # exponent of the scale
    # called with each equation whose result carries the scale
    on_scaled: Callable[[Equation], None] | None = None

    def opens(self, equation: Equation) -> bool:
        return True

    def lift(self, x: Argument, aval: ShapedArray) -> Tagged:
        return Tagged(self.low.lift(x, aval), False)

    def constant(self, x: np.ndarray, aval: ShapedArray) -> Tagged:
        return Tagged(self.low.constant(x, aval), False)

    def lower(self, value: Tagged, aval: ShapedArray) -> jax.Array:
        return self.low.lower(self.rescaled(value, False).value, aval)

    def canonical(
        self, value: Tagged, aval: ShapedArray, boundary: Boundary, equation: Equation
    ) -> Tagged:
        backward = equation.direction == "backward" and boundary != "mapped"
        scaled = value.scaled if boundary == "stacked" else backward
        value = self.rescaled(value, scaled)
        return Tagged(self.low.canonical(value.value, aval, boundary, equation), scaled)

    def select(self, predicate: jax.Array, on_true: Tagged, on_false: Tagged) -> Tagged:
        chosen = self.low.select(predicate, on_true.value, on_false.value)
        return Tagged(chosen, on_true.scaled)

    def unstack(self, value: Tagged, aval: ShapedArray) -> Tagged:
        return Tagged(self.low.unstack(value.value, aval), value.scaled)

    def stack(self, value: Tagged, aval: ShapedArray) -> Tagged:
        return Tagged(self.low.stack(value.value, aval), value.scaled)

    def rescaled(self, x: Tagged, scaled: bool) -> Tagged:
        """Returns a value with or without the scale; to change it, widens to float32 or float64."""
        if x.scaled == scaled or x.scale_invariant:
            return Tagged(x.value, scaled)
        factor = 2.0 ** (self.power if scaled else -self.power)
        constant, data = x.value.constant_value, x.value.data
        data = data.astype(jnp.float64 if data.dtype == jnp.float64 else jnp.float32)
        value = dataclasses.replace(
            x.value,
            data=data * jnp.asarray(factor, data.dtype),
            constant_value=None if constant is None else constant * factor,
        )
        return Tagged(value, scaled)

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        inputs = self._seeded(equation, inputs)
        scaled, needed = propagate(equation, [x for x in inputs if isinstance(x, Tagged)])
        rest = iter(needed)
        plain = [self.rescaled(x, next(rest)).value if isinstance(x, Tagged) else x for x in inputs]
        state, outs = self.low.apply(state, equation, plain)
        if scaled and self.on_scaled is not None:
            self.on_scaled(equation)
        return state, [
            Tagged(y, scaled) if is_float(a) else y
            for y, a in zip(outs, equation.out_avals, strict=True)
        ]

    def _seeded(self, equation: Equation, inputs: Sequence[Value]) -> Sequence[Value]:
        floats = [i for i, x in enumerate(inputs) if isinstance(x, Tagged)]
        if equation.direction != "backward" or any(inputs[i].scaled for i in floats):
            return inputs
        ones = [i for i in floats if inputs[i].value.constant_value == 1.0]
        return [self.rescaled(x, True) if i in ones[:1] else x for i, x in enumerate(inputs)]


def autocast_of(low: Autocast | LossScaled) -> Autocast:
    return low.low if isinstance(low, LossScaled) else low


def propagate(equation: Equation, floats: Sequence[Tagged]) -> tuple[bool, list[bool]]:
    """Returns whether an equation's result carries the scale, and which operands have to.

    A product of two scaled operands would carry the scale squared: then it is removed from both.
    """
    scaled, unscaled = [x.scaled for x in floats], [False] * len(floats)
    if equation.direction != "backward" or not any(scaled):
        return False, unscaled
    match RULES[equation.name].family:
        case Family.STRUCTURAL | Family.HOMOGENEOUS if len(floats) == 1:
            return True, scaled
        case Family.ALIGNED | Family.COMPARISON | Family.ORDERED:
            if all(x.scaled or x.scale_invariant for x in floats):
                return True, [True] * len(floats)
        case Family.INVARIANT:
            return False, scaled
        case Family.PRODUCT | Family.CONTRACTION if sum(scaled) == 1:
            if equation.name != "div" or scaled[0]:
                return True, scaled
        case _ if equation.name in BILINEAR and sum(scaled) == 1:
            return True, scaled
    return False, unscaled


def loss_scaled_paths(program: Program) -> frozenset[tuple[int, ...]]:
    paths: set[tuple[int, ...]] = set()
    low = LossScaled(Autocast(Policy(compute=jnp.float32)), 1, lambda e: paths.add(e.path))

    def trace_program(arrays):
        pairs = zip(arrays, program.in_avals, strict=True)
        values = [low.lift(x, a) if is_float(a) else x for x, a in pairs]
        return run(program, low, (), values=values)[1]

    jax.eval_shape(trace_program, list(program.arrays))
    return frozenset(paths)
