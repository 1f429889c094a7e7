"""Exponents of results and operands, found from data or propagated, and how results are rounded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ..formats import Format
from ..interpret import Equation, Value, is_float, outlined
from ..primitives import Family, having, names
from ..scaled import (
    HIGHEST,
    LOWEST,
    ZERO_EXPONENT,
    exponent_of,
    is_known,
    power_of_two,
    predicted_size,
    scaled_down,
    split_power,
    static_scale,
)
from ._rules import INFINITE, terms_of
from ._settings import Scalify
from ._value import (
    TOP,
    Exponent,
    Factor,
    Memo,
    ScaledValue,
    largest_rounded,
    leading,
    wide_dtype,
)

SCOPE = "scalewise.rescale"


@jax.custom_jvp
def rescale(x: jax.Array) -> jax.Array:
    """Returns ``x``; under :func:`scalify`, finds its scale from data in the forward pass.

    Use it where scales are only propagated and a program's numbers leave unit size, for example
    after many products. The scale is found by the measure that ``rescale`` names, or by the root
    mean square. The gradient passes unchanged.

    Args:
        x: an array of floats.

    Example:
        >>> import jax.numpy as jnp, scalewise as sw
        >>> float(sw.scalify(lambda x: rescale(x * x))(jnp.float32(3)))
        9.0
    """
    return _marked(x)


@rescale.defjvp
def _(primals, tangents):
    return _marked(primals[0]), tangents[0]


@jax.custom_vjp
def rescale_gradient(x: jax.Array) -> jax.Array:
    """Returns ``x``; the scale of its gradient is found from the data, as by :func:`rescale`."""
    return x


rescale_gradient.defvjp(lambda x: (x, None), lambda _, gradient: (_marked(gradient),))


def _marked(x: jax.Array) -> jax.Array:
    with jax.named_scope(SCOPE):
        return jnp.copy(x)


def is_rescale(equation: Equation) -> bool:
    return equation.name.startswith("copy") and SCOPE in equation.scope


MASK = 20  # log2 of the least constant that is taken for a mask, such as -1e9
NEAR = 9  # log2 of how much larger than the others it may be without being taken for one


def aligned(
    inputs: Sequence[Value], limit: int, *, masks: bool = True, bounds: Sequence[bool] = ()
) -> tuple[list[Value], Exponent | None]:
    """Returns float operands with exponent 0, and what was taken off them; None without floats.

    ``bounds`` says of which operands no element makes the result larger: they don't count.

    Constants count like any other operand, or their data, below ``2**limit``, would overflow. One
    that may stand for an infinity (a mask, or an array made of constants and integers alone) is
    clipped at 2^20 if it is beyond that and beyond 2^9 times the others' largest number: the others
    would vanish beside it. Without ``masks`` none is, since each element of the result depends on
    it.
    """
    floats = [x for x in inputs if isinstance(x, ScaledValue)]
    if not floats:
        return list(inputs), None
    counted = [x for i, x in enumerate(inputs) if not (bounds and bounds[i])]
    counted = [x for x in counted if isinstance(x, ScaledValue)]
    wanted = [(_wanted(x, limit), may_be_mask(x, constants=masks)) for x in counted]
    largest = _largest([e for e, mask in wanted if not mask])
    infinite = _largest([e for e, mask in wanted if mask])
    common: Exponent = 0 if largest is None else largest
    if infinite is not None:
        common = infinite if largest is None else _beside_mask(largest, infinite)
    return [_down_to(x, common) if isinstance(x, ScaledValue) else x for x in inputs], common


def only_bounds(equation: Equation, inputs: Sequence[Value]) -> list[bool]:
    """Returns which operands are constants that can't make the result larger than the others.

    The smaller of a number and 1 is no larger than the number, whatever its exponent.
    """
    side = 1 if equation.name == "min" else -1
    sign = (-1, 0, 1) if equation.name == "clamp" else (side, side)
    constants = (getattr(x, "constant_value", None) for x in inputs)
    own = zip(constants, sign, strict=True)
    return [s != 0 and c is not None and c * s >= 0 for c, s in own]


def _largest(exponents: Sequence[Exponent | None]) -> Exponent | None:
    known = [e for e in exponents if isinstance(e, int)]
    common: Exponent | None = max(known, default=None)
    for exponent in exponents:
        if exponent is not None and not isinstance(exponent, int):
            common = exponent if common is None else lax.max(jnp.int32(common), exponent)
    return common


def _beside_mask(largest: Exponent, mask: Exponent) -> Exponent:
    if isinstance(largest, int) and isinstance(mask, int):
        return max(largest, mask if mask - largest <= NEAR else min(mask, MASK - TOP))
    largest, mask = jnp.int32(largest), jnp.int32(mask)
    ordinary = (mask - largest <= NEAR) | (largest == ZERO_EXPONENT)
    return lax.max(largest, jnp.where(ordinary, mask, lax.min(mask, np.int32(MASK - TOP))))


def chosen(which: jax.Array, cases: Sequence[Value]) -> list[Value]:
    """Returns the cases of a selection such that one without a chosen element has no exponent.

    Otherwise numbers of any size that a program computes and discards (a series where it diverges)
    would flush those that it keeps.
    """

    def one(number: int, x: ScaledValue) -> ScaledValue:
        if not has_found_exponent(x):
            return x
        used = jnp.any(which == which.dtype.type(number))
        exponent = jnp.where(used, x.exponent, np.int32(ZERO_EXPONENT))
        return dataclasses.replace(x, exponent=exponent)

    floats = [x for x in cases if isinstance(x, ScaledValue)]
    if sum(_wanted(x, TOP) is not None for x in floats) < 2:  # beside zeros and infinities
        return list(cases)
    return [one(i, x) if isinstance(x, ScaledValue) else x for i, x in enumerate(cases)]


def bounding(y: Value, operands: Sequence[Value], cases: Sequence[Value]) -> list[Value]:
    """Returns the operands of a minimum, maximum or clamp such that unused ones have no exponent.

    An operand is unused if the result has no nonzero element of it: the loss so far that begins
    with the largest number, say. Its elements become infinities on that side of the result where
    they are, which lose against the others as they did before.

    Args:
        y: the result, of the operands at one exponent.
        operands: the operands at that exponent.
        cases: the operands.
    """

    def one(aligned: Value, x: Value) -> Value:
        if not has_found_exponent(x):
            return x
        whole = jnp.broadcast_to(aligned.data, y.data.shape)  # a clamp's bounds may be scalars
        nonzero = jnp.broadcast_to(x.data != 0, y.data.shape)
        used = jnp.any((whole == y.data) & nonzero)
        above = whole > y.data
        above = above if x.data.shape == above.shape else jnp.any(above)
        infinite = jnp.where(above, np.inf, -np.inf).astype(x.data.dtype)
        infinite = jnp.where((x.data == 0) | jnp.isnan(x.data), x.data, infinite)
        exponent = jnp.where(used, x.exponent, np.int32(ZERO_EXPONENT))
        return dataclasses.replace(x, data=jnp.where(used, x.data, infinite), exponent=exponent)

    return [one(a, x) for a, x in zip(operands, cases, strict=True)]


def has_found_exponent(x: Value) -> bool:
    """Returns whether a value's one exponent was found at run time."""
    return (
        isinstance(x, ScaledValue)
        and not isinstance(x.exponent, int)
        and not jnp.ndim(x.exponent)
        and x.constant_value is None
    )


