"""The table of rules: what each primitive does to (data, exponent) pairs, and which contraction
of floats an equation is.

Where an operation of :mod:`scalewise.scaled` has the same rule, its scale is the same function.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .._check import checked
from .._jax import ShapedArray, jex
from ..formats import format as format_
from ..interpret import Equation, Value, is_float, is_quantization, map_floats, rebind
from ..primitives import PRIMITIVES, Family, names, params
from ..rounding import round_to
from ..scaled import (
    EXPONENTS,
    INVERSE_ROOT,
    KEPT,
    LARGER,
    POWER,
    ROOT,
    UNSCALED,
    ScaleRule,
    combined,
    is_known,
    predicted_size,
)
from ..scaled import RULES as SCALE_RULES
from ._value import Exponent, ScaledValue, materialize, normalised, per_slice, shift, wide_dtype

INFINITE = 126  # log2 of the least constant that stands for an infinity


Flight: TypeAlias = Callable[[ShapedArray], DTypeLike]
"""Returns the dtype in which a float of the program is computed."""
Function = Callable[[Flight, Equation, Sequence[Value]], list[Value]]


def wide_flight(aval: ShapedArray) -> DTypeLike:
    return wide_dtype(aval.dtype)


def _bind(flight: Flight, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
    own = [a for a in equation.in_avals + equation.out_avals if is_float(a)]
    if all(flight(a) == a.dtype for a in own):
        wanted = zip(inputs, equation.in_avals, strict=True)
        return equation.bind(*[_as(x, a.dtype) for x, a in wanted])
    wide = any(a.dtype == jnp.float64 for a in own)
    dtype = jnp.float64 if wide else jnp.float32
    outs = rebind(equation, [_as(x, dtype) for x in inputs], dtype)
    return map_floats(lambda y, a: _as(y, flight(a)), outs, equation.out_avals)


def _as(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    return x.astype(dtype) if is_float(x) and x.dtype != dtype else x


def _floats(inputs: Sequence[Value]) -> list[ScaledValue]:
    return [x for x in inputs if isinstance(x, ScaledValue)]


def wrap(
    equation: Equation,
    outs: Sequence[jax.Array],
    exponent: Exponent = 0,
    constant_value: float | None = None,
) -> list[Value]:
    return map_floats(
        lambda y, _: ScaledValue(y, exponent, constant_value=constant_value),
        outs,
        equation.out_avals,
    )


def fallback(flight: Flight, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
    plain = [materialize(x) if isinstance(x, ScaledValue) else x for x in inputs]
    return wrap(equation, _bind(flight, equation, plain))


def by_scale(
    rule: ScaleRule,
    static: Callable[[Equation], tuple[float, ...]] = lambda _: (),
    prepare: Callable[[ScaledValue, tuple[float, ...]], ScaledValue] = lambda x, _: x,
    *,
    moves: bool = False,
) -> Function:
    """Returns the rule of primitives that compute on what ``rule`` reads of their operands.

    ``static`` returns the rule's degree from the equation, with which ``prepare`` changes each
    operand before; ``moves`` says that results are elements of the operand, equal ones of a
    constant.
    """

    def apply(flight: Flight, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
        floats = _floats(inputs)
        several = rule.reads != "aligned" and any(map(per_slice, floats))
        if rule.reads == "value" or several or (rule is KEPT and len(floats) != 1):
            return fallback(flight, equation, inputs)
        degree = static(equation)
        prepared = [prepare(x, degree) for x in floats]
        data, exponent = combined(rule, EXPONENTS, prepared, *degree)
        given = iter(data)
        plain = [next(given) if isinstance(x, ScaledValue) else x for x in inputs]
        outs = _bind(flight, equation, plain)
        constant_value = floats[0].constant_value if moves else None
        return wrap(equation, outs, exponent, constant_value=constant_value)

    return apply


def remainder(flight: Flight, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
    """Computes a remainder; 0 for a divisor too small to be represented beside the dividend."""
    operands, exponent = combined(LARGER, EXPONENTS, inputs)
    (out,) = _bind(flight, equation, operands)
    unseen = (operands[1] == 0) & (inputs[1].data != 0) & jnp.isfinite(operands[0])
    return wrap(equation, [jnp.where(unseen, jnp.zeros_like(out), out)], exponent)


def _normalised(x: ScaledValue, _: tuple[float, ...]) -> ScaledValue:
    """Returns a constant with its power of two in the exponent, if it would cost range in the data.

    A stand-in for an infinity is unchanged: its exponent would shift other operands out of
    range.
    """
    if x.constant_value is None or x.constant_value == 0 or not math.isfinite(x.constant_value):
        return x
    mantissa, exponent = math.frexp(x.constant_value)
    if -24 <= exponent <= 24 or exponent > INFINITE:
        return x
    return ScaledValue(jnp.full(x.shape, mantissa, x.data.dtype), exponent)


def _degree(equation: Equation) -> tuple[float, ...]:
    return (int(params.degree(equation)),)


propagated_power = by_scale(POWER, _degree)
power = by_scale(POWER, _degree, lambda x, n: normalised(x, 0) if abs(n[0]) > 2 else x)


def root(degree: int, rule: ScaleRule = ROOT) -> Function:
    return by_scale(rule, lambda _: (degree,))


def contractive(slope: float, bounded: bool = False) -> Function:
    """Returns the rule of an odd function whose slope is steepest at zero.

    So ``f(x * 2^e) * 2^-e`` is at most the slope times x's data, which it is where ``x * 2^e``
    is too small for the compute dtype. A bounded function is finite at an infinity.
    """

    def rule(flight: Flight, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
        (x,) = inputs
        exponent = x.exponent
        no_scale = isinstance(exponent, int) and exponent >= 0
        if no_scale or per_slice(x) or x.constant_value is not None:
            return fallback(flight, equation, inputs)
        kept = min(exponent, 0) if isinstance(exponent, int) else jnp.minimum(exponent, 0)
        if bounded and not isinstance(exponent, int):  # an infinity's value needs no scale
            kept = jnp.where(jnp.any(jnp.isinf(x.data)), 0, kept)
        number = materialize(x)
        (y,) = _bind(flight, equation, [number])
        small = lax.abs(number) < number.dtype.type(2.0**-40)
        linear = shift(x.data * number.dtype.type(slope), exponent - kept)
        return wrap(equation, [jnp.where(small, linear, shift(y, -kept))], kept)

    return rule


def ordered(flight: Flight, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
    if any(per_slice(x) for x in _floats(inputs)):
        return fallback(flight, equation, inputs)
    outs = _bind(flight, equation, [x.data if isinstance(x, ScaledValue) else x for x in inputs])
    exponents = [x.exponent if isinstance(x, ScaledValue) else 0 for x in inputs]
    exponents += [0] * (len(outs) - len(exponents))  # top_k also gives indices
    return [
        ScaledValue(y, e) if is_float(a) else y
        for y, a, e in zip(outs, equation.out_avals, exponents, strict=True)
    ]


def product_of_all(flight: Flight, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
    (x,) = inputs
    if not isinstance(x, ScaledValue) or per_slice(x) or not is_known(x.data.size):
        return fallback(flight, equation, inputs)
    x = normalised(x, 0)
    terms = x.data.size // max(1, math.prod(equation.out_avals[0].shape))
    return wrap(equation, _bind(flight, equation, [x.data]), x.exponent * terms)


def select_n(flight: Flight, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
    which, *cases = inputs
    if not _floats(cases):
        return equation.bind(*inputs)
    operands, exponent = combined(LARGER, EXPONENTS, cases)
    dtype = flight(equation.out_avals[0])
    return wrap(equation, [lax.select_n(which, *[_as(x, dtype) for x in operands])], exponent)


def convert(flight: Flight, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
    (x,), (aval,) = inputs, equation.out_avals
    if not isinstance(x, ScaledValue) or not is_float(aval):
        return fallback(flight, equation, inputs)
    dtype = flight(aval)
    if is_quantization(equation):  # the program's own
        return [ScaledValue(_as(round_to(materialize(x), format_(aval.dtype)), dtype))]
    if per_slice(x):
        return fallback(flight, equation, inputs)
    return [ScaledValue(_as(x.data, dtype), x.exponent, constant_value=x.constant_value)]


class Contraction(NamedTuple):
    """A contraction of two values, ``finish`` of whose result is the equation's."""

    equation: Equation
    values: Sequence[ScaledValue]
    finish: Callable[[Value], ScaledValue] | None = None


