"""The rules of families of primitives on (data, exponent) pairs.

A primitive without a rule is computed on plain numbers in the compute dtype (``Family.FALLBACK``),
which is always right within that dtype's range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .._jax import ShapedArray
from ..formats import format as format_
from ..interpret import (
    Equation,
    Value,
    is_float,
    is_quantization,
    map_floats,
    rebind,
)
from ..primitives import params
from ..rounding import round_to
from ..scaled import (
    EXPONENTS,
    KEPT,
    LARGER,
    POWER,
    ROOT,
    RULES,
    UNSCALED,
    ScaleRule,
    combined,
    is_known,
)
from ._value import (
    Exponent,
    ScaledValue,
    materialize,
    normalised,
    per_slice,
    shift,
    wide_dtype,
)

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


structural = by_scale(KEPT, moves=True)
homogeneous = by_scale(KEPT)
aligned = by_scale(LARGER)
invariant = by_scale(UNSCALED)


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


def _in_range(x: ScaledValue, degree: tuple[float, ...]) -> ScaledValue:
    return normalised(x, 0) if abs(degree[0]) > 2 else x


def product(name: str) -> Function:
    return by_scale(RULES[name], prepare=_normalised)


propagated_power = by_scale(POWER, _degree)
power = by_scale(POWER, _degree, _in_range)


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
