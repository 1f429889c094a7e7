"""Exact powers of two: finding a tensor's exponent, and scaling by one that may be out of range."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def _layout(dtype: Any) -> tuple[Any, int, int]:
    """Signed integer of a float's width, its mantissa bits, its bias."""
    return (np.int64, 52, 1023) if dtype == jnp.float64 else (np.int32, 23, 127)


def power_of_two(exponent: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """``2**exponent`` as a float, made from bits.

    Args:
        exponent: int32, within the exponents of dtype's normal numbers (float32: -126 to 127).
        dtype: float32 or float64.
    """
    integer, mantissa_bits, bias = _layout(dtype)
    bits = (exponent.astype(integer) + integer(bias)) << integer(mantissa_bits)
    return lax.bitcast_convert_type(bits, dtype)


def ldexp(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """``x * 2**exponent`` for an exponent of any size: 2**exponent itself is never formed.

    Exact wherever the result is a normal number; below, as the backend rounds or flushes. A factor
    out of range is applied in two halves, the exponent clipped to twice the dtype's range.

    Args:
        x: float32 or float64, any shape.
        exponent: int32, a scalar or a shape that broadcasts to x's.

    Returns:
        An array of x's dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> float(ldexp(jnp.float32(2.0**-100), jnp.int32(200))) == 2.0**100
        True
    """
    _, _, bias = _layout(x.dtype)
    exponent = jnp.clip(jnp.asarray(exponent, jnp.int32), -2 * bias + 2, 2 * bias)
    half = exponent >> 1
    x = x * power_of_two(half, x.dtype)
    return x * power_of_two(exponent - half, x.dtype)


def amax_exponent(
    x: jax.Array, axis: int | tuple[int, ...] | None = None, keepdims: bool = False
) -> jax.Array:
    """floor(log2(max |x|)) as int32: the exponent field of the largest magnitude.

    Args:
        x: float32 or float64, any shape, also empty.
        axis: axes to reduce, None for all.
        keepdims: keep reduced axes with length 1.

    Returns:
        int32. Zero or empty tensors, and those of subnormals, give the exponent below the smallest
        normal one (float32: -127); a NaN or an infinity among the values gives the one above the
        largest (128).

    Example:
        >>> import jax.numpy as jnp
        >>> int(amax_exponent(jnp.array([0.3, -5.0])))
        2
    """
    integer, mantissa_bits, bias = _layout(x.dtype)
    amax = jnp.max(jnp.abs(x), axis=axis, keepdims=keepdims, initial=0)
    bits = lax.bitcast_convert_type(amax, integer) & integer(np.iinfo(integer).max)
    return ((bits >> integer(mantissa_bits)) - integer(bias)).astype(jnp.int32)
