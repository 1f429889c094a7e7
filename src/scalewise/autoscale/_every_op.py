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
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format
from ..interpret import Boundary, Equation, Interpretation, is_float, rebind
from ..scaled import LeastSquares, at_least, exponent_of, power_of_two, predicted_size
from ._keep import refuse_opaque
from ._narrow import abstract, has_exponent, is_stored, put
from ._predict import SUMS, terms_of
from ._products import Operand, multiplied
from ._recipe import Recipe
from ._rescale import is_rescale
from ._rules import FALLBACK, INFINITE, RULES, Family, compute_dtype
from ._value import InFlight, leading, per_slice, settle

HELD = 4096  # elements from which a result is made once though no search for a scale reads it
COMPUTED = (Family.ALIGNED, Family.PRODUCT, Family.POWER, Family.CONTRACTIVE)
NOTHING = -(1 << 20)  # the exponent of zeros: it is never the larger one
LOWEST, HIGHEST = np.int32(-126), np.int32(126)  # exponents whose powers float32 has, both ways
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

    What stands outside of forward and backward pass, an optimizer, keeps the format's subnormals:
    the squares in a second moment span twice the gradients' range, and an element whose square is
    lost, or is given the smallest normal number instead, no longer learns as it should.
    """

    unrounds: ClassVar[bool] = False  # whether results stay as they are: of what is exempt

    recipe: Recipe

    @property
    def fmt(self) -> Format:
        assert self.recipe.storage is not None
        return self.recipe.storage

    @property
    def dtype(self) -> np.dtype:
        assert self.fmt.dtype is not None
        return self.fmt.dtype

    # -- in and out ------------------------------------------------------------------------------

    def is_argument(self, leaf: Any) -> bool:
        return is_stored(leaf)

    def abstract(self, leaf: Any) -> Any:
        return abstract(leaf) if is_stored(leaf) else leaf

    def lift(self, x: Any, aval: Any) -> InFlight:
        if has_exponent(x):
            return self.rescaled(InFlight(x.data.astype(jnp.float32), x.scale), gradual=True)
        plain = jnp.asarray(x.value() if is_stored(x) else x).astype(jnp.float32)
        return self.rescaled(InFlight(plain), gradual=True)

    def constant(self, x: np.ndarray, aval: Any) -> InFlight:
        if x.size == 1 and math.isfinite(float(x)):
            mantissa, exponent = math.frexp(float(x))
            data = jnp.full(x.shape, mantissa, jnp.float32)
            return self.rounded(InFlight(data, exponent, uniform=float(x)))
        uniform = float(x) if x.size == 1 else None
        return self.rounded(InFlight(jnp.asarray(x, jnp.float32), 0, uniform=uniform))

    def lower(self, value: Any, aval: Any) -> jax.Array:
        return settle(widened(value)).astype(aval.dtype)

    def emit(self, value: Any, aval: Any, path: str) -> Any:
        storage = self.recipe.stored_as(path, value.data.size)
        if storage is not None:
            return put(settle(widened(value)), storage)
        return self.lower(value, aval)

    def cotangent(self, argument: Any, gradient: jax.Array) -> Any:
        if not is_stored(argument):
            return gradient
        return jax.vjp(lambda a: a.value(), argument)[1](gradient)[0]

    # -- where control flow meets ----------------------------------------------------------------

    def canonical(self, value: Any, aval: Any, boundary: Boundary, equation: Equation) -> InFlight:
        if boundary == "mapped":  # devices may have different exponents: float32 between them
            return InFlight(settle(widened(value)), 0, "forward")
        if value.data.dtype != self.dtype:  # of a mapped value: float32
            value = self.rescaled(value, gradual=True)
        exponent = jnp.asarray(value.exponent, jnp.int32)
        return InFlight(value.data, exponent, "forward")

    def select(self, predicate: jax.Array, on_true: Any, on_false: Any) -> InFlight:
        (a, b), exponent = _aligned([widened(on_true), widened(on_false)])
        return self.rounded(InFlight(lax.select(predicate, a.data, b.data), exponent, "forward"))

    def spread(self, value: Any, aval: Any) -> InFlight:
        exponent = jnp.broadcast_to(jnp.asarray(value.exponent, jnp.int32), aval.shape[:1])
        return InFlight(value.data, exponent, value.side)

    def gather(self, value: Any, aval: Any) -> InFlight:
        """A stack of slices, each with an exponent, at the largest of them."""
        if not per_slice(value):
            return value
        exponent = jnp.max(value.exponent, initial=NOTHING)
        factor = power_of_two(jnp.clip(value.exponent - exponent, -126, 0))
        data = value.data.astype(jnp.float32) * leading(factor, value.data)
        return self.rounded(InFlight(data, exponent), in_range=True)

    # -- equations -------------------------------------------------------------------------------

    def apply(
        self, state: Any, equation: Equation, inputs: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        if not self.unrounds:
            refuse_opaque(equation)
        rule = FALLBACK if equation.name in COLLECTIVES else RULES[equation.name]
        contraction = rule.family is Family.CONTRACTION  # its operands go in as they are
        wide = [
            widened(x) if isinstance(x, InFlight) and not (contraction and not per_slice(x)) else x
            for x in inputs
        ]
        constant = any(isinstance(x, InFlight) and x.uniform is not None for x in wide)
        common = None
        if rule.family in (Family.ALIGNED, Family.COMPARISON):
            wide, common = _aligned(wide)
        if equation.name == "mul":
            wide = [_finite(x) for x in wide]
        outs = rule.rule(self, equation, wide)
        outs = [
            self._result(y, equation, rule.family, common, constant) if is_float(a) else y
            for y, a in zip(outs, equation.out_avals, strict=True)
        ]
        computed = rule.family in COMPUTED and equation.name not in KEEPS
        if self.recipe.rescale is None and computed and equation.direction != "update":
            outs = [_held(y) if isinstance(y, InFlight) else y for y in outs]
        return state, outs

    def _result(
        self, y: InFlight, equation: Equation, family: Family, common: Any, constant: bool
    ) -> InFlight:
        """A rule's float32 result: its scale as the recipe has it, rounded."""
        gradual = equation.direction == "update"
        if common is not None:
            y = InFlight(y.data, common)
        if is_rescale(equation):
            return self.rescaled(y)
        if family in (Family.STRUCTURAL, Family.ORDERED):
            return self.rounded(y, in_range=True, gradual=gradual)
        chosen = equation.name == "select_n" and not constant  # its scale is that of what it chose
        if y.uniform is not None or (equation.name in KEEPS and not chosen):
            return self.rounded(y, gradual=gradual)
        # an epsilon, or a second moment by which somebody divides, is never lost
        nonzero = constant or family is Family.POWER
        # the constant's data lie between 1/2 and 1; but one divided by zeros has their exponent
        if family is Family.PRODUCT and constant and not _inverse(equation):
            return self.rounded(y, nonzero=True, gradual=gradual)
        if self.recipe.rescale is not None or family is Family.FALLBACK:
            costly = family in (Family.FALLBACK, Family.CONTRACTIVE)
            return self.rescaled(y, barrier=costly, nonzero=nonzero, gradual=gradual)
        if equation.name in SUMS and family is Family.HOMOGENEOUS:
            terms = predicted_size(equation.in_avals[0].shape) // predicted_size(y.shape)
            return self.rounded(_moved(y, round(math.log2(max(1, terms)) / 2)))
        if family is Family.CONTRACTION:
            return self.rounded(_moved(y, round(math.log2(max(1, terms_of(equation))) / 2)))
        if _inverse(equation) or family is Family.POWER:  # of zeros: infinities, or zeros again
            beyond = lax.abs(jnp.int32(y.exponent)) > -NOTHING // 4
            y = dataclasses.replace(y, exponent=jnp.where(beyond, NOTHING, y.exponent))
        # a sum in an optimizer that is all but zero isn't zero: others divide by it
        return self.rounded(y, nonzero=gradual and family is Family.ALIGNED, gradual=gradual)

    def flight_dtype(self, aval: Any) -> Any:
        """What a rule computes a float in, before its result is rounded."""
        return compute_dtype(aval)

    def operands(
        self, equation: Equation, values: Sequence[InFlight]
    ) -> tuple[tuple[Operand, Operand], Any]:
        """A contraction's operands as they are, which are narrow already; and its exponent."""
        a, b = values
        return ((a.data, None), (b.data, None)), a.exponent + b.exponent

    def product(self, equation: Equation, operands: Sequence[Operand], dtype: Any) -> jax.Array:
        """A contraction, added up in float32, in the storage dtype, or in what fits at run time."""
        (a, _), (b, _) = operands

        def wide(a, b):
            return multiplied(equation, ((a, None), (b, None)), dtype).value()

        def narrow(a, b):
            own = self.dtype
            return rebind(equation, [a.astype(own), b.astype(own)], own)[0].astype(dtype)

        if self.recipe.arithmetic == "float32":
            return wide(a, b)
        if self.recipe.arithmetic == "storage":
            return narrow(a, b)
        largest = [jnp.max(jnp.abs(x).astype(dtype), initial=0) for x in (a, b)]
        bound = np.float32(terms_of(equation)) * largest[0] * largest[1]
        # half of it, for what the roundings of the sums add; a NaN goes the wide way
        return lax.cond(bound <= np.float32(float(self.fmt.max) / 2), narrow, wide, a, b)

    # -- rounding --------------------------------------------------------------------------------

    def rounded(
        self, x: InFlight, in_range: bool = False, nonzero: bool = False, gradual: bool = False
    ) -> InFlight:
        """The value with its data rounded to the format, once; what is finite stays finite.

        By ``reduce_precision``, since XLA drops a convert there and back; it flushes the format's
        subnormals, as much hardware does, unless they are asked for (``gradual``; BF16 has range
        enough without). With ``nonzero`` what was flushed becomes the smallest number that isn't.
        """
        data, gradual = x.data, gradual and self.fmt.exponent_bits < 8
        if data.dtype != self.dtype:
            if not in_range:
                top = np.float32(float(self.fmt.max))
                infinite = lax.abs(data) == np.float32(np.inf)
                data = lax.select(infinite, data, lax.clamp(-top, data, top))
            if nonzero:
                least = self.fmt.smallest if gradual else self.fmt.smallest_normal
                least = np.float32(float(least))
                lost = (data != 0) & (lax.abs(data) < least)
                data = jnp.where(lost, jnp.copysign(least, data), data)
            data = _nearest(data, self.fmt, gradual)
            data = data.astype(self.dtype)
        return InFlight(data, x.exponent, x.side, x.uniform)

    def rescaled(
        self, x: InFlight, barrier: bool = False, nonzero: bool = False, gradual: bool = False
    ) -> InFlight:
        """The value, its exponent found from the data, rounded once."""
        # scales that are only propagated rest on data of unit size
        measure = self.recipe.rescale or "l2"
        exponent, zero = magnitude_exponent(x.data, measure, self.fmt)
        data = x.data * power_of_two(-exponent)
        exponent = lax.select(zero, np.int32(NOTHING), exponent + x.exponent)
        y = self.rounded(InFlight(data, exponent), measure == "max", nonzero, gradual)
        if barrier:
            y = dataclasses.replace(y, data=_materialised(y.data, exponent))
        return y


