"""Elementwise operations and casts from ScaledArrays to ScaledArrays.

Each operand is a ScaledArray, an array (scale 1) or a number (its power of two is its scale). The
result's scale follows the rule in the docstring (:data:`scalewise.scaled.RULES`); its data are
computed in float32 (float64 for float64), rounded once to the operands' dtype, and never read to
find the scale. An operand with a scale for each channel or block, or in codes, is first brought to
its largest scale.
"""

from __future__ import annotations

import dataclasses
import functools
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
from ..formats import FormatLike
from ._array import ScaledArray
from ._rules import (
    FACTORS,
    RULES,
    Factor,
    ScaledOperand,
    applied,
    as_factor,
    combined,
    common_dtype,
    into_scale,
    operands,
    scaled_result,
)

Operand = ScaledArray | ArrayLike


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
sigmoid = _of_one("sigmoid", jax.nn.sigmoid, "the logistic function")
cos = _of_one("cos", jnp.cos, "the cosine")


def _odd(
    name: str, f: Callable[[jax.Array], jax.Array], returns: str, slope: float = 1.0
) -> Callable[[Operand], ScaledArray]:
    """Returns an operation that keeps the scale of small operands; ``slope`` is that at 0."""

    def operation(a: Operand) -> ScaledArray:
        (x,) = operands(name, a)
        (value,), scale = combined(RULES[name], FACTORS, [x])
        infinite = jnp.any(jnp.isinf(x.data))  # their function values need the scale 1
        scale = jax.tree.map(lambda s, u: jnp.where(infinite, u, s), scale, FACTORS.one)
        whole = dataclasses.replace(x, data=f(value), scale=FACTORS.one).at(scale)
        small = jnp.abs(value) < 2.0**-40
        data = jnp.where(small, x.at(scale) * slope, whole)
        return scaled_result(data, scale, x.dtype)

    operation.__name__ = operation.__qualname__ = name
    operation.__doc__ = f"""Returns {returns} with the scale ``{RULES[name].formula}``.

    It is computed from the value in float32, from the data where the value is below 2^-40."""
    return checked(operation)


tanh = _odd("tanh", jnp.tanh, "the hyperbolic tangent")
sin = _odd("sin", jnp.sin, "the sine")
erf = _odd("erf", jax.scipy.special.erf, "the error function", 2 / math.sqrt(math.pi))


@checked
def add(a: Operand, b: Operand) -> ScaledArray:
    """Returns ``a + b`` with the scale ``max(sA, sB)``.

    The data of the operand with the smaller scale are scaled down. Their sum may exceed the
    format's largest number where both are near it.

    Example:
        >>> y = add(ScaledArray(jnp.float16([1, 2]), 8.0), ScaledArray(jnp.float16([1, 1]), 2.0))
        >>> y.data.tolist(), float(y.scale)
        ([1.25, 2.25], 8.0)
    """
    return applied("add", jnp.add, a, b)


@checked
def sub(a: Operand, b: Operand) -> ScaledArray:
    """Returns ``a - b`` with the scale ``max(sA, sB)``, as :func:`add`."""
    return applied("sub", jnp.subtract, a, b)


@checked
def mul(a: Operand, b: Operand) -> ScaledArray:
    """Returns ``a * b`` with the scale ``sA sB``.

    A number, or an operand without axes beside one that has some, goes into the scale: the data
    are not rounded. Where a product of scales leaves float32's range, the data take a power of two
    of it.
    """
    x, y = _scalars_in_scales("mul", a, b)
    data, scale = combined(RULES["mul"], FACTORS, [x, y])
    return scaled_result(data[0] * data[1], scale, common_dtype(x, y))


@checked
def div(a: Operand, b: Operand) -> ScaledArray:
    """Returns ``a / b`` with the scale ``sA / sB``; a zero divisor gives infinities or NaN.

    Numbers go into the scale as for :func:`mul`.
    """
    x, y = _scalars_in_scales("div", a, b)
    zero = y.scale.mantissa == 0  # a scale of 0 is a zero divisor
    one = as_factor(jnp.ones_like(y.scale.mantissa))
    scale = Factor(*(jnp.where(zero, u, v) for u, v in zip(one, y.scale, strict=True)))
    y = dataclasses.replace(y, data=jnp.where(zero, 0 * y.data, y.data), scale=scale)
    data, scale = combined(RULES["div"], FACTORS, [x, y])
    return scaled_result(data[0] / data[1], scale, common_dtype(x, y))


def _scalars_in_scales(name: str, a: Operand, b: Operand) -> list[ScaledOperand]:
    x, y = operands(name, a, b)
    numbers = [isinstance(v, int | float) for v in (a, b)]
    return [into_scale(x, y, numbers[0]), into_scale(y, x, numbers[1])]


@checked
def maximum(a: Operand, b: Operand) -> ScaledArray:
    """Returns the larger of each two elements with the scale ``max(sA, sB)``.

    A zero array (a scale of 0) leaves the other's scale unchanged, so that ``maximum(a, 0)`` is
    :func:`relu`. A number bounds an array as in :func:`clip`.
    """
    a, b = _array_first(a, b)
    return clip(a, min=b) if _is_number(b) else applied("maximum", jnp.maximum, a, b)


