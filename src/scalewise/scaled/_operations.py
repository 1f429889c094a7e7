"""Elementwise operations and casts from ScaledArrays to ScaledArrays.

Each operand is a ScaledArray, an array (scale 1) or a number (its power of two is its scale). The
result's scale follows the rule in the docstring (:data:`scalewise.scaled.RULES`); its data are
computed in float32 (float64 for float64), rounded once to the operands' dtype, and never read to
find the scale. An operand with a scale for each channel or block, or in codes, is first brought to
its largest scale.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .. import rounding as _rounding
from .._check import checked, checked_axes
from .._resolve import as_format
from ..formats import FormatLike, RoundingMode, Saturation
from ._array import ScaledArray
from ._rules import (
    BESIDE,
    EXPONENTS,
    FACTORS,
    RULES,
    applied,
    combined,
    common_dtype,
    operands,
    scaled_result,
)

Operand = ScaledArray | ArrayLike
SUM_RULES = {"max": RULES["add"], "l2": BESIDE}


def _of_one(
    name: str, f: Callable[[jax.Array], jax.Array], returns: str, *degree: int
) -> Callable[[Operand], ScaledArray]:
    """Returns an operation on one operand, with a rule's ``degree`` if that has one."""

    def operation(a: Operand) -> ScaledArray:
        return applied(name, f, a, static=degree)

    formula = RULES[name].formula.replace("sA^(1/n)", "sqrt(sA)").replace("^n", "^2")
    scale = f"``{formula}``" if formula != "1" else "1, computed from the value in float32"
    operation.__name__ = operation.__qualname__ = name
    operation.__doc__ = f"Returns {returns} with the scale {scale}."
    return checked(operation)


neg = _of_one("neg", jnp.negative, "``-a``")
abs = _of_one("abs", jnp.abs, "magnitudes")
relu = _of_one("relu", jax.nn.relu, "``max(a, 0)``")
square = _of_one("square", jnp.square, "``a^2``", 2)
sqrt = _of_one("sqrt", jnp.sqrt, "square roots", 2)
rsqrt = _of_one("rsqrt", lax.rsqrt, "inverse square roots", 2)
exp = _of_one("exp", jnp.exp, "the exponential")
tanh = _of_one("tanh", jnp.tanh, "the hyperbolic tangent")
sigmoid = _of_one("sigmoid", jax.nn.sigmoid, "the logistic function")
erf = _of_one("erf", jax.scipy.special.erf, "the error function")
sin = _of_one("sin", jnp.sin, "the sine")
cos = _of_one("cos", jnp.cos, "the cosine")


@checked
def add(a: Operand, b: Operand, *, rule: Literal["max", "l2"] = "max") -> ScaledArray:
    """Returns ``a + b`` with the scale ``max(sA, sB)``.

    The data of the operand with the smaller scale are scaled down. Their sum may exceed the
    format's largest number where both are near it.

    Args:
        a, b: operands whose shapes broadcast.
        rule: ``"l2"`` for ``sqrt(sA^2 + sB^2)`` rounded down to a power of two, the size of a sum
            of independent numbers, as jax-scalify has it.

    Example:
        >>> y = add(ScaledArray(jnp.float16([1, 2]), 8.0), ScaledArray(jnp.float16([1, 1]), 2.0))
        >>> y.data.tolist(), float(y.scale)
        ([1.25, 2.25], 8.0)
    """
    return applied(SUM_RULES[rule], jnp.add, a, b, name="add")


@checked
def sub(a: Operand, b: Operand, *, rule: Literal["max", "l2"] = "max") -> ScaledArray:
    """Returns ``a - b`` with the scale ``max(sA, sB)``; arguments as for :func:`add`."""
    return applied(SUM_RULES[rule], jnp.subtract, a, b, name="sub")


@checked
def mul(a: Operand, b: Operand) -> ScaledArray:
    """Returns ``a * b`` with the scale ``sA sB``.

    A number goes into the scale with its power of two; its mantissa multiplies the data.
    """
    return applied("mul", jnp.multiply, a, b)


@checked
def div(a: Operand, b: Operand) -> ScaledArray:
    """Returns ``a / b`` with the scale ``sA / sB``; a zero divisor gives infinities or NaN."""
    x, y = operands("div", a, b)
    if y.algebra is FACTORS:  # a scale of 0 is a zero divisor
        zero = y.scale == 0
        data, scale = jnp.where(zero, 0, y.data), jnp.where(zero, 1, y.scale)
        y = dataclasses.replace(y, data=data, scale=scale)
    data, scale = combined(RULES["div"], x.algebra, [x, y])
    return scaled_result(data[0] / data[1], scale, x.algebra, common_dtype(x, y))