def _nearest(data: jax.Array, fmt: Format, subnormals: bool) -> jax.Array:
    """float32 data rounded to the format, its subnormals flushed or kept."""
    whole = lax.reduce_precision(data, fmt.exponent_bits, fmt.mantissa_bits)
    if not subnormals:
        return whole
    unit = np.float32(float(fmt.smallest))
    few = lax.round(data * (1 / unit), lax.RoundingMethod.TO_NEAREST_EVEN) * unit
    return lax.select(lax.abs(data) < np.float32(float(fmt.smallest_normal)), few, whole)


def _inverse(equation: Equation) -> bool:
    """Whether zeros, whose exponent is hugely negative, come out with one as hugely positive."""
    return equation.name in ("div", "rsqrt")


def _materialised(data: jax.Array, exponent: jax.Array) -> jax.Array:
    """``data`` really stored: a branch that is always taken, which the compiler doesn't know.

    Else XLA computes what led to an operation once more for each reader of its result, and what led
    there, and so on, up to a product or the search for a scale: without those a GPT's kernels grew
    to 1,550 operations and its step took 2.8 times as long. It takes optimization barriers out
    before it fuses.
    """
    return lax.cond(exponent > 2 * NOTHING, lambda x: x, jnp.zeros_like, data)


def _held(x: InFlight) -> InFlight:
    """A large result made once, where no search for a scale has XLA make it once anyway."""
    if not at_least(x.data.size, HELD) or x.uniform is not None or jnp.ndim(x.exponent):
        return x
    return dataclasses.replace(x, data=_materialised(x.data, jnp.int32(x.exponent)))