@checked
def minimum(a: Operand, b: Operand) -> ScaledArray:
    """Returns the smaller of each two elements with the scale ``max(sA, sB)``.

    A number bounds an array as in :func:`clip`.
    """
    a, b = _array_first(a, b)
    return clip(a, max=b) if _is_number(b) else applied("minimum", jnp.minimum, a, b)


def _is_number(x: Operand) -> bool:
    if isinstance(x, ScaledArray | int | float):
        return not isinstance(x, ScaledArray)
    return not jnp.ndim(x) and jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _array_first(a: Operand, b: Operand) -> tuple[Operand, Operand]:
    return (b, a) if _is_number(a) else (a, b)


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
    """Returns ``a`` limited to ``[min, max]``, with the scale ``min(sA, sB)`` if that has 0.

    sB is the larger scale of two bounds, or sA with one bound. The result is then no larger than
    ``a`` and the bounds. An interval without 0 gives the scale ``max(sA, sB)``.

    Args:
        a: the operand.
        min, max: bounds that broadcast with it; None for none. Their signs are read to find the
            scale.

    Raises:
        ValueError: both bounds are None.

    Example:
        >>> y = clip(ScaledArray(jnp.float16([1, 3]), 2.0**-40), -1, 1)
        >>> y.data.tolist(), float(y.scale) == 2.0**-40
        ([1.0, 3.0], True)
    """
    if min is None and max is None:
        raise ValueError("clip: min and max are None; expected at least one bound")
    x, *bounds = operands("clip", *(v for v in (a, min, max) if v is not None))
    larger = functools.partial(functools.reduce, FACTORS.larger)
    around = jnp.bool_(True) if min is None else jnp.all(bounds[0].data <= 0)
    around = around if max is None else around & jnp.all(bounds[-1].data >= 0)
    scales = [y.scale for y in bounds]
    within = RULES["clip"].scale(FACTORS, x.scale, larger(scales)) if len(bounds) == 2 else x.scale
    scale = jax.tree.map(lambda u, v: jnp.where(around, u, v), within, larger([x.scale, *scales]))
    rest = iter([y.at(scale) for y in bounds])
    low, high = (None if v is None else next(rest) for v in (min, max))
    data = jnp.clip(x.at(scale), low, high)
    return scaled_result(data, scale, common_dtype(x, *bounds))


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
    scale = RULES["gelu"].scale(FACTORS, x.scale)
    return scaled_result(data, scale, x.dtype)


@checked
def integer_pow(a: Operand, n: int) -> ScaledArray:
    """Returns ``a^n`` for a Python integer with the scale ``sA^n``."""
    return applied("integer_pow", lambda x: lax.integer_pow(x, n), a, static=(n,))


@checked
def exp(a: Operand, *, arithmetic: Literal["float32", "narrow", "auto"] = "float32") -> ScaledArray:
    """Returns the exponential with the scale 1, computed from the value.

    Args:
        a: the operand.
        arithmetic: ``"narrow"`` computes it in the data's dtype if that has 16 bits; ``"auto"``
            chooses that at run time if all values (data times scale) are at most 1, so that
            rounding them costs no more than rounding the result does, and otherwise float32.
    """
    (x,) = operands("exp", a)
    value = x.value()

    def narrow(value: jax.Array) -> jax.Array:
        return jnp.exp(value.astype(x.dtype)).astype(value.dtype)

    if x.dtype.itemsize != 2 or arithmetic == "float32":
        data = jnp.exp(value)
    elif arithmetic == "narrow":
        data = narrow(value)
    else:
        data = lax.cond(jnp.all(jnp.abs(value) <= 1), narrow, jnp.exp, value)
    return scaled_result(data, FACTORS.one, x.dtype)


@checked
def log(a: Operand) -> ScaledArray:
    """Returns the logarithm with the scale 1: ``log(data) + log(sA)``, whatever the scale's
    range.
    """

    (x,) = operands("log", a)
    mantissa, exponent = x.scale
    part = jnp.asarray(exponent, x.data.dtype) * math.log(2) + jnp.log(mantissa)
    return scaled_result(jnp.log(x.data) + part, FACTORS.one, x.dtype)


@checked
def cast_data(a: Operand, fmt: FormatLike | DTypeLike) -> ScaledArray:
    """Returns the data rounded to a format with the scale ``sA``: nothing is rescaled before.

    See :func:`scalewise.scaled.dynamic_rescale` for that.

    Args:
        a: an operand.
        fmt: a format, rounded to as by :func:`scalewise.cast`.
    """
    (x,) = operands("cast_data", a)
    fmt = as_format(fmt, "cast_data")
    data = _rounding.encode(x.data, fmt)
    scale = RULES["cast_data"].scale(FACTORS, x.scale)
    return dataclasses.replace(scaled_result(x.data, scale, x.dtype), data=data)