def _wanted(x: ScaledValue, limit: int) -> Exponent | None:
    """Returns an operand's exponent; of a constant, that at which its data are below
    ``2**limit``."""
    if x.constant_value is None:
        return x.exponent if isinstance(x.exponent, int) else jnp.int32(x.exponent)
    if not x.constant_value or not math.isfinite(x.constant_value):
        return None
    return math.frexp(x.constant_value)[1] - limit


def may_be_mask(x: ScaledValue, *, constants: bool = True) -> bool:
    if x.constant_value is not None:
        return constants and 2.0**MASK <= abs(x.constant_value) < math.inf
    return x.independent


def finite_factor(x: Value) -> Value:
    """Returns a factor that stands for an infinity as 2^MASK: a sum with it keeps leading bits."""
    if (
        not isinstance(x, ScaledValue)
        or x.constant_value is None
        or not math.isfinite(x.constant_value)
    ):
        return x
    if abs(x.constant_value) < 2.0 ** (1016 if x.data.dtype == jnp.float64 else INFINITE):
        return x
    far = math.copysign(2.0**MASK, x.constant_value)
    return ScaledValue(jnp.full_like(x.data, math.copysign(0.5, far)), MASK + 1, constant_value=far)


def _down_to(x: ScaledValue, common: Exponent) -> ScaledValue:
    """Returns ``x`` with its data divided by ``2**(common - exponent)``, exponent 0.

    ``common`` is at least the operand's own exponent. Data below 2^-126 of the other operand become
    zero rather than a subnormal remainder. A mask is clipped to the format's range.
    """
    down, dtype = x.exponent - common, x.data.dtype
    # in two steps: an infinity times zero would be NaN
    if isinstance(down, int):
        first = max(-126, min(126, down))
        data = x.data * dtype.type(2.0**first)
        data = data * dtype.type(2.0 ** max(-126, down - first)) if down < first else data
    else:
        first = lax.clamp(LOWEST, down, HIGHEST)
        rest = lax.clamp(LOWEST, down - first, np.int32(0))
        data = x.data * power_of_two(first).astype(dtype) * power_of_two(rest).astype(dtype)
    if may_be_mask(x):
        data = clipped(data, 2.0**TOP)
    return ScaledValue(data, 0)