def magnitude_exponent(data: jax.Array, measure: str, fmt: Format) -> tuple[jax.Array, jax.Array]:
    """The exponent, -126 to 126, that float32 data is divided by to lie well in a format.

    By the largest magnitude, that comes to between 2^14 and 2^15, all that FP16 has room for; by
    the mean of the magnitudes or of their squares, that comes to 1. NaN and infinities don't count.
    And whether all of it is zero.
    """
    size = lax.abs(data)
    size = lax.select(size < np.float32(np.inf), size, lax.full_like(size, 0))
    top = jnp.max(size, initial=0.0)
    zero = top == 0
    if measure == "least_squares":
        return exponent_of(LeastSquares().scale(data, fmt, range(data.ndim))[0]), zero
    biased = lax.bitcast_convert_type(top, jnp.int32) >> 23
    if measure == "max":
        return lax.clamp(LOWEST, biased - np.int32(127 + 14), HIGHEST), zero
    exponent = biased - 127
    part = size * power_of_two(-jnp.clip(exponent, -126, 126))
    mean = jnp.mean(part) if measure == "l1" else jnp.sqrt(jnp.mean(jnp.square(part)))
    lower = (lax.bitcast_convert_type(mean, jnp.int32) >> 23) - 127
    return jnp.clip(exponent + lower, -126, 126), zero