@checked
def maximum(a: Operand, b: Operand) -> ScaledArray:
    """Returns the larger of each two elements with the scale ``max(sA, sB)``.

    A zero array (a scale of 0) leaves the other's scale unchanged, so that ``maximum(a, 0)`` is
    :func:`relu`.
    """
    return applied("maximum", jnp.maximum, a, b)


@checked
def minimum(a: Operand, b: Operand) -> ScaledArray:
    """Returns the smaller of each two elements with the scale ``max(sA, sB)``."""
    return applied("minimum", jnp.minimum, a, b)


@checked
def where(condition: ArrayLike, a: Operand, b: Operand) -> ScaledArray:
    """Returns ``a`` where the condition holds, else ``b``, with the scale ``max(sA, sB)``."""
    return applied("where", lambda x, y: jnp.where(condition, x, y), a, b)


@checked
def concatenate(xs: Sequence[Operand], axis: int = 0) -> ScaledArray:
    """Returns the arrays joined along an axis with the largest of their scales."""
    if not xs:
        raise ValueError("concatenate: expected at least one array")
    checked_axes("concatenate", axis, len(jnp.shape(xs[0])))
    return applied("concatenate", lambda *data: jnp.concatenate(data, axis), *xs)


@checked
def clip(a: Operand, min: Operand | None = None, max: Operand | None = None) -> ScaledArray:
    """Returns ``a`` limited to ``[min, max]``, with the scale ``max(sA, sB)`` of all that is given.

    Args:
        a: the operand.
        min, max: bounds that broadcast with it; None for none.

    Raises:
        ValueError: both bounds are None.
    """
    if min is None and max is None:
        raise ValueError("clip: min and max are None; expected at least one bound")
    given = [a, *(x for x in (min, max) if x is not None)]

    def clipped(x: jax.Array, *bounds: jax.Array) -> jax.Array:
        rest = iter(bounds)
        low, high = (None if b is None else next(rest) for b in (min, max))
        return jnp.clip(x, low, high)

    return applied("clip", clipped, *given)


@checked
def gelu(a: Operand, *, approximate: bool = True) -> ScaledArray:
    """Returns ``a`` times the normal distribution function of ``a``, with the scale ``sA``.

    The data are multiplied by the function of the value. The published design leaves this rule
    open; the result is at most as large as the operand, so that its scale serves.
    """

    def factor(value: jax.Array) -> jax.Array:
        if not approximate:
            return jax.scipy.special.ndtr(value)
        cubic = value + 0.044715 * value * jnp.square(value)
        return 0.5 + 0.5 * jnp.tanh(math.sqrt(2 / math.pi) * cubic)

    (x,) = operands("gelu", a)
    data = jnp.where(x.data == 0, x.data, x.data * factor(x.value()))
    scale = RULES["gelu"].scale(x.algebra, x.scale)
    return scaled_result(data, scale, x.algebra, x.dtype)


@checked
def integer_pow(a: Operand, n: int) -> ScaledArray:
    """Returns ``a^n`` for a Python integer with the scale ``sA^n``."""
    return applied("integer_pow", lambda x: lax.integer_pow(x, n), a, static=(n,))


@checked
def log(a: Operand) -> ScaledArray:
    """Returns the logarithm with the scale 1: ``log(data) + log(sA)``, whatever the scale's
    range.
    """

    (x,) = operands("log", a)
    scale = jnp.asarray(x.scale, x.data.dtype)
    part = scale * math.log(2) if x.algebra is EXPONENTS else jnp.log(scale)
    return scaled_result(jnp.log(x.data) + part, x.algebra.one, x.algebra, x.dtype)


@checked
def cast_data(
    a: Operand,
    fmt: FormatLike | DTypeLike,
    *,
    rounding: RoundingMode = "nearest_even",
    saturate: Saturation = False,
    key: jax.Array | None = None,
) -> ScaledArray:
    """Returns the data rounded to a format with the scale ``sA``: nothing is rescaled before.

    See :func:`scalewise.scaled.dynamic_rescale` for that.

    Args:
        a: an operand.
        fmt, rounding, saturate, key: as for :func:`scalewise.cast`.
    """
    (x,) = operands("cast_data", a)
    fmt = as_format(fmt, "cast_data")
    data = _rounding.encode(x.data, fmt, rounding=rounding, saturate=saturate, key=key)
    scale = RULES["cast_data"].scale(x.algebra, x.scale)
    if x.algebra is EXPONENTS:
        return ScaledArray.from_exponent(data, scale)
    return ScaledArray(data, scale)