def folded(x: ScaledValue, over: Factor = 1.0) -> ScaledValue:
    """Returns the value with its factor, divided by ``over``, in the data, which become float32."""
    factor = x.factor
    if isinstance(factor, float) and isinstance(over, float):
        ratio = factor / over
    else:
        ratio = 1.0 if factor is over else jnp.float32(factor) / jnp.float32(over)
    x = dataclasses.replace(x, factor=1.0)
    if isinstance(ratio, float) and ratio == 1:
        return x
    x = widened(x, wide_dtype(x.data.dtype))
    ratio = jnp.asarray(ratio, x.data.dtype)
    return dataclasses.replace(x, data=x.data * leading(ratio, x.data))


def with_factor(x: ScaledValue, factor: Factor) -> ScaledValue:
    """Returns the value with a positive factor, whose power of two goes to the exponent."""
    if isinstance(factor, float):
        half, moved = math.frexp(factor)
        return dataclasses.replace(x, exponent=x.exponent + (moved - 1), factor=2 * half)
    mantissa, power = split_power(jnp.asarray(factor))
    return dataclasses.replace(x, exponent=x.exponent + exponent_of(power), factor=mantissa)


def larger_factor(values: Sequence[ScaledValue]) -> Factor:
    """Returns the factor of the value with the largest scale, constants apart."""
    exponent, factor = None, 1.0
    for x in values:
        if x.constant_value is not None:
            continue
        if exponent is None:
            exponent, factor = x.exponent, x.factor
        elif all(isinstance(v, int | float) for v in (exponent, factor, x.exponent, x.factor)):
            exponent, factor = max((exponent, factor), (x.exponent, x.factor))
        else:
            higher = jnp.asarray(x.exponent > exponent)
            higher |= (x.exponent == exponent) & (jnp.asarray(x.factor) > factor)
            exponent = jnp.where(higher, x.exponent, exponent)
            factor = jnp.where(higher, jnp.float32(x.factor), jnp.float32(factor))
    return factor


def rescaled(options: tuple, data: jax.Array, exponent: jax.Array) -> list[jax.Array]:
    """Returns data with an exponent found from them; in float32, unless they are rounded, once."""
    measure, fmt, rounds = options
    down, found = scaled_down(data, measure, fmt)
    exponent = jnp.where(found == ZERO_EXPONENT, found, found + exponent)
    if not rounds:
        return [down, exponent]
    clip = bound_of(measure, data.size) > TOP
    return [to_format(down, data.astype(jnp.float32), fmt, clip=clip), exponent]


