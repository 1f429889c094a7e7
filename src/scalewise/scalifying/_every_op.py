"""The interpretation of ``scalify``: each result is narrow, with a scale of its own.

It models a machine without float32: an operation's operands are FP16 or BF16 numbers, its result is
rounded to that format once, and powers of two beside the data keep them in its range. The rules of
each family propagate scales. A scale is found from the data where the settings say so, or where a
propagated scale could leave the format's range.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jax import ShapedArray
from .._types import PyTree
from ..formats import Format
from ..interpret import (
    Applied,
    Argument,
    Boundary,
    Equation,
    State,
    Value,
    map_floats,
    rebind,
)
from ..primitives import Family, having, names
from ..rounding import EncodedArray
from ..scaled import (
    EXPONENTS,
    HIGHEST,
    LOWEST,
    ZERO_EXPONENT,
    ScaledArray,
    exponent_of,
    is_stored,
    power_of_two,
    scaled_down,
    split_power,
    storage_of,
    store_array,
)
from ..scaled import RULES as SCALE_RULES
from ._contract import contract
from ._overrides import FormatOverrides
from ._pairs import PairInterpretation
from ._results import (
    ADDS,
    BOUNDS,
    EXACT,
    ResultRounding,
    aligned,
    bound_of_data,
    bounding,
    chosen,
    constant_factor,
    constant_limit,
    finite_factor,
    folded,
    has_found_exponent,
    is_independent,
    is_measured,
    is_rescale,
    keeps_all,
    larger_factor,
    only_bounds,
    widened,
    widest_dtype,
    with_factor,
)
from ._rules import FALLBACK, RULES, PrimitiveRule, propagated_power, wide_flight
from ._settings import Scalify
from ._value import (
    TOP,
    Factor,
    ScaledValue,
    largest_rounded,
    leading,
    materialize,
    per_slice,
    wide_dtype,
)

# The form of a function's float results: plain arrays, or ScaledArrays.
Outputs = Literal["arrays", "scales"]
PROPAGATED = {
    "integer_pow": PrimitiveRule(Family.POWER, propagated_power), "reduce_prod": FALLBACK
}  # fmt: skip
# Families whose results scale as their one operand does.
LINEAR = (Family.STRUCTURAL, Family.HOMOGENEOUS, Family.ORDERED)
# Devices have different exponents, so that they exchange plain numbers.
COLLECTIVES = having("collective")


@dataclasses.dataclass(frozen=True)
class EveryOp(PairInterpretation):
    """Rounds each result to ``recipe.format``; exponents are int32 numbers at run time.

    A value is ``data * 2**exponent`` with data float16 or bfloat16. Arithmetic on two elements is
    rounded once, as that format's own would be (float32 holds every sum, product, quotient and root
    of its numbers to more than twice its precision, so that rounding a second time changes
    nothing). Contractions and sums accumulate in float32, or as ``recipe.arithmetic`` says.

    Values that depend on no float argument (a random draw from its bits on, an expression of
    constants, a step counter) are computed in float32, and rounded when an operation reads them
    together with a value that does depend on one, or when a loop carries them. Rounded earlier, a
    uniform random number becomes 1 and the normal number made of it infinite.

    A packed factor (L beside U) stays in float32 until an operation takes one matrix of it.

    A nonzero number is never flushed to zero: an element whose square is lost in a second moment,
    or that is a divisor, would become infinite.

    Where ``recipe.keep`` names another format, an equation's results are FP16, BF16 or float32,
    with an exponent. Arguments and constants then are float32, too, until an equation that isn't
    exempt reads them and rounds them, once. A loop's carry and a branch's results are always in
    ``residuals``.

    Attributes:
        recipe: the settings.
        keeps_float32: whether results stay unrounded, by the same rules.
        record: called with each result, by ``explain``.
        outputs: the form of float results.
    """

    NARROW: ClassVar = names(lambda row: row.family is not Family.STRUCTURAL)

    recipe: Scalify
    keeps_float32: bool = False
    record: Callable[..., None] | None = None
    outputs: Outputs = "arrays"

    @functools.cached_property
    def overrides(self) -> FormatOverrides:  # pyright: ignore
        """The settings' ``keep``, and what of it has been met."""
        return FormatOverrides(self.recipe.keep)

    @functools.cached_property
    def rounding(self) -> ResultRounding:
        """The policy for results."""
        return ResultRounding(self.recipe, self.keeps_float32)

    @property
    def fmt(self) -> Format:
        return self.recipe.format

    @functools.cached_property
    def unrounded(self) -> EveryOp:
        """The interpretation of equations that ``keep`` leaves in float32."""
        plain = dataclasses.replace(self.recipe, keep=(), rescale="max", arithmetic="float32")
        return EveryOp(plain, keeps_float32=True, record=self.record)

    # -- in and out ------------------------------------------------------------------------------

    def lift(self, x: Argument, aval: ShapedArray) -> ScaledValue:
        if self.overrides.keep:
            return self.unrounded.lift(x, aval)
        if self.outputs != "arrays" and has_scale(x):
            mantissa, power = split_power(x.scale.astype(jnp.float32))
            scaled = ScaledValue(x.data.astype(jnp.float32), exponent_of(power))
            factor = jnp.where((mantissa > 0) & jnp.isfinite(mantissa), mantissa, 1)
            scaled = dataclasses.replace(
                scaled, data=scaled.data * (mantissa / factor), factor=factor
            )
            return self.rounding.lifted(scaled if self.rounding.propagates else folded(scaled))
        plain = jnp.asarray(x.value() if is_stored(x) else x)
        return self.rounding.lifted(
            ScaledValue(plain.astype(wide_dtype(plain.dtype))), has_scale=False
        )

    def constant(self, x: np.ndarray, aval: ShapedArray) -> ScaledValue:
        if x.size != 1:
            by = self.unrounded if self.overrides.keep else self
            return by.rounding.rounded(ScaledValue(jnp.asarray(x, jnp.float32)))
        number, exact = float(x), self.keeps_float32 or bool(self.overrides.keep)
        if math.isfinite(number) and not exact:
            top = largest_rounded(self.fmt, wide_dtype(aval.dtype))
            number = max(-top, min(top, number))
        mantissa, exponent = math.frexp(number) if math.isfinite(number) else (number, 0)
        dtype = jnp.float32 if exact else self.rounding.dtype
        data = jnp.full(x.shape, np.float32(mantissa).astype(dtype))
        return ScaledValue(data, exponent, constant_value=number)

    def lower(self, value: Value, aval: ShapedArray) -> jax.Array:
        return materialize(folded(widened(value, wide_dtype(aval.dtype)))).astype(aval.dtype)

    def emit(self, value: Value, aval: ShapedArray, path: str) -> PyTree:
        storage = storage_of(self.recipe.state, path, value.data.size)
        if self.record is not None:
            self.record("output", path, value.shape, [storage.format if storage else aval.dtype])
        if storage is not None:
            return store_array(materialize(folded(widened(value))), storage, aval.dtype)
        if self.outputs == "arrays":
            return self.lower(value, aval)
        return self._scaled_output(value, aval)

    def _scaled_output(self, value: Value, aval: ShapedArray) -> ScaledArray:
        value, by = widened(self.read(self.stack(value, aval))), self.rounding
        value = by.clipped(value) if by.propagates else by.rescaled(value)
        exponent = jnp.asarray(value.exponent, jnp.int32)
        kept = lax.clamp(LOWEST, exponent, HIGHEST)  # beyond it the value isn't a float32 number
        data = value.data.astype(jnp.float32) * power_of_two(
            lax.clamp(LOWEST, exponent - kept, HIGHEST)
        )
        return ScaledArray(data.astype(value.data.dtype), power_of_two(kept) * value.factor)

    # -- where control flow meets ----------------------------------------------------------------

    def canonical(
        self, value: Value, aval: ShapedArray, boundary: Boundary, equation: Equation
    ) -> ScaledValue:
        if boundary == "mapped":  # devices may have different exponents: float32 between them
            return ScaledValue(materialize(folded(widened(self._own(value)))), 0, "forward")
        return self._carried(self.read(self._own(value)))

    def _carried(self, x: ScaledValue) -> ScaledValue:
        """Returns a value of which only the shape is known, as another branch or turn may give."""
        exponent = jnp.asarray(x.exponent, jnp.int32)
        if not self.rounding.propagates:
            return ScaledValue(x.data, exponent, "forward")
        factor = jnp.broadcast_to(jnp.asarray(x.factor, jnp.float32), exponent.shape)
        return ScaledValue(x.data, exponent, "forward", factor=factor)

    def select(
        self, predicate: jax.Array, on_true: ScaledValue, on_false: ScaledValue
    ) -> ScaledValue:
        cases: list[Value] = [folded(widened(self._own(x))) for x in (on_false, on_true)]
        by = self.rounding
        (b, a), exponent = aligned(cases if by.propagates else chosen(predicate, cases), TOP)
        assert exponent is not None
        found = ScaledValue(lax.select(predicate, a.data, b.data), exponent)
        return self._carried(by.rounded(found) if by.propagates else by.rescaled(found))

    def unstack(self, value: Value, aval: ShapedArray) -> ScaledValue:
        value = self.read(value)
        exponent = jnp.broadcast_to(jnp.asarray(value.exponent, jnp.int32), aval.shape[:1])
        return self._carried(dataclasses.replace(value, exponent=exponent))

    def stack(self, value: Value, aval: ShapedArray) -> ScaledValue:
        """Returns a stack of slices, each with an exponent, at the largest of the exponents."""
        if not per_slice(value):
            return value
        exponent = jnp.max(value.exponent, initial=np.int32(ZERO_EXPONENT))
        factor = power_of_two(jnp.clip(value.exponent - exponent, -126, 0))
        if not self.rounding.propagates:
            data = value.data.astype(jnp.float32) * leading(factor, value.data)
            return self.rounding.rescaled(ScaledValue(data, exponent))
        own = jnp.asarray(value.factor, jnp.float32)
        common = jnp.max(jnp.where(value.exponent == exponent, own, 0), initial=1)
        data = value.data.astype(jnp.float32) * leading(factor * own / common, value.data)
        return self.rounding.rounded(ScaledValue(data, exponent, factor=common))

    # -- equations -------------------------------------------------------------------------------

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        fmt = self.overrides.find(equation, self.fmt)
        if fmt is None:
            plain = [folded(widened(x)) if isinstance(x, ScaledValue) else x for x in inputs]
            return self.unrounded.apply(state, equation, plain)
        if fmt != self.fmt:
            own = dataclasses.replace(self.recipe, keep=(), format=fmt)
            other = EveryOp(own, record=self.record)
            return other.apply(state, equation, [other._in_format(x) for x in inputs])
        state, outs = self._applied(state, equation, [self._own(x) for x in inputs])
        if self.record is None:
            return state, outs
        contraction = RULES[equation.name].family is Family.CONTRACTION
        kind, count = ("contraction", 2) if contraction else ("result", 1)
        for y in outs:
            if isinstance(y, ScaledValue) and y.constant_value is None:
                narrow = y.data.dtype == self.rounding.dtype and not self.keeps_float32
                scale = (y.memo.measure or "propagated") if narrow else "none"
                self.record(kind, equation, y.shape, [y.data.dtype] * count, scale)
        return state, outs

    def _applied(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        if not self.keeps_float32:
            self.overrides.warn(equation)
        rule = RULES[equation.name]
        if self.rounding.propagates:  # without an exponent that is found from data
            rule = PROPAGATED.get(equation.name, rule)
        floats = [x for x in inputs if isinstance(x, ScaledValue)]
        mixed = rule.family is Family.CONTRACTION and len(floats) < len(equation.in_avals[:2])
        if mixed or equation.name in COLLECTIVES:
            rule = FALLBACK
        moves = rule.family is Family.STRUCTURAL and len(floats) == 1
        moves_constant = moves and floats[0].constant_value is not None
        if all(map(is_independent, floats)) and not moves_constant:
            return state, self._independent(equation, inputs)
        compares = rule.family is Family.COMPARISON
        contraction = rule.family is Family.CONTRACTION  # whose operands stay narrow
        inputs = [
            self.read(x, exact=compares, splits=not contraction)
            if isinstance(x, ScaledValue)
            else x
            for x in inputs
        ]
        if (moves or equation.name in EXACT) and equation.name != "convert_element_type":
            own = next(x for x in inputs if isinstance(x, ScaledValue))
            if rule is not FALLBACK and not per_slice(own) and not is_rescale(equation):
                return state, self._moved(equation, inputs, own)
        if equation.name in ("mul", "div") and (y := self._by_constant(equation, inputs)):
            return state, [y]
        dtype = widest_dtype(equation)
        stacked = [isinstance(x, ScaledValue) and per_slice(x) for x in inputs]
        wide: list[Value] = [
            widened(x, dtype) if isinstance(x, ScaledValue) and (sliced or not contraction) else x
            for x, sliced in zip(inputs, stacked, strict=True)
        ]
        operands, common = wide, None
        if equation.name == "mul":
            operands = [finite_factor(x) for x in wide]
        factor = 1.0
        if self.rounding.propagates:
            operands, factor = self._factored(equation, rule, operands)
        if equation.name == "select_n" and not self.rounding.propagates:
            wide = [wide[0], *chosen(wide[0], wide[1:])]
        if rule.family in (Family.ALIGNED, Family.COMPARISON):
            adds = equation.name in ADDS
            limit = constant_limit(self.recipe)
            whole = operands if self.rounding.propagates else wide
            bounds = only_bounds(equation, whole) if equation.name in BOUNDS else ()
            operands, common = aligned(whole, limit, masks=not adds, bounds=bounds)
            several = sum(map(has_found_exponent, wide)) > 1
            if several and equation.name in BOUNDS and not self.rounding.propagates:
                (y,) = rule.rule(wide_flight, equation, operands)
                operands, common = aligned(bounding(y, operands, wide), limit)
        outs = self.by_rule(rule, wide_flight, self.multiply, equation, operands)
        family = Family.FALLBACK if any(stacked) else rule.family

        def result(y: ScaledValue, _: ShapedArray) -> ScaledValue:
            y = self.rounding.result(y, equation, family, common, wide)
            return with_factor(y, factor) if self.rounding.propagates else y

        return state, map_floats(result, outs, equation.out_avals)

    def _independent(self, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
        """Computes an equation of constants, integers and random bits without rounding."""
        dtype = widest_dtype(equation)
        plain = [
            materialize(widened(x, dtype)) if isinstance(x, ScaledValue) else x for x in inputs
        ]

        def unrounded(y: jax.Array, aval: ShapedArray) -> ScaledValue:
            return ScaledValue(y.astype(wide_flight(aval)), 0, "forward", independent=True)

        return map_floats(unrounded, rebind(equation, plain, dtype), equation.out_avals)

    def _moved(self, equation: Equation, inputs: Sequence[Value], own: ScaledValue) -> list[Value]:
        """Computes an equation whose results are elements of its operand on the narrow data."""
        data = [x.data if isinstance(x, ScaledValue) else x for x in inputs]
        outs = rebind(equation, data, own.data.dtype)
        constant_value = own.constant_value if equation.name not in EXACT else None
        known: Any = {"bound": bound_of_data(own), "packed": own.packed}
        known["factor"] = own.factor
        known["measured"] = is_measured(own) and keeps_all(equation)

        def moved(y: jax.Array, _: ShapedArray) -> ScaledValue:
            return ScaledValue(y, own.exponent, own.origin, constant_value, **known)

        return map_floats(moved, outs, equation.out_avals)

    def _by_constant(self, equation: Equation, inputs: Sequence[Value]) -> ScaledValue | None:
        """Computes a product whose constant factor changes nothing but sign and scale."""
        pairs = [(inputs[0], inputs[1]), (inputs[1], inputs[0])][: 1 + (equation.name == "mul")]
        for own, other in pairs:
            c = constant_factor(equation, other)
            if c is None or own.constant_value is not None:
                continue
            if own.shape != equation.out_avals[0].shape:
                continue
            mantissa, moved = math.frexp(abs(c))
            if mantissa != 0.5 and not self.rounding.propagates:  # an exponent doesn't hold it
                continue
            exponent = own.exponent + moved - 1
            if not isinstance(exponent, int):  # of zeros it stays below all others
                zeros = exponent < ZERO_EXPONENT // 4
                exponent = jnp.where(zeros, np.int32(ZERO_EXPONENT), exponent)
            known: Any = {"bound": bound_of_data(own), "measured": is_measured(own)}
            data = own.data if c > 0 else -own.data
            y = ScaledValue(data, exponent, own.origin, packed=own.packed, **known)
            return with_factor(y, own.factor * (2 * mantissa))
        return None

    def _factored(
        self, equation: Equation, rule: PrimitiveRule, inputs: Sequence[Value]
    ) -> tuple[list[Value], Factor]:
        """Returns operands without factors, and that of the result."""
        floats = [x for x in inputs if isinstance(x, ScaledValue)]
        factors, over = [x.factor for x in floats], 1.0
        if not any(map(per_slice, floats)):
            match equation.name:
                case "mul":
                    return list(inputs), factors[0] * factors[1]
                case "div":
                    return list(inputs), factors[0] / factors[1]
                case "square":
                    return list(inputs), factors[0] * factors[0]
            if rule.family is Family.CONTRACTION:
                return list(inputs), factors[0] * factors[1]
            if rule.family in LINEAR and len(floats) == 1:
                return list(inputs), factors[0]
            if rule.family is Family.ALIGNED:
                over = larger_factor(floats)
        return [folded(x, over) if isinstance(x, ScaledValue) else x for x in inputs], over

    def _own(self, x: Value) -> Value:
        return self._in_format(x) if self.overrides.keep else x

    def _in_format(self, x: Value) -> Value:
        if not isinstance(x, ScaledValue) or x.data.dtype == self.rounding.dtype:
            return x
        if x.packed or (x.constant_value is None and is_independent(x)):  # rounded where read
            return x
        known, own = x.constant_value is not None, self.rounding
        make = lambda: own.rounded(x) if known else own.lifted(widened(x))  # noqa: E731
        return x.memo.once(("changed", own.dtype), make)

    def read(self, x: ScaledValue, exact: bool = False, splits: bool = False) -> ScaledValue:
        """Returns a value rounded, as an equation that depends on float arguments reads it.

        Args:
            x: the value.
            exact: True if the equation only compares it, which needs no rounding.
            splits: True if the equation may take one matrix of a packed value, which it rounds.
        """
        if splits and x.packed:
            return x
        if x.constant_value is not None or x.data.dtype == self.rounding.dtype or per_slice(x):
            return x
        if self.keeps_float32 and not is_independent(x):
            return x
        if exact and not self.rounding.propagates:
            data, found = scaled_down(x.data, "max", self.fmt)
            return ScaledValue(data, jnp.where(found == ZERO_EXPONENT, found, found + x.exponent))
        purpose = "changed", self.rounding.dtype
        rounded = x.memo.once(purpose, functools.partial(self.rounding.lifted, x))
        return dataclasses.replace(rounded, independent=is_independent(x))

    def multiply(self, equation: Equation, values: Sequence[ScaledValue]) -> ScaledValue:
        """Returns a contraction of operands that are narrow already, accumulated as
        ``recipe.arithmetic`` says."""
        a, b = values
        # without a static scale: the result's is found from the data
        exponent = SCALE_RULES["dot_general"].scale(EXPONENTS, a.exponent, b.exponent, 1)
        dtype, arithmetic = wide_flight(equation.out_avals[0]), self.recipe.arithmetic
        if arithmetic == "float32":
            return ScaledValue(contract(equation, (a.data, b.data), dtype), exponent)
        own = self.rounding.dtype
        narrow = [x.data.astype(own) for x in (a, b)]
        return ScaledValue(rebind(equation, narrow, own)[0].astype(dtype), exponent)


def has_scale(x: object) -> bool:
    if not isinstance(x, ScaledArray) or isinstance(x.data, EncodedArray) or x.block is not None:
        return False
    return isinstance(x.scale, jax.Array) and x.scale.ndim == 0