def _moved(x: InFlight, bits: int) -> InFlight:
    """The same value, ``bits`` powers of two moved from the data to the exponent."""
    return InFlight(x.data * np.float32(2.0**-bits), x.exponent + bits)


def widened(x: InFlight) -> InFlight:
    return dataclasses.replace(x, data=x.data.astype(jnp.float32), memo={})


def _aligned(inputs: Sequence[Any]) -> tuple[list[Any], Any]:
    """Float operands brought to one exponent, which is returned and taken off them.

    A constant counts like any other operand, lest its data overflow. One that is meant as an
    infinity (a mask) only asks to be far away: the others keep what they have above 2^-20.
    """
    floats = [x for x in inputs if isinstance(x, InFlight)]
    if not floats:
        return list(inputs), None
    varying = [x.exponent for x in floats if x.uniform is None]
    known = [e for e in varying if isinstance(e, int)]
    known += [n for x in floats if x.uniform is not None and (n := _needed(x.uniform)) is not None]
    common: Any = max(known, default=None)
    for exponent in varying:
        if not isinstance(exponent, int):
            common = exponent if common is None else jnp.maximum(common, exponent)
    common = 0 if common is None else common
    return [_down_to(x, common) if isinstance(x, InFlight) else x for x in inputs], common


def _finite(x: InFlight) -> InFlight:
    """A factor that is meant as an infinity (``(1 - mask) * finfo.min``) as one of 2^MASK.

    What it is added to has to keep something at the scale of their sum.
    """
    if x.uniform is None or not math.isfinite(x.uniform) or abs(x.uniform) < 2.0**INFINITE:
        return x
    far = math.copysign(2.0**MASK, x.uniform)
    return InFlight(jnp.full_like(x.data, math.copysign(0.5, far)), MASK + 1, uniform=far)


def _needed(uniform: float) -> int | None:
    """The exponent that a constant asks for."""
    if not uniform or not math.isfinite(uniform):
        return None
    exponent = math.frexp(uniform)[1]
    return MASK - 15 if exponent > MASK else exponent - 14


def _down_to(x: InFlight, common: Any) -> InFlight:
    """``x.data`` at an exponent that isn't lower than its own; taken off it.

    Below 2^-126 of the other operand there is nothing to keep, and nothing is kept: what was left
    would pass for a number. A mask is held at float32's ends.
    """
    down, least = x.exponent - common, np.float32(2.0**-126)
    if isinstance(down, int):
        factor: Any = np.float32(2.0 ** max(-126, min(126, down)))
        rest: Any = least if down < -126 else np.float32(1)
    else:
        factor = power_of_two(lax.clamp(LOWEST, down, HIGHEST))
        rest = lax.select(down < -126, least, np.float32(1))
    return InFlight(x.data * factor * rest, 0)  # an infinity times zero would be NaN
