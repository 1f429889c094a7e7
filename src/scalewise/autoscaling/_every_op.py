"""The interpretation of ``rounds="every_op"``: each result is narrow, with a scale of its own.

It models a machine without float32: an operation's operands are FP16 or BF16 numbers, its result is
rounded to that format once, and powers of two beside the data keep them in its range. The rules of
each family propagate scales. A scale is found from the data where the recipe says so, or where a
propagated scale could leave the format's range.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .._jax import ShapedArray
from .._types import AxisName, PyTree
from ..formats import Format
from ..interpret import (
    Applied,
    Argument,
    Boundary,
    Equation,
    State,
    Value,
    map_floats,
    outlined,
    rebind,
)
from ..primitives import Family, having
from ..scaled import (
    EXPONENTS,
    HIGHEST,
    LOWEST,
    ZERO_EXPONENT,
    ScaledArray,
    exponent_of,
    power_of_two,
    scaled_down,
    split_power,
)
from ..scaled import RULES as SCALE_RULES
from ._align import aligned, chosen, finite_factor
from ._every_op_value import (
    EXACT,
    EveryOpValue,
    bound_of_data,
    constant_limit,
    is_independent,
    is_nonzero_constant,
    propagated_bound,
    widened,
    widest_dtype,
)
from ._narrow import TakesStored, has_exponent, has_scale, is_stored, store_array
from ._overrides import warn_opaque
from ._predict import terms_of
from ._products import Factor, multiply
from ._propagate import propagating_rule, static_exponent
from ._recipe import Recipe
from ._rescale import is_rescale
from ._rules import FALLBACK, RULES
from ._search import TOP, bound_of, rescaled, rounded, zeros_exponent
from ._value import Exponent, ScaledValue, leading, materialize, per_slice, wide_dtype

# The form of a function's float results: plain arrays, or ScaledArrays with either kind of scale.
Outputs = Literal["arrays", "scales", "exponents"]
# Devices have different exponents, so that they exchange plain numbers.
COLLECTIVES = having("collective")
# Families whose results need the format's whole range (of aligned operands, one may be a mask).
FULL_RANGE = (Family.FALLBACK, Family.POWER, Family.ALIGNED)


@dataclasses.dataclass(frozen=True)
class EveryOp(TakesStored):
    """Rounds each result to ``recipe.residuals``; exponents are int32 numbers at run time.

    A value is ``data * 2**exponent`` with data float16 or bfloat16. Arithmetic on two elements is
    rounded once, as that format's own would be (float32 holds every sum, product, quotient and root
    of its numbers to more than twice its precision, so that rounding a second time changes
    nothing). Contractions and sums accumulate in float32, or as ``recipe.arithmetic`` says.

    Values that depend on no float argument (a random draw from its bits on, an expression of
    constants, a step counter) are computed in float32, and rounded when an operation reads them
    together with a value that does depend on one, or when a loop carries them. Rounded earlier, a
    uniform random number becomes 1 and the normal number made of it infinite.

    A nonzero number is never flushed to zero: an element whose square is lost in a second moment,
    or that is a divisor, would become infinite.
    """

    keeps_float32: ClassVar[bool] = False  # whether results stay unrounded

    recipe: Recipe
    record: Callable[..., None] | None = None
    outputs: Outputs = "arrays"

    @property
    def fmt(self) -> Format:
        assert self.recipe.residuals is not None
        return self.recipe.residuals

    @property
    def dtype(self) -> np.dtype:
        assert self.fmt.dtype is not None
        return self.fmt.dtype

    # -- in and out ------------------------------------------------------------------------------

    def lift(self, x: Argument, aval: ShapedArray) -> ScaledValue:
        if has_exponent(x):
            return self.lifted(ScaledValue(x.data.astype(jnp.float32), x.exponent))
        if self.outputs != "arrays" and has_scale(x):
            mantissa, power = split_power(x.scale.astype(jnp.float32))
            data = x.data.astype(jnp.float32) * mantissa
            return self.lifted(ScaledValue(data, exponent_of(power)))
        plain = jnp.asarray(x.value() if is_stored(x) else x)
        return self.lifted(ScaledValue(plain.astype(wide_dtype(plain.dtype))))

    def lifted(self, x: ScaledValue) -> ScaledValue:
        """Returns a float argument with a scale of its own, or with the one that it came with."""
        return self.clipped(x) if self.propagates else self.rescaled(x, full_range=True)

    @property
    def propagates(self) -> bool:
        """Whether scales follow from operands' scales and from shapes alone, never from data."""
        return self.recipe.rescale == "never"

    def constant(self, x: np.ndarray, aval: ShapedArray) -> ScaledValue:
        if x.size != 1:
            return self.rounded(ScaledValue(jnp.asarray(x, jnp.float32)))
        number = float(x)
        mantissa, exponent = math.frexp(number) if math.isfinite(number) else (number, 0)
        dtype = jnp.float32 if self.keeps_float32 else self.dtype
        data = jnp.full(x.shape, np.float32(mantissa).astype(dtype))
        return EveryOpValue(data, exponent, constant_value=number)

    def lower(self, value: Value, aval: ShapedArray) -> jax.Array:
        return materialize(widened(value, wide_dtype(aval.dtype))).astype(aval.dtype)

    def emit(self, value: Value, aval: ShapedArray, path: str) -> PyTree:
        storage = self.recipe.state_storage(path, value.data.size)
        if self.record is not None:
            self.record("output", path, value.shape, [storage.format if storage else aval.dtype])
        if storage is not None:
            return store_array(materialize(widened(value)), storage)
        if self.outputs == "arrays":
            return self.lower(value, aval)
        return self._scaled_output(value, aval)

    def _scaled_output(self, value: Value, aval: ShapedArray) -> ScaledArray:
        """Returns a result with narrow data, rescaled once more by the recipe's measure."""
        value = widened(self.read(self.stack(value, aval)))
        value = self.clipped(value) if self.propagates else self.rescaled(value)
        exponent = jnp.asarray(value.exponent, jnp.int32)
        if self.outputs == "exponents":
            return ScaledArray.from_exponent(value.data, exponent)
        kept = lax.clamp(LOWEST, exponent, HIGHEST)  # beyond it the value isn't a float32 number
        data = value.data.astype(jnp.float32) * power_of_two(
            lax.clamp(LOWEST, exponent - kept, HIGHEST)
        )
        return ScaledArray(data.astype(value.data.dtype), power_of_two(kept))

    # -- where control flow meets ----------------------------------------------------------------

    def canonical(
        self, value: Value, aval: ShapedArray, boundary: Boundary, equation: Equation
    ) -> ScaledValue:
        if boundary == "mapped":  # devices may have different exponents: float32 between them
            return ScaledValue(materialize(widened(value)), 0, "forward")
        value = self.read(value)
        return ScaledValue(value.data, jnp.asarray(value.exponent, jnp.int32), "forward")

    def select(
        self, predicate: jax.Array, on_true: ScaledValue, on_false: ScaledValue
    ) -> ScaledValue:
        cases: list[Value] = [widened(on_false), widened(on_true)]
        (b, a), exponent = aligned(cases if self.propagates else chosen(predicate, cases), TOP)
        assert exponent is not None
        result = self.rounded(ScaledValue(lax.select(predicate, a.data, b.data), exponent))
        return ScaledValue(result.data, jnp.asarray(exponent, jnp.int32), "forward")

    def unstack(self, value: Value, aval: ShapedArray) -> ScaledValue:
        value = self.read(value)
        exponent = jnp.broadcast_to(jnp.asarray(value.exponent, jnp.int32), aval.shape[:1])
        return ScaledValue(value.data, exponent, value.origin)

    def stack(self, value: Value, aval: ShapedArray) -> ScaledValue:
        """Returns a stack of slices, each with an exponent, at the largest of the exponents."""
        if not per_slice(value):
            return value
        exponent = jnp.max(value.exponent, initial=np.int32(ZERO_EXPONENT))
        factor = power_of_two(jnp.clip(value.exponent - exponent, -126, 0))
        data = value.data.astype(jnp.float32) * leading(factor, value.data)
        return self.rounded(ScaledValue(data, exponent))

    # -- equations -------------------------------------------------------------------------------

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        state, outs = self._applied(state, equation, inputs)
        for y in outs if self.record is not None else ():
            self._recorded(equation, y)
        return state, outs

    def _recorded(self, equation: Equation, y: Value) -> None:
        """Tells ``explain`` of a result, and whether its scale was found or propagated."""
        if self.record is None or not isinstance(y, ScaledValue) or y.constant_value is not None:
            return
        contraction = RULES[equation.name].family is Family.CONTRACTION
        kind, count = ("contraction", 2) if contraction else ("result", 1)
        narrow = y.data.dtype == self.dtype and not self.keeps_float32
        scale = (y.memo.measure or "propagated") if narrow else "none"
        self.record(kind, equation, y.shape, [y.data.dtype] * count, scale)

    def _applied(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        if not self.keeps_float32:
            warn_opaque(equation)
        rule = propagating_rule(equation.name) if self.propagates else RULES[equation.name]
        floats = [x for x in inputs if isinstance(x, ScaledValue)]
        mixed = rule.family is Family.CONTRACTION and len(floats) < len(equation.in_avals[:2])
        if mixed or equation.name in COLLECTIVES:
            rule = FALLBACK
        moves = rule.family is Family.STRUCTURAL and len(floats) == 1
        moves_constant = moves and floats[0].constant_value is not None
        if all(map(is_independent, floats)) and not moves_constant:
            return state, self._independent(equation, inputs)
        compares = rule.family is Family.COMPARISON
        inputs = [self.read(x, exact=compares) if isinstance(x, ScaledValue) else x for x in inputs]
        if (moves or equation.name in EXACT) and equation.name != "convert_element_type":
            own = next(x for x in inputs if isinstance(x, ScaledValue))
            if rule is not FALLBACK and not per_slice(own) and not is_rescale(equation):
                return state, self._moved(equation, inputs, own)
        contraction = rule.family is Family.CONTRACTION  # whose operands stay narrow
        dtype = widest_dtype(equation)
        stacked = [isinstance(x, ScaledValue) and per_slice(x) for x in inputs]
        wide: list[Value] = [
            widened(x, dtype) if isinstance(x, ScaledValue) and (sliced or not contraction) else x
            for x, sliced in zip(inputs, stacked, strict=True)
        ]
        operands, common = wide, None
        if equation.name == "mul":
            operands = [finite_factor(x) for x in wide]
        if equation.name == "select_n" and not self.propagates:
            wide = [wide[0], *chosen(wide[0], wide[1:])]
        if rule.family in (Family.ALIGNED, Family.COMPARISON):
            operands, common = aligned(wide, constant_limit(self.recipe))
        outs = rule.rule(self, equation, operands)
        family = Family.FALLBACK if any(stacked) else rule.family

        def result(y: ScaledValue, _: ShapedArray) -> ScaledValue:
            return self._result(y, equation, family, common, wide)

        return state, map_floats(result, outs, equation.out_avals)

    def _independent(self, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
        """Computes an equation of constants, integers and random bits without rounding."""
        dtype = widest_dtype(equation)
        plain = [
            materialize(widened(x, dtype)) if isinstance(x, ScaledValue) else x for x in inputs
        ]

        def unrounded(y: jax.Array, aval: ShapedArray) -> EveryOpValue:
            return EveryOpValue(y.astype(self.flight_dtype(aval)), 0, "forward", independent=True)

        return map_floats(unrounded, rebind(equation, plain, dtype), equation.out_avals)

    def _moved(self, equation: Equation, inputs: Sequence[Value], own: ScaledValue) -> list[Value]:
        """Computes an equation whose results are elements of its operand on the narrow data."""
        data = [x.data if isinstance(x, ScaledValue) else x for x in inputs]
        outs = rebind(equation, data, own.data.dtype)
        constant_value = own.constant_value if equation.name not in EXACT else None
        bound = bound_of_data(own)

        def moved(y: jax.Array, _: ShapedArray) -> EveryOpValue:
            return EveryOpValue(y, own.exponent, own.origin, constant_value, bound=bound)

        return map_floats(moved, outs, equation.out_avals)

    def read(self, x: ScaledValue, exact: bool = False) -> ScaledValue:
        """Returns a value rounded, as an equation that depends on float arguments reads it.

        Args:
            x: the value.
            exact: True if the equation only compares it, which needs no rounding.
        """
        if x.constant_value is not None or x.data.dtype == self.dtype or per_slice(x):
            return x
        if self.keeps_float32 and not is_independent(x):
            return x
        if exact and not self.propagates:
            data, found = scaled_down(x.data, "max", self.fmt)
            return ScaledValue(data, jnp.where(found == ZERO_EXPONENT, found, found + x.exponent))
        if self.dtype not in x.memo.changed:
            x.memo.changed[self.dtype] = self.lifted(x)
        independent = is_independent(x)
        return dataclasses.replace(x.memo.changed[self.dtype], independent=independent)

    def _result(
        self,
        y: ScaledValue,
        equation: Equation,
        family: Family,
        common: Exponent | None,
        inputs: Sequence[Value],
    ) -> ScaledValue:
        """Returns a rule's result, rounded, with the scale that the recipe asks for."""
        optimizer = equation.direction == "update"
        if common is not None:
            y = ScaledValue(y.data, common)
        if is_rescale(equation):
            return self.rescaled(y)
        if self.propagates:
            static = static_exponent(equation)
            data = y.data * y.data.dtype.type(2.0**-static) if static else y.data
            return self.clipped(dataclasses.replace(y, data=data, exponent=y.exponent + static))
        floats = [x for x in inputs if isinstance(x, ScaledValue)]
        if family in (Family.STRUCTURAL, Family.ORDERED) or y.constant_value is not None:
            return self.rounded(y, max(map(bound_of_data, floats)))
        constant = any(x.constant_value is not None for x in floats)
        if equation.name == "div" and is_nonzero_constant(floats[1]) and not optimizer:
            half = y.data.dtype.type(0.5)  # the constant's data lie above 1/2
            y = ScaledValue(y.data * half, y.exponent + 1)
        bound = propagated_bound(self.recipe, equation, family, floats, constant)
        if bound is None or bound > TOP:
            return self.rescaled(y, full_range=optimizer or family in FULL_RANGE)
        if family is Family.POWER:
            y = dataclasses.replace(y, exponent=zeros_exponent(y.exponent))
        return self.rounded(y, bound)

    @property
    def device(self) -> None:
        """None: products aren't compiled for a device's narrow units."""
        return None

    @property
    def units(self) -> None:
        """None: contractions accumulate as ``recipe.arithmetic`` says."""
        return None

    def to_send(self, value: ScaledValue, axis_name: AxisName, equation: Equation) -> None:
        """Returns None: devices exchange plain numbers."""
        return None

    def flight_dtype(self, aval: ShapedArray) -> DTypeLike:
        """Returns the dtype in which a rule computes a float, before its result is rounded."""
        return wide_dtype(aval.dtype)

    def operands(
        self, equation: Equation, values: Sequence[ScaledValue]
    ) -> tuple[tuple[Factor, Factor], Exponent]:
        """Returns a contraction's operands, which are narrow already, and the result's exponent."""
        a, b = values
        # without a static scale: the result's is found from the data
        exponent = SCALE_RULES["dot_general"].scale(EXPONENTS, a.exponent, b.exponent, 1)
        return ((a.data, None), (b.data, None)), exponent

    def product(
        self, equation: Equation, operands: Sequence[Factor], dtype: DTypeLike
    ) -> jax.Array:
        """Computes a contraction that accumulates as ``recipe.arithmetic`` says."""
        a, b = (x for x, _ in operands if isinstance(x, jax.Array))

        def wide(a, b):
            return multiply(equation, ((a, None), (b, None)), dtype).value()

        def narrow(a, b):
            own = self.dtype
            return rebind(equation, [a.astype(own), b.astype(own)], own)[0].astype(dtype)

        if self.recipe.arithmetic == "float32":
            return wide(a, b)
        if self.recipe.arithmetic == "narrow":
            return narrow(a, b)
        largest = [jnp.max(jnp.abs(x).astype(dtype), initial=0) for x in (a, b)]
        bound = np.float32(terms_of(equation)) * largest[0] * largest[1]
        # half of the maximum, since rounding enlarges sums; a NaN selects the wide product
        return lax.cond(bound <= np.float32(float(self.fmt.max) / 2), narrow, wide, a, b)

    # -- rounding --------------------------------------------------------------------------------

    def rounded(self, x: ScaledValue, bound: int = TOP) -> ScaledValue:
        """Returns the value with its data rounded to the format, once; finite data stay finite.

        Args:
            x: a value with data in the compute dtype.
            bound: log2 of their largest finite magnitude.
        """
        data = x.data
        if data.dtype != self.dtype:
            (data,) = outlined(rounded, (self.fmt, bound > TOP), data.astype(jnp.float32))
        return EveryOpValue(data, x.exponent, x.origin, x.constant_value, bound=min(bound, TOP))

    def clipped(self, x: ScaledValue) -> ScaledValue:
        """Returns the value rounded at its scale; data beyond the format's largest saturate."""
        return self.rounded(x, TOP + 1)

    def rescaled(self, x: ScaledValue, *, full_range: bool = False) -> ScaledValue:
        """Returns the value, rounded once, with an exponent found from the data."""
        measure = self._measure(full_range)
        exponent = jnp.asarray(x.exponent, jnp.int32)
        options = (measure, self.fmt, not self.keeps_float32)
        data, exponent = outlined(rescaled, options, x.data, exponent)
        bound = TOP if self.keeps_float32 else min(bound_of(measure, data.size), TOP)
        y = EveryOpValue(data, exponent, x.origin, bound=bound)
        y.memo.measure = measure
        return y

    def _measure(self, full_range: bool) -> str:
        """Returns the measure by which an exponent is found."""
        # propagated scales assume data of unit size
        if self.recipe.rescale is None and full_range and self.recipe.arithmetic == "float32":
            return "max"
        return "l2" if self.propagates else self.recipe.rescale or "l2"
