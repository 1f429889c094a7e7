"""Elementwise operations and casts from ScaledArrays to ScaledArrays.

Each operand is a ScaledArray, an array (scale 1) or a number (its power of two is its scale). The
result's scale follows the rule in the docstring (:data:`scalewise.scaled.RULES`); its data are
computed in float32 (float64 for float64), rounded once to the operands' dtype, and never read to
find the scale. An operand with a scale for each channel or block, or in codes, is first brought to
its largest scale.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .. import rounding as _rounding
from .._check import checked
from .._resolve import as_format
from ..formats import FormatLike, RoundingMode, Saturation
from ._array import ScaledArray
from ._casts import saturation
from ._measures import split_power
from ._operand import ScaledOperand, common_dtype, operands, scaled_result
from ._rules import EXPONENTS, FACTORS, RULES

Operand = ScaledArray | ArrayLike


def _pair(
    name: str, a: Operand, b: Operand
) -> tuple[ScaledOperand, ScaledOperand, jax.Array, np.dtype]:
    x, y = operands(name, a, b)
    return x, y, RULES[name].scale(x.algebra, x.scale, y.scale), common_dtype(x, y)


def _aligned(name: str, f: Callable, a: Operand, b: Operand) -> ScaledArray:
    x, y, scale, dtype = _pair(name, a, b)
    return scaled_result(f(x.at(scale), y.at(scale)), scale, x.algebra, dtype)


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
    return _sum_of_two("add", jnp.add, a, b, rule)


@checked
def sub(a: Operand, b: Operand, *, rule: Literal["max", "l2"] = "max") -> ScaledArray:
    """Returns ``a - b`` with the scale ``max(sA, sB)``; arguments as for :func:`add`."""
    return _sum_of_two("sub", jnp.subtract, a, b, rule)


def _sum_of_two(name: str, f: Callable, a: Operand, b: Operand, rule: str) -> ScaledArray:
    if rule not in ("max", "l2"):
        raise ValueError(f"{name}: rule is {rule!r}; expected 'max' or 'l2'")
    if rule == "max":
        return _aligned(name, f, a, b)
    x, y, scale, dtype = _pair(name, a, b)
    if x.algebra is FACTORS:  # of exponents, the larger one: sqrt(2) is rounded down to 1
        low = jnp.minimum(x.scale, y.scale) / jnp.where(scale == 0, 1, scale)
        size = jnp.where(scale == 0, 1, scale * jnp.sqrt(1 + low * low))
        scale = jnp.where(scale == 0, scale, split_power(size)[1])
    return scaled_result(f(x.at(scale), y.at(scale)), scale, x.algebra, dtype)


@checked
def mul(a: Operand, b: Operand) -> ScaledArray:
    """Returns ``a * b`` with the scale ``sA sB``.

    A number goes into the scale with its power of two; its mantissa multiplies the data.
    """
    x, y, scale, dtype = _pair("mul", a, b)
    return scaled_result(x.data * y.data, scale, x.algebra, dtype)


@checked
def div(a: Operand, b: Operand) -> ScaledArray:
    """Returns ``a / b`` with the scale ``sA / sB``; a zero divisor gives infinities or NaN."""
    x, y, _, dtype = _pair("div", a, b)
    divisor, below = y.data, y.scale
    if x.algebra is FACTORS:
        zero = below == 0
        divisor, below = jnp.where(zero, 0, divisor), jnp.where(zero, 1, below)
    scale = RULES["div"].scale(x.algebra, x.scale, below)
    return scaled_result(x.data / divisor, scale, x.algebra, dtype)


@checked
def maximum(a: Operand, b: Operand) -> ScaledArray:
    """Returns the larger of each two elements with the scale ``max(sA, sB)``.

    A zero array (a scale of 0) leaves the other's scale unchanged, so that ``maximum(a, 0)`` is
    :func:`relu`.
    """
    return _aligned("maximum", jnp.maximum, a, b)


@checked
def minimum(a: Operand, b: Operand) -> ScaledArray:
    """Returns the smaller of each two elements with the scale ``max(sA, sB)``."""
    return _aligned("minimum", jnp.minimum, a, b)


@checked
def where(condition: ArrayLike, a: Operand, b: Operand) -> ScaledArray:
    """Returns ``a`` where the condition holds, else ``b``, with the scale ``max(sA, sB)``."""
    return _aligned("where", lambda x, y: jnp.where(condition, x, y), a, b)


@checked
def concatenate(xs: Sequence[Operand], axis: int = 0) -> ScaledArray:
    """Returns the arrays joined along an axis with the largest of their scales."""
    if not xs:
        raise ValueError("concatenate: expected at least one array")
    return _several("concatenate", lambda *data: jnp.concatenate(data, axis), *xs)


def _several(name: str, f: Callable, *xs: Operand) -> ScaledArray:
    """Applies ``f`` to the data of operands at one scale, by a rule of two operands."""
    found = operands(name, *xs)
    algebra = found[0].algebra
    scales = [x.scale for x in found]
    scale = functools.reduce(functools.partial(RULES[name].scale, algebra), scales)
    data = f(*(x.at(scale) for x in found))
    return scaled_result(data, scale, algebra, common_dtype(*found))


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

    return _several("clip", clipped, *given)


def applied(name: str, a: Operand, f: Callable, *static: float) -> ScaledArray:
    """Applies ``f`` to an operand; its static arguments are those of the rule."""
    (x,) = operands(name, a)
    scale = RULES[name].scale(x.algebra, x.scale, *static)
    return scaled_result(f(x), scale, x.algebra, x.dtype)


@checked
def neg(a: Operand) -> ScaledArray:
    """Returns ``-a`` with the scale ``sA``."""
    return applied("neg", a, lambda x: -x.data)


@checked
def abs(a: Operand) -> ScaledArray:
    """Returns magnitudes with the scale ``sA``."""
    return applied("abs", a, lambda x: jnp.abs(x.data))


@checked
def relu(a: Operand) -> ScaledArray:
    """Returns ``max(a, 0)`` with the scale ``sA``."""
    return applied("relu", a, lambda x: jax.nn.relu(x.data))


@checked
def gelu(a: Operand, *, approximate: bool = True) -> ScaledArray:
    """Returns ``a`` times the normal distribution function of ``a``, with the scale ``sA``.

    The data are multiplied by the function of the value. The published design leaves this rule
    open; the result is at most as large as the operand, so that its scale serves.
    """

    def factor(x: ScaledOperand) -> jax.Array:
        value = x.value()
        if not approximate:
            return jax.scipy.special.ndtr(value)
        cubic = value + 0.044715 * value * jnp.square(value)
        return 0.5 + 0.5 * jnp.tanh(math.sqrt(2 / math.pi) * cubic)

    return applied("gelu", a, lambda x: jnp.where(x.data == 0, x.data, x.data * factor(x)))


@checked
def square(a: Operand) -> ScaledArray:
    """Returns ``a^2`` with the scale ``sA^2``."""
    return applied("square", a, lambda x: jnp.square(x.data), 2)


@checked
def integer_pow(a: Operand, n: int) -> ScaledArray:
    """Returns ``a^n`` for a Python integer with the scale ``sA^n``."""
    if not isinstance(n, int):
        raise TypeError(f"integer_pow: n is {n!r}; expected a Python integer")
    return applied("integer_pow", a, lambda x: lax.integer_pow(x.data, n), n)


@checked
def sqrt(a: Operand) -> ScaledArray:
    """Returns square roots with the scale ``sqrt(sA)``; of an odd exponent, half stays with the
    data.
    """
    return applied("sqrt", a, lambda x: jnp.sqrt(_even(x)), 2)


@checked
def rsqrt(a: Operand) -> ScaledArray:
    """Returns inverse square roots with the scale ``1 / sqrt(sA)``, as :func:`sqrt`."""
    return applied("rsqrt", a, lambda x: lax.rsqrt(_even(x)), 2)


def _even(x: ScaledOperand) -> jax.Array:
    """Returns the data that the operand has at the next even exponent below an odd one."""
    if x.algebra is FACTORS:
        return x.data
    return x.data * jnp.where(x.scale % 2 == 1, 2, 1).astype(x.data.dtype)


@checked
def exp(a: Operand) -> ScaledArray:
    """Returns the exponential with the scale 1, computed from the value in float32."""
    return applied("exp", a, lambda x: jnp.exp(x.value()))


@checked
def tanh(a: Operand) -> ScaledArray:
    """Returns the hyperbolic tangent with the scale 1, computed from the value in float32."""
    return applied("tanh", a, lambda x: jnp.tanh(x.value()))


@checked
def sigmoid(a: Operand) -> ScaledArray:
    """Returns the logistic function with the scale 1, computed from the value in float32."""
    return applied("sigmoid", a, lambda x: jax.nn.sigmoid(x.value()))


@checked
def erf(a: Operand) -> ScaledArray:
    """Returns the error function with the scale 1, computed from the value in float32."""
    return applied("erf", a, lambda x: jax.scipy.special.erf(x.value()))


@checked
def sin(a: Operand) -> ScaledArray:
    """Returns the sine with the scale 1, computed from the value in float32."""
    return applied("sin", a, lambda x: jnp.sin(x.value()))


@checked
def cos(a: Operand) -> ScaledArray:
    """Returns the cosine with the scale 1, computed from the value in float32."""
    return applied("cos", a, lambda x: jnp.cos(x.value()))


@checked
def log(a: Operand) -> ScaledArray:
    """Returns the logarithm with the scale 1: ``log(data) + log(sA)``, whatever the scale's
    range.
    """

    def both(x: ScaledOperand) -> jax.Array:
        scale = jnp.asarray(x.scale, x.data.dtype)
        part = scale * math.log(2) if x.algebra is EXPONENTS else jnp.log(scale)
        return jnp.log(x.data) + part

    return applied("log", a, both)


@checked
def cast(
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
    (x,) = operands("cast", a)
    fmt = as_format(fmt, "cast")
    mode = saturation(saturate, fmt)
    data = _rounding.encode(x.data, fmt, rounding=rounding, saturate=mode, key=key)
    scale = RULES["cast"].scale(x.algebra, x.scale)
    if x.algebra is EXPONENTS:
        return ScaledArray.from_exponent(data, scale)
    return ScaledArray(data, scale)
