"""Elementwise operations, reductions and casts from ScaledArrays to ScaledArrays.

Each operand is a ScaledArray, an array (scale 1) or a number (its power of two is its scale). The
result's scale follows the rule in the docstring (:data:`scalewise.scaled.RULES`); its data are
computed in float32 (float64 for float64), rounded once to the operands' dtype, and never read to
find the scale. An operand with a scale for each channel or block, or in codes, is first brought to
its largest scale.
"""

from __future__ import annotations

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
from .._types import FormatLike, RoundingMode, Saturation
from ._array import ScaledArray
from ._casts import saturation
from ._measures import split_power
from ._operand import ScaledOperand, common_dtype, operands, scaled_result
from ._rules import EXPONENTS, FACTORS, RULES, static_scale

Operand = ScaledArray | ArrayLike
Axis = int | Sequence[int] | None


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
    found = operands("concatenate", *xs)
    algebra, scale = found[0].algebra, found[0].scale
    for x in found[1:]:
        scale = RULES["concatenate"].scale(algebra, scale, x.scale)
    data = jnp.concatenate([x.at(scale) for x in found], axis)
    return scaled_result(data, scale, algebra, common_dtype(*found))


def _one(name: str, a: Operand, f: Callable, *static: float) -> ScaledArray:
    """Applies ``f`` to an operand; its static arguments are those of the rule."""
    (x,) = operands(name, a)
    scale = RULES[name].scale(x.algebra, x.scale, *static)
    return scaled_result(f(x), scale, x.algebra, x.dtype)


@checked
def neg(a: Operand) -> ScaledArray:
    """Returns ``-a`` with the scale ``sA``."""
    return _one("neg", a, lambda x: -x.data)


@checked
def abs(a: Operand) -> ScaledArray:
    """Returns magnitudes with the scale ``sA``."""
    return _one("abs", a, lambda x: jnp.abs(x.data))


@checked
def relu(a: Operand) -> ScaledArray:
    """Returns ``max(a, 0)`` with the scale ``sA``."""
    return _one("relu", a, lambda x: jax.nn.relu(x.data))


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

    return _one("gelu", a, lambda x: jnp.where(x.data == 0, x.data, x.data * factor(x)))


@checked
def square(a: Operand) -> ScaledArray:
    """Returns ``a^2`` with the scale ``sA^2``."""
    return _one("square", a, lambda x: jnp.square(x.data), 2)


@checked
def integer_pow(a: Operand, n: int) -> ScaledArray:
    """Returns ``a^n`` for a Python integer with the scale ``sA^n``."""
    if not isinstance(n, int):
        raise TypeError(f"integer_pow: n is {n!r}; expected a Python integer")
    return _one("integer_pow", a, lambda x: lax.integer_pow(x.data, n), n)


@checked
def sqrt(a: Operand) -> ScaledArray:
    """Returns square roots with the scale ``sqrt(sA)``; of an odd exponent, half stays with the
    data.
    """
    return _one("sqrt", a, lambda x: jnp.sqrt(_even(x)), 2)


@checked
def rsqrt(a: Operand) -> ScaledArray:
    """Returns inverse square roots with the scale ``1 / sqrt(sA)``, as :func:`sqrt`."""
    return _one("rsqrt", a, lambda x: lax.rsqrt(_even(x)), 2)


def _even(x: ScaledOperand) -> jax.Array:
    """Returns the data that the operand has at the next even exponent below an odd one."""
    if x.algebra is FACTORS:
        return x.data
    return x.data * jnp.where(x.scale % 2 == 1, 2, 1).astype(x.data.dtype)


@checked
def exp(a: Operand) -> ScaledArray:
    """Returns the exponential with the scale 1, computed from the value in float32."""
    return _one("exp", a, lambda x: jnp.exp(x.value()))


@checked
def tanh(a: Operand) -> ScaledArray:
    """Returns the hyperbolic tangent with the scale 1, computed from the value in float32."""
    return _one("tanh", a, lambda x: jnp.tanh(x.value()))


@checked
def sigmoid(a: Operand) -> ScaledArray:
    """Returns the logistic function with the scale 1, computed from the value in float32."""
    return _one("sigmoid", a, lambda x: jax.nn.sigmoid(x.value()))


@checked
def sin(a: Operand) -> ScaledArray:
    """Returns the sine with the scale 1, computed from the value in float32."""
    return _one("sin", a, lambda x: jnp.sin(x.value()))


@checked
def cos(a: Operand) -> ScaledArray:
    """Returns the cosine with the scale 1, computed from the value in float32."""
    return _one("cos", a, lambda x: jnp.cos(x.value()))


@checked
def log(a: Operand) -> ScaledArray:
    """Returns the logarithm with the scale 1: ``log(data) + log(sA)``, whatever the scale's
    range.
    """

    def both(x: ScaledOperand) -> jax.Array:
        scale = jnp.asarray(x.scale, x.data.dtype)
        part = scale * math.log(2) if x.algebra is EXPONENTS else jnp.log(scale)
        return jnp.log(x.data) + part

    return _one("log", a, both)


def _terms(a: Operand, axis: Axis) -> int:
    shape = jnp.shape(a.data if isinstance(a, ScaledArray) else a)  # pyright: ignore
    axes = (
        range(len(shape))
        if axis is None
        else (axis,)
        if isinstance(axis, int | np.integer)
        else axis
    )
    return math.prod(shape[i] for i in axes)


@checked
def sum(a: Operand, axis: Axis = None, *, keepdims: bool = False) -> ScaledArray:
    """Returns the sum over axes with the scale ``sA s``: s is sqrt(n), rounded to a power of two,
    for n terms, the size of a sum of n independent numbers of unit size.
    """
    s = static_scale(_terms(a, axis))
    return _one("sum", a, lambda x: _over(jnp.sum, x.data, axis, keepdims) / s, s)


@checked
def mean(a: Operand, axis: Axis = None, *, keepdims: bool = False) -> ScaledArray:
    """Returns the mean over axes with the scale ``sA / s``, s as for :func:`sum`."""
    s = static_scale(_terms(a, axis))
    return _one("mean", a, lambda x: _over(jnp.mean, x.data, axis, keepdims) * s, s)


@checked
def max(a: Operand, axis: Axis = None, *, keepdims: bool = False) -> ScaledArray:
    """Returns the largest element over axes with the scale ``sA``."""
    return _one("max", a, lambda x: _over(jnp.max, x.data, axis, keepdims))


@checked
def min(a: Operand, axis: Axis = None, *, keepdims: bool = False) -> ScaledArray:
    """Returns the smallest element over axes with the scale ``sA``."""
    return _one("min", a, lambda x: _over(jnp.min, x.data, axis, keepdims))


def _over(reduce: Callable, data: jax.Array, axis: Axis, keepdims: bool) -> jax.Array:
    axis = tuple(axis) if isinstance(axis, Sequence) else axis
    return reduce(data, axis=axis, keepdims=keepdims)


@checked
def softmax(a: Operand, axis: int = -1) -> ScaledArray:
    """Returns the softmax along an axis with the scale ``1 / sum(data)``, one for each row.

    The data are ``exp((data - max) sA)``, from 0 to 1.
    """
    (x,) = operands("softmax", a)
    top = jnp.max(x.data, axis=axis, keepdims=True)
    below = ScaledOperand(x.data - top, x.scale, x.algebra, x.dtype).value()
    data = jnp.exp(below)
    scale = RULES["softmax"].scale(FACTORS, jnp.sum(data, axis=axis, keepdims=True))
    return scaled_result(data, scale, FACTORS, x.dtype)


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