def contraction_of(equation: Equation, inputs: Sequence[Value]) -> Contraction | None:
    """Returns the contraction of floats that an equation is; None for one on plain numbers.

    Operands of a ``scaled_dot`` in 8 bits keep their own scales; wider ones are those of a
    ``dot_general``.
    """
    finish = None
    match equation.name:
        case "ragged_dot" | "ragged_dot_general":
            a, b, *sizes = inputs
            equation, inputs = equation.bind_last(*sizes), [a, b]
        case "scaled_dot":
            if all(a.dtype.itemsize == 1 for a in equation.in_avals[:2]):
                return None
            a, b, *scales = [materialize(x).astype(jnp.float32) for x in inputs]
            inputs = []
            for x, scale in zip((a, b), scales, strict=True):
                for axis, (n, blocks) in enumerate(zip(x.shape, scale.shape, strict=True)):
                    scale = jnp.repeat(scale, n // blocks, axis)
                inputs.append(ScaledValue(x * scale))
            changed = {"precision": None, "out_sharding": None, **equation.params}
            equation = equation.with_primitive(lax.dot_general_p, changed).with_operands(0, 1)
        case "symmetric_product":
            equation, inputs, finish = _gram(equation, inputs)
    values = with_integers(equation, inputs)
    if not all(isinstance(x, ScaledValue) for x in values):
        return None
    values = [
        dataclasses.replace(x, data=materialize(x), exponent=0) if per_slice(x) else x
        for x in values
    ]
    return Contraction(equation, values, finish)


def _gram(equation: Equation, inputs: Sequence[Value]) -> tuple[Equation, list[Value], Callable]:
    """Returns A A^T of ``lax.linalg.symmetric_product``, alpha A A^T + beta C, and the rest."""
    dtype = wide_dtype(equation.out_avals[0].dtype)
    a, c = (dataclasses.replace(x, data=x.data.astype(dtype)) for x in inputs)
    batch, last = tuple(range(len(a.shape) - 2)), (len(a.shape) - 1,)
    changed = {
        "dimension_numbers": ((last, last), (batch, batch)),
        "precision": None,
        "preferred_element_type": equation.out_avals[0].dtype,
        "out_sharding": None,
    }
    square = equation.with_primitive(lax.dot_general_p, changed).with_operands(0, 0)
    alpha, beta = params.symmetric_factors(equation)

    def finish(product: Value) -> ScaledValue:
        return ScaledValue(alpha * materialize(product.load()) + beta * materialize(c))

    return square, [a, a], finish


def with_integers(equation: Equation, inputs: Sequence[Value]) -> Sequence[Value]:
    """Returns integers beside floats as floats, which are never rounded."""
    avals = equation.in_avals[: len(inputs)]
    real = [jnp.issubdtype(a.dtype, jnp.integer) or a.dtype == bool for a in avals]
    if not any(isinstance(x, ScaledValue) for x in inputs) or not any(real):
        return inputs

    def as_float(x: jax.Array) -> ScaledValue:  # bfloat16 holds all integers of 8 bits
        dtype = jnp.bfloat16 if x.dtype.itemsize == 1 else jnp.float32
        return ScaledValue(jnp.asarray(x).astype(dtype), integers=True)

    return [as_float(x) if exact else x for x, exact in zip(inputs, real, strict=True)]


def features(equation: Equation) -> int:
    """Returns how many features a contraction sums over; a convolution's fewer, in or out."""
    shape = equation.in_avals[1].shape
    if equation.name == "conv_general_dilated":
        return min(shape[a] for a in params.conv_dimensions(equation).rhs_spec[:2])
    return math.prod(shape[a] for a in params.contracted_axes(equation)[1])


def terms_of(equation: Equation) -> int:
    """Returns the number of products that a contraction adds up for each element."""
    left, right = equation.in_avals[:2]
    if equation.name != "conv_general_dilated":
        terms = predicted_size(left.shape[a] for a in params.contracted_axes(equation)[0])
        numbers = params.ragged_dimensions(equation)
        if numbers is None or numbers.rhs_group_dimensions:
            return max(1, terms)
        if not set(numbers.lhs_ragged_dimensions) <= set(params.contracted_axes(equation)[0]):
            return max(1, terms)
        groups = predicted_size(equation.out_avals[0].shape[:1])  # each sums terms of its own
        return max(1, terms // groups)
    out_features = params.conv_dimensions(equation).rhs_spec[0]
    return predicted_size(n for axis, n in enumerate(right.shape) if axis != out_features)


def mixes_freely(equation: Equation) -> bool:
    if equation.name == "conv_general_dilated":
        return params.conv_groups(equation) == (1, 1)
    return equation.name == "dot_general" and bool(params.contracted_axes(equation)[0])


@dataclasses.dataclass(frozen=True)
class PrimitiveRule:
    family: Family
    rule: Function


FALLBACK = PrimitiveRule(Family.FALLBACK, fallback)


class RuleTable(dict[str, PrimitiveRule]):
    def __missing__(self, name: str) -> PrimitiveRule:
        return FALLBACK


# Rules that serve a whole family.
FAMILIES: dict[Family, Function] = {
    Family.STRUCTURAL: by_scale(KEPT, moves=True),
    Family.ALIGNED: by_scale(LARGER),
    Family.HOMOGENEOUS: by_scale(KEPT),
    Family.COMPARISON: by_scale(LARGER),
    Family.INVARIANT: by_scale(UNSCALED),
    Family.ORDERED: ordered,
    Family.CONTRACTION: fallback,  # unless it is a contraction_of floats
    Family.SPARSE: fallback,
}
# Rules of single primitives, which precede their family's.
PARTICULAR: dict[str, Function] = {
    "convert_element_type": convert,
    "rem": remainder,
    "select_n": select_n,
    **{name: by_scale(SCALE_RULES[name], prepare=_normalised) for name in ("mul", "div")},
    "integer_pow": power,
    "square": power,
    "sqrt": root(2),
    "rsqrt": root(2, INVERSE_ROOT),
    "cbrt": root(3),
    "reduce_prod": product_of_all,
    "sin": contractive(1.0),
    "asinh": contractive(1.0),
    "tanh": contractive(1.0, bounded=True),
    "atan": contractive(1.0, bounded=True),
    "erf": contractive(2 / math.sqrt(math.pi), bounded=True),
}


RULES = RuleTable()
for _name, _row in PRIMITIVES.items():
    if _rule := PARTICULAR.get(_name) or FAMILIES.get(_row.family):
        _family = Family.FALLBACK if _row.family is Family.SPARSE else _row.family
        RULES[_name] = PrimitiveRule(_family, _rule)
MULTIPLIES = names(lambda row: row.family is Family.CONTRACTION)
# and operations that contain a contraction
CONTRACTS = MULTIPLIES | {"scaled_dot", "symmetric_product"}


@checked
def register(primitive: jex.Primitive, family: Family) -> None:
    """Gives a primitive of your own the rule of a family, for ``autoscale`` and the audit.

    Without one, a primitive gets plain numbers in float32, which is always right, and its results
    begin with a scale of 1. With one, ``autoscale`` computes it on the data alone and finds the
    result's scale by the family's rule, and the audit knows how a loss scale passes through it.

    Args:
        primitive: any primitive that JAX doesn't define. Its lowering and its derivatives are
            your own.
        family: a family with a rule: ``Family.HOMOGENEOUS`` for ``f(c x) = c f(x)``, c > 0;
            ``STRUCTURAL`` for moved elements of one operand; ``ALIGNED`` for elements or sums of
            several operands; ``INVARIANT`` for ``f(c x) = f(x)``; ``COMPARISON`` for operands at
            one scale, without float results; ``ORDERED`` for sorts.

    Raises:
        ValueError: a family without a rule of its own, or a primitive of JAX.
    """
    if primitive.name in PRIMITIVES:
        raise ValueError(f"register: {primitive.name!r} is a primitive of JAX, which has its rule")
    allowed = [f for f in FAMILIES if f not in (Family.CONTRACTION, Family.SPARSE)]
    if family not in allowed:
        names = ", ".join(f"Family.{f.name}" for f in allowed)
        raise ValueError(f"register: no rule serves all of Family.{family.name}; expected {names}")
    RULES[primitive.name] = PrimitiveRule(family, FAMILIES[family])