def rounded(options: tuple, data: jax.Array) -> list[jax.Array]:
    fmt, clip = options
    return [to_format(data, data, fmt, clip=clip)]


def bound_of(measure: str, size: int) -> int:
    """Returns log2 of the largest magnitude of ``size`` data after :func:`scaled_down`."""
    if measure == "l2" and is_known(size):  # one element may hold the whole sum of squares
        return 1 + math.ceil(math.log2(max(1, size)) / 2)
    return TOP if measure == "max" else TOP + 1


def to_format(data: jax.Array, signs: jax.Array, fmt: Format, *, clip: bool) -> jax.Array:
    """Rounds float32 data to the nearest numbers of FP16 or BF16, in its dtype.

    FP16's subnormals are kept. A number too small for them becomes the smallest one rather than
    zero, since it may be a divisor or the argument of a logarithm. Its sign is that of the number
    in ``signs``, the array before it was scaled down. Rounds by
    ``reduce_precision``, which flushes subnormals, since XLA drops a convert there and back.
    With ``clip``, finite data may exceed the format's largest number, and become that.
    """
    if clip:
        data = clipped(data, float(fmt.max))
    whole = lax.reduce_precision(data, fmt.exponent_bits, fmt.mantissa_bits)
    if fmt.exponent_bits == 8:
        return whole.astype(fmt.dtype)
    size, unit = lax.abs(data), np.float32(float(fmt.smallest))
    few = lax.round(data * np.float32(1 / unit), lax.RoundingMethod.TO_NEAREST_EVEN) * unit
    few = lax.select(size < unit, lax.sign(signs).astype(jnp.float32) * unit, few)
    return lax.select(size < np.float32(float(fmt.smallest_normal)), few, whole).astype(fmt.dtype)


def clipped(data: jax.Array, top: float) -> jax.Array:
    limit = data.dtype.type(top)
    infinite = lax.abs(data) == data.dtype.type(np.inf)
    return lax.select(infinite, data, lax.clamp(-limit, data, limit))


def constant_factor(equation: Equation, x: ScaledValue) -> float | None:
    """Returns the factor that a constant is, or that its inverse is; None for 0 and infinities."""
    c = x.constant_value
    if not c or not math.isfinite(c) or finite_factor(x) is not x:
        return None
    return c if equation.name == "mul" else 1 / c


def zeros_exponent(exponent: Exponent) -> jax.Array:
    """Returns :data:`ZERO_EXPONENT` for an exponent that roots or powers have made of it."""
    beyond = lax.abs(jnp.int32(exponent)) > -ZERO_EXPONENT // 4
    return jnp.where(beyond, np.int32(ZERO_EXPONENT), jnp.int32(exponent))


# Operations whose results are numbers of the format if their operand's elements are.
EXACT = having("exact") & names(lambda row: row.family is Family.HOMOGENEOUS)
KEEPS_SCALE = having("keeps_scale") | EXACT
# Operations among these whose results may be much smaller than an operand.
BOUNDED = having("selects")
BOUNDS = BOUNDED - {"select_n"}  # the elements determine which of them are chosen
ADDS = having("adds")
KEEPS_ALL = names(lambda row: row.family is Family.STRUCTURAL) - having("drops") | {"neg", "abs"}


def keeps_all(equation: Equation) -> bool:
    """Returns whether each element of the operand is one of the result."""
    return equation.name in KEEPS_ALL and len(equation.out_avals) == 1


def is_independent(x: ScaledValue) -> bool:
    return x.constant_value is not None or x.independent


def is_measured(x: ScaledValue) -> bool:
    return x.constant_value is not None or x.measured


def bound_of_data(x: ScaledValue) -> int:
    """Returns log2 of the largest finite data; a constant's are between 1/2 and 1."""
    return x.bound if x.constant_value is None else 0


def is_nonzero_constant(x: ScaledValue) -> bool:
    return bool(x.constant_value) and math.isfinite(x.constant_value or 0)


def widest_dtype(equation: Equation) -> DTypeLike:
    own = [a.dtype for a in equation.in_avals + equation.out_avals if is_float(a)]
    return jnp.float64 if np.dtype("float64") in own else jnp.float32


