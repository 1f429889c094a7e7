"""The interpretation behind ``store="every_op"``: each result is narrow, behind its own scale.

What a machine without float32 would do: an operation's operands are FP16 or BF16 numbers, its
result is rounded to that format once, and powers of two beside the data keep them in its range. The
scales are propagated by the rules of each family, and found anew from the data where the recipe
says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format
from ..interpret import Boundary, Equation, Interpretation, is_float
from ..rounding import round_to
from ..scaled import LeastSquares, exponent_of, power_of_two
from ._narrow import has_exponent, is_stored, put
from ._predict import SUMS, terms_of
from ._recipe import Recipe
from ._rules import FALLBACK, RULES, Family
from ._value import InFlight, at_exponent, common_exponent, per_slice, settle

NOTHING = -(1 << 20)  # the exponent of zeros: it is never the larger one
MASK = 20  # log2 of what is meant as "minus infinity" when somebody writes -1e9
# Operations that give values of their operands, or no more than twice them.
KEEPS = (
    "neg", "abs", "max", "min", "reduce_max", "reduce_min", "cummax", "cummin", "pmax", "pmin",
    "reduce_window_max", "reduce_window_min", "select_n", "concatenate", "pad", "clamp", "real",
    "dynamic_update_slice", "imag",
)  # fmt: skip
# Each device has exponents of its own: what they exchange are plain numbers.
COLLECTIVES = (
    "psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "all_to_all",
    "ppermute", "reduce_scatter",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class EveryOp(Interpretation):
    """Each result rounded to ``recipe.storage``; exponents are int32 numbers at run time.

    A value is ``data * 2**exponent`` with data float16 or bfloat16. Arithmetic on two elements is
    rounded once, as that format's own would be (float32 holds every sum, product, quotient and root
    of its numbers to more than twice its precision, so that rounding a second time changes
    nothing). Contractions and sums add up in float32, or as ``recipe.arithmetic`` says.
    """

    recipe: Recipe

    @property
    def fmt(self) -> Format:
        assert self.recipe.storage is not None
        return self.recipe.storage

    # -- in and out ------------------------------------------------------------------------------

    def is_argument(self, leaf: Any) -> bool:
        return is_stored(leaf)

    def abstract(self, leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_stored(leaf) else leaf

    def lift(self, x: Any, aval: Any) -> InFlight:
        if has_exponent(x):
            return self.rescaled(InFlight(x.data.astype(jnp.float32), x.scale))
        plain = jnp.asarray(x.value() if is_stored(x) else x).astype(jnp.float32)
        return self.rescaled(InFlight(plain))

    def constant(self, x: np.ndarray, aval: Any) -> InFlight:
        if x.size == 1 and math.isfinite(float(x)):
            mantissa, exponent = math.frexp(float(x))
            data = jnp.full(x.shape, mantissa, jnp.float32)
            return self.rounded(InFlight(data, exponent, uniform=float(x)))
        uniform = float(x) if x.size == 1 else None
        return self.rounded(InFlight(jnp.asarray(x, jnp.float32), 0, uniform=uniform))

    def lower(self, value: Any, aval: Any) -> jax.Array:
        return settle(_wide(value)).astype(aval.dtype)

    def emit(self, value: Any, aval: Any, path: str) -> Any:
        storage = self.recipe.stored_as(path, value.data.size)
        if storage is not None:
            return put(settle(_wide(value)), storage)
        return self.lower(value, aval)

    def cotangent(self, argument: Any, gradient: jax.Array) -> Any:
        if not is_stored(argument):
            return gradient
        return jax.vjp(lambda a: a.value(), argument)[1](gradient)[0]

    # -- where control flow meets ----------------------------------------------------------------

    def canonical(self, value: Any, aval: Any, boundary: Boundary, equation: Equation) -> InFlight:
        if boundary == "mapped":  # devices may have different exponents: float32 between them
            return InFlight(settle(_wide(value)), 0, "forward")
        exponent = jnp.asarray(value.exponent, jnp.int32)
        return InFlight(value.data, exponent, "forward")

    def select(self, predicate: jax.Array, on_true: Any, on_false: Any) -> InFlight:
        exponent = common_exponent([on_true, on_false])
        a, b = (at_exponent(_wide(x), exponent) for x in (on_true, on_false))
        return self.rounded(InFlight(lax.select(predicate, a, b), exponent, on_true.side))

    def spread(self, value: Any, aval: Any) -> InFlight:
        exponent = jnp.broadcast_to(jnp.asarray(value.exponent, jnp.int32), aval.shape[:1])
        return InFlight(value.data, exponent, value.side)

    def gather(self, value: Any, aval: Any) -> InFlight:
        """A stack of slices, each with an exponent, at the largest of them."""
        if not per_slice(value):
            return value
        exponent = jnp.max(value.exponent, initial=NOTHING)
        down = value.exponent - exponent
        down = down.reshape(down.shape + (1,) * (value.data.ndim - down.ndim))
        data = _lowered(value.data.astype(jnp.float32), down)
        return self.rounded(InFlight(data, exponent, value.side))

    # -- equations -------------------------------------------------------------------------------

    def apply(
        self, state: Any, equation: Equation, inputs: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        rule = FALLBACK if equation.name in COLLECTIVES else RULES[equation.name]
        wide = [_wide(x) if isinstance(x, InFlight) else x for x in inputs]
        if rule.family is Family.ALIGNED:
            wide = _with_room(wide, equation)
        outs = rule.rule(self, equation, wide)
        return state, [self._result(y, equation, rule.family) if is_float(a) else y
                       for y, a in zip(outs, equation.out_avals, strict=True)]  # fmt: skip

    def _result(self, y: InFlight, equation: Equation, family: Family) -> InFlight:
        if family is Family.STRUCTURAL:
            return self.rounded(y)
        if y.uniform is not None or equation.name in KEEPS:
            return self.rounded(y)
        if self.recipe.rescale is not None or family is Family.FALLBACK:
            return self.rescaled(y)
        if equation.name in SUMS and family is Family.HOMOGENEOUS:
            terms = equation.in_avals[0].size // max(1, y.data.size)
            return self.rounded(_moved(y, round(math.log2(max(1, terms)) / 2)))
        if family is Family.CONTRACTION:
            return self.rounded(_moved(y, round(math.log2(max(1, terms_of(equation))) / 2)))
        return self.rounded(y)

    def operand(
        self, value: InFlight, equation: Equation, contracted: tuple[int, ...]
    ) -> tuple[jax.Array, Any, None]:
        """A contraction's operand as it is: it is narrow already."""
        return value.data, value.exponent, None

    # -- rounding --------------------------------------------------------------------------------

    def rounded(self, x: InFlight) -> InFlight:
        """The value with its data rounded to the format, once; what is finite stays so."""
        data = x.data
        if data.dtype != self.fmt.dtype:
            data = round_to(data.astype(jnp.float32), self.fmt, saturate="finite")
            data = data.astype(self.fmt.dtype)
        return InFlight(data, x.exponent, x.side, x.uniform)

    def rescaled(self, x: InFlight) -> InFlight:
        """The value, its exponent found from the data, rounded once."""
        # scales that are only propagated rest on data of unit size
        measure = self.recipe.rescale or "l2"
        data = x.data.astype(jnp.float32)
        exponent = magnitude_exponent(data, measure, self.fmt)
        moved = _lowered(data, -exponent)
        exponent = jnp.where(exponent == NOTHING, NOTHING, exponent + x.exponent)
        return self.rounded(InFlight(moved, exponent, x.side))


