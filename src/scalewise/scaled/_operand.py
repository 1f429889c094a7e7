"""Operands of scaled operations: wide data with one scale, and the ScaledArray of a result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .. import rounding
from ..formats import FormatLike, Saturation
from ..formats import format as format_
from ._array import ScaledArray
from ._power import ZERO_EXPONENT, exponent_of, ldexp, split_power
from ._rules import EXPONENTS, FACTORS, RULES, Algebra, Scale, ScaleRule, combined


@dataclasses.dataclass(frozen=True)
class ScaledOperand:
    """``data * scale``, or ``data * 2**scale``, as ``algebra`` says; stored before in ``dtype``."""

    data: jax.Array
    scale: jax.Array
    algebra: Algebra
    dtype: np.dtype

    @property
    def takes_scale(self) -> bool:
        return False

    def value(self) -> jax.Array:
        return times(self.data, self.scale, self.algebra)

    def at(self, scale: Scale) -> jax.Array:
        if self.algebra is EXPONENTS:
            return ldexp(self.data, jnp.int32(self.scale) - jnp.int32(scale))
        ratio = jnp.where(scale == 0, 0, self.scale / jnp.where(scale == 0, 1, scale))
        return self.data * ratio.astype(self.data.dtype)


def times(data: jax.Array, scale: Scale, algebra: Algebra) -> jax.Array:
    if algebra is EXPONENTS:
        return ldexp(data, jnp.asarray(scale, jnp.int32))
    return data * jnp.asarray(scale, data.dtype)


def operands(name: str, *xs: ScaledArray | ArrayLike) -> list[ScaledOperand]:
    """Returns operands whose scales are of one kind: exponents if one of them has an exponent."""
    found = [_operand(name, x) for x in xs]
    if all(x.algebra is FACTORS for x in found):
        return found
    return [_with_exponent(x) for x in found]


def _operand(name: str, x: ScaledArray | ArrayLike) -> ScaledOperand:
    if not isinstance(x, ScaledArray):
        x = _plain(name, x)
    data = x.data.astype(x.dtype)
    kept = isinstance(x.data, jax.Array) and jnp.issubdtype(x.data.dtype, jnp.floating)
    dtype = np.dtype(x.data.dtype if kept else x.dtype)  # results of codes and integers are wide
    if x.exponent is not None:
        if x.block is None and x.exponent.ndim == 0:
            return ScaledOperand(data, x.exponent, EXPONENTS, dtype)
        top = jnp.max(x.exponent, initial=ZERO_EXPONENT)
        below = dataclasses.replace(x, data=data, exponent=x.exponent - top)
        return ScaledOperand(below.value(), top, EXPONENTS, dtype)
    if x.scale is None:
        return ScaledOperand(data, jnp.asarray(1, x.dtype), FACTORS, dtype)
    scale = x.scale.value() if isinstance(x.scale, ScaledArray) else x.scale.astype(x.dtype)
    top, rest = _one_scale(scale)
    below = dataclasses.replace(x, data=data, scale=rest)
    return ScaledOperand(below.value(), top, FACTORS, dtype)


def _one_scale(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the scale that remains, finite and not negative, and what data take of it.

    Rules take roots of scales, compare and invert them. Data behind a scale of zero are zeros.
    """
    top = jnp.max(jnp.where(jnp.isfinite(scale), jnp.abs(scale), 0), initial=0)
    top = jnp.where((top > 0) | jnp.all(scale == 0), top, 1)
    return top, scale / jnp.where(top == 0, 1, top)


def apart(
    x: ScaledArray | ArrayLike, axis: int
) -> tuple[ScaledArray | ArrayLike, jax.Array | None]:
    """Returns an operand with one scale, and factors that are constant along an axis, if any.

    A sum along the axis commutes with them, so that a matrix unit takes the data as they are.
    """
    if not isinstance(x, ScaledArray) or x.block is not None or not isinstance(x.scale, jax.Array):
        return x, None
    constant = x.scale.ndim == len(x.shape) > 1 and x.scale.shape[axis] == 1
    if not constant or x.scale.size == 1:
        return x, None
    top, rest = _one_scale(x.scale.astype(x.dtype))
    return ScaledArray(x.data, top), rest


def _plain(name: str, x: ArrayLike) -> ScaledArray:
    number = isinstance(x, int | float)
    x = jnp.asarray(x, jnp.float32 if number else None)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} takes ScaledArrays and real floating-point arrays, not {x.dtype}")
    if x.ndim:
        return ScaledArray(x)
    mantissa, power = split_power(x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32))
    return ScaledArray(mantissa.astype(x.dtype), jnp.where(x == 0, 0, power))


def _with_exponent(x: ScaledOperand) -> ScaledOperand:
    if x.algebra is EXPONENTS:
        return x
    mantissa, power = split_power(x.scale)
    exponent = jnp.where(x.scale == 0, ZERO_EXPONENT, exponent_of(power))
    return dataclasses.replace(x, data=x.data * mantissa, scale=exponent, algebra=EXPONENTS)


def common_dtype(*xs: ScaledOperand) -> np.dtype:
    """Returns the widest dtype of the operands', of numbers without axes if there are no others.

    FP16 for two of 8 bits that differ, float32 for FP16 and BF16.
    """
    dtypes = {x.dtype for x in xs if x.data.ndim} or {x.dtype for x in xs}
    size = max(d.itemsize for d in dtypes)
    widest = [d for d in dtypes if d.itemsize == size]
    if len(widest) == 1:
        return widest[0]
    return np.dtype(np.float16 if size == 1 else np.float32)


def stored(
    data: jax.Array, dtype: FormatLike, *, saturate: Saturation = False
) -> jax.Array | rounding.EncodedArray:
    fmt = format_(dtype)
    if fmt.dtype is None or fmt.bits <= 8 or saturate:
        return rounding.encode(data, fmt, saturate=saturate)
    return data.astype(fmt.dtype)


def applied(
    rule: str | ScaleRule,
    f: Callable[..., jax.Array],
    *xs: ScaledArray | ArrayLike,
    name: str = "",
    static: tuple[float, ...] = (),
) -> ScaledArray:
    found = operands(name or str(rule), *xs)
    rule = RULES[rule] if isinstance(rule, str) else rule
    data, scale = combined(rule, found[0].algebra, found, *static)
    return scaled_result(f(*data), scale, found[0].algebra, common_dtype(*found))


def scaled_result(
    data: jax.Array, scale: jax.Array, algebra: Algebra, dtype: FormatLike
) -> ScaledArray:
    kept = stored(data, dtype)
    if algebra is EXPONENTS:
        return ScaledArray.from_exponent(kept, scale)
    return ScaledArray(kept, scale)