def widened(x: ScaledValue, dtype: DTypeLike = jnp.float32) -> ScaledValue:
    return dataclasses.replace(x, data=x.data.astype(dtype), memo=Memo())


def propagated_bound(
    settings: Scalify,
    equation: Equation,
    family: Family,
    floats: Sequence[ScaledValue],
) -> int | None:
    """Returns log2 of a result's largest data; None if its scale is to be found from the data.

    Propagated scales suffice if the operands' sizes determine the result's: for a product, or
    the sum of two. Sums of many, products of matrices, quotients and functions without a rule
    are smaller than any bound by an unknown factor: a chain of such operations left data at a
    thousandth of unit size, and gradients were lost.

    A product or a sum may be smaller than its bound, too, though only by what its operands are.
    Its scale is therefore propagated only from scales that were found from their operands' data:
    no two roundings in succession are at propagated scales, and nothing drifts in a chain or loop.
    """
    name = equation.name
    bounds = [
        bound_aligned(settings, x) if family is Family.ALIGNED else bound_of_data(x) for x in floats
    ]
    if any(x.packed for x in floats):
        return None
    several = sum(x.constant_value is None for x in floats) > 1
    nonzero = list(filter(is_nonzero_constant, floats))
    bounds_all = nonzero if name in BOUNDS else [x for x in nonzero if not may_be_mask(x)]
    random = any(x.constant_value is None and is_independent(x) for x in floats)
    if name in BOUNDED and (several or bounds_all or random):
        # the chosen elements determine its scale: at a huge x's, clip(x, -1, 1), where(ok, x, 1)
        # and minimum(x, y) would lose 1 and y
        return None
    if family is Family.INVARIANT:
        return 0
    # beside zeros alone the result is the operand's elements
    alone = sum(x.constant_value != 0 for x in floats) < 2
    if not all(map(is_measured, floats)) and not (name in KEEPS_SCALE and alone):
        return None
    if name in KEEPS_SCALE:
        return max(bounds)
    if name == "mul" and any(x.constant_value is not None for x in floats):
        return sum(bounds)
    if name == "div" and is_nonzero_constant(floats[1]) and equation.direction != "update":
        return bounds[0]
    if settings.rescale is not None:
        return None
    match name:
        case "mul":
            return sum(bounds)
        case _ if name in ADDS:
            return max(bounds) + 1
        case "sqrt" | "cbrt":
            return max(bounds) // 2 + 2
    return None


def constant_limit(settings: Scalify) -> int:
    return 14 if settings.rescale == "max" else 7


def bound_aligned(settings: Scalify, x: ScaledValue) -> int:
    if not x.constant_value or not math.isfinite(x.constant_value):
        return bound_of_data(x) if x.constant_value is None else 0
    return TOP if abs(x.constant_value) >= 2.0**MASK else constant_limit(settings)


# Families whose results need the format's whole range (of aligned operands, one may be a mask).
FULL_RANGE = (Family.FALLBACK, Family.POWER, Family.ALIGNED)
PACKED = having("packed")


def static_exponent(equation: Equation) -> int:
    """Returns log2 of the static scale of a sum: sqrt(n), rounded, for n terms; else 0."""
    if equation.name in ("dot_general", "conv_general_dilated"):
        terms = terms_of(equation)
    elif equation.name == "reduce_sum":
        whole, rest = equation.in_avals[0].shape, equation.out_avals[0].shape
        terms = predicted_size(whole) // predicted_size(rest)
    else:
        return 0
    return math.frexp(static_scale(terms))[1] - 1