def magnitude_exponent(data: jax.Array, measure: str, fmt: Format) -> jax.Array:
    """The exponent that brings float32 data to the middle of a format's range; NOTHING of zeros.

    By the largest magnitude, 2^11 (there is room for a few sums above and for 2^-25 of it below);
    by the mean of the magnitudes or of the squares, 1.
    """
    size = jnp.where(jnp.isfinite(data), jnp.abs(data), 0)
    top = jnp.max(size, initial=0.0)
    unit = power_of_two(jnp.clip(_exponent(top), -126, 126))
    if measure == "max":
        exponent = _exponent(top) - 11
    elif measure == "least_squares":
        scale, _ = LeastSquares().scale(data, fmt, range(data.ndim))
        exponent = exponent_of(scale)
    else:
        part = size / unit
        mean = jnp.mean(part) if measure == "l1" else jnp.sqrt(jnp.mean(jnp.square(part)))
        exponent = _exponent(mean) + _exponent(top)
    return jnp.where(top > 0, jnp.clip(exponent, -252, 252), NOTHING)


def _exponent(x: jax.Array) -> jax.Array:
    """floor(log2(x)) of a positive float32 scalar, from its bits."""
    return (lax.bitcast_convert_type(x, jnp.int32) >> 23) - 127


def _lowered(data: jax.Array, exponent: jax.Array) -> jax.Array:
    """``data * 2**exponent``; NOTHING's opposite leaves zeros zero."""
    half = jnp.clip(exponent, -252, 252) >> 1
    rest = jnp.clip(exponent, -252, 252) - half
    return data * power_of_two(half) * power_of_two(rest)


def _moved(x: InFlight, bits: int) -> InFlight:
    """The same value, ``bits`` powers of two moved from the data to the exponent."""
    return InFlight(x.data * np.float32(2.0**-bits), x.exponent + bits, x.side)


def _wide(x: InFlight) -> InFlight:
    return dataclasses.replace(x, data=x.data.astype(jnp.float32), memo={})


def _with_room(inputs: Sequence[Any], equation: Equation) -> list[Any]:
    """Operands whose common exponent lets a constant among them be what it is.

    A constant counts like any other operand, lest its data overflow. One that is meant as an
    infinity (a mask) only asks to be far away: the others keep what they have above 2^-20.
    """
    floats = [x for x in inputs if isinstance(x, InFlight)]
    constants = [x for x in floats if x.uniform is not None]
    if not constants or len(constants) == len(floats):
        return list(inputs)
    needed = [_needed(x.uniform) for x in constants]
    least = max((n for n in needed if n is not None), default=None)
    if least is None:
        return list(inputs)
    return [
        _at_least(x, least) if isinstance(x, InFlight) and x.uniform is None else x for x in inputs
    ]


def _needed(uniform: float | None) -> int | None:
    if not uniform or not math.isfinite(uniform):
        return None
    exponent = math.frexp(uniform)[1]
    return MASK - 15 if exponent > MASK else exponent - 11


def _at_least(x: InFlight, exponent: int) -> InFlight:
    target = jnp.maximum(jnp.asarray(x.exponent, jnp.int32), exponent)
    data = _lowered(x.data, jnp.asarray(x.exponent, jnp.int32) - target)
    return InFlight(data, target, x.side)