@dataclasses.dataclass(frozen=True)
class ResultRounding:
    """The policy for results: each is rounded once, and its scale found or propagated.

    Attributes:
        settings: the format, and where scales are found.
        keeps_float32: whether results stay unrounded, by the same rules.
    """

    settings: Scalify
    keeps_float32: bool = False

    @property
    def fmt(self) -> Format:
        return self.settings.format

    @property
    def dtype(self) -> np.dtype:
        assert self.fmt.dtype is not None
        return self.fmt.dtype

    @property
    def propagates(self) -> bool:
        """Whether scales follow from operands' scales and from shapes alone, never from data."""
        return self.settings.rescale == "never"

    def lifted(self, x: ScaledValue, *, has_scale: bool = True) -> ScaledValue:
        if isinstance(x.exponent, int) and x.exponent == 0 and not self.keeps_float32:
            top = largest_rounded(self.fmt, x.data.dtype)
            x = dataclasses.replace(x, data=clipped(x.data, top))
        if self.propagates and has_scale:
            return self.clipped(x)
        return self.rescaled(x, full_range=not self.propagates)

    def result(
        self,
        y: ScaledValue,
        equation: Equation,
        family: Family,
        common: Exponent | None,
        inputs: Sequence[Value],
    ) -> ScaledValue:
        optimizer = equation.direction == "update"
        if common is not None:
            y = ScaledValue(
                y.data, common, constant_value=y.constant_value if self.keeps_float32 else None
            )
        if self.keeps_float32:
            return y if y.constant_value is not None else self.rescaled(y)
        if equation.name in PACKED:
            if not self.propagates:
                y = dataclasses.replace(self, keeps_float32=True).rescaled(y)
            return ScaledValue(y.data, y.exponent, y.origin, packed=True)
        if is_rescale(equation):
            return self.rescaled(y)
        if self.propagates:
            static = static_exponent(equation)
            data = y.data * y.data.dtype.type(2.0**-static) if static else y.data
            exponent = y.exponent + static
            if family in (Family.PRODUCT, Family.POWER) and not isinstance(exponent, int):
                exponent = zeros_exponent(exponent)
            return self.clipped(dataclasses.replace(y, data=data, exponent=exponent))
        floats = [x for x in inputs if isinstance(x, ScaledValue)]
        if family in (Family.STRUCTURAL, Family.ORDERED) or y.constant_value is not None:
            bound = max(map(bound_of_data, floats))
            return self.rounded(
                y, bound, measured=keeps_all(equation) and all(map(is_measured, floats))
            )
        if equation.name == "div" and is_nonzero_constant(floats[1]) and not optimizer:
            half = y.data.dtype.type(0.5)  # the constant's data lie above 1/2
            y = ScaledValue(y.data * half, y.exponent + 1)
        bound = propagated_bound(self.settings, equation, family, floats)
        if bound is None or bound > TOP:
            return self.rescaled(y, full_range=optimizer or family in FULL_RANGE)
        if family is Family.POWER:
            y = dataclasses.replace(y, exponent=zeros_exponent(y.exponent))
        return self.rounded(y, bound)

    def rounded(self, x: ScaledValue, bound: int = TOP, *, measured: bool = False) -> ScaledValue:
        """Returns the value rounded once; finite data, below ``2**bound``, stay finite."""
        if self.keeps_float32:
            return x
        data = x.data
        if data.dtype != self.dtype:
            (data,) = outlined(rounded, (self.fmt, bound > TOP), data.astype(jnp.float32))
        known: Any = {"bound": min(bound, TOP), "measured": measured, "factor": x.factor}
        return ScaledValue(data, x.exponent, x.origin, x.constant_value, **known)

    def clipped(self, x: ScaledValue) -> ScaledValue:
        """Returns the value rounded at its scale; data beyond the format's largest saturate."""
        return self.rounded(x, TOP + 1)

    def rescaled(self, x: ScaledValue, *, full_range: bool = False) -> ScaledValue:
        measure = self._measure(full_range)
        exponent = jnp.asarray(x.exponent, jnp.int32)
        options = (measure, self.fmt, not self.keeps_float32)
        data, exponent = outlined(rescaled, options, x.data, exponent)
        bound = TOP if self.keeps_float32 else min(bound_of(measure, data.size), TOP)
        known: Any = {"bound": bound, "measured": True, "factor": x.factor}
        y = ScaledValue(data, exponent, x.origin, **known)
        y.memo.measure = measure
        return y

    def _measure(self, full_range: bool) -> str:
        # propagated scales assume data of unit size
        if self.settings.rescale is None and full_range and self.settings.arithmetic == "float32":
            return "max"
        return "l2" if self.propagates else self.settings.rescale or "l2"
