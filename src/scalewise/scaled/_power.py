"""Exact powers of two, and quotients that are rounded to a narrow format next."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ..formats import rounding_mode

ZERO_EXPONENT = -(1 << 20)  # the exponent of zeros, below all others
LOWEST, HIGHEST = np.int32(-126), np.int32(126)  # 2^e and 2^-e are normal float32 numbers


def layout(dtype: DTypeLike) -> tuple[type[np.int32 | np.int64], int, int]:
    """Returns the signed integer dtype of a float's width, its mantissa bits and its bias."""
    return (np.int64, 52, 1023) if dtype == jnp.float64 else (np.int32, 23, 127)


def power_of_two(exponent: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Returns ``2**exponent``, of a normal number of the dtype, made from bits."""
    integer, mantissa_bits, bias = layout(dtype)
    bits = (exponent.astype(integer) + integer(bias)) << integer(mantissa_bits)
    return lax.bitcast_convert_type(bits, dtype)


def exponent_of(power: jax.Array) -> jax.Array:
    """Returns the int32 exponent of a power of two that is a normal number."""
    _, mantissa_bits, bias = layout(power.dtype)
    integer = np.uint64 if power.dtype == jnp.float64 else np.uint32
    bits = lax.bitcast_convert_type(power, integer)
    return (bits >> integer(mantissa_bits)).astype(jnp.int32) - bias


def ldexp(x: jax.Array, exponent: int | jax.Array) -> jax.Array:
    """Returns ``x * 2**exponent`` for an exponent of any size, without forming 2**exponent.

    Exact wherever the result is a normal number; below, as the backend rounds or flushes. A factor
    out of range is applied in two halves, the exponent clipped to twice the dtype's range.

    Example:
        >>> import jax.numpy as jnp
        >>> float(ldexp(jnp.float32(2.0**-100), jnp.int32(200))) == 2.0**100
        True
    """
    _, _, bias = layout(x.dtype)
    exponent = jnp.clip(jnp.asarray(exponent, jnp.int32), -2 * bias + 2, 2 * bias)
    half = exponent >> 1
    x = x * power_of_two(half, x.dtype)
    return x * power_of_two(exponent - half, x.dtype)


def ldexp_subnormal(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Returns ``x * 2**exponent`` of normal float32 numbers, subnormal results included.

    Integer operations round these to nearest even. Backends flush subnormal results of float ones.
    """
    u = jnp.int32
    bits = lax.bitcast_convert_type(x, u)
    magnitude = bits & u(0x7FFFFFFF)
    field = (magnitude >> u(23)) + exponent
    shift = jnp.clip(1 - field, 0, 25)
    significand = (magnitude & u(0x7FFFFF)) | u(1 << 23)
    odd = (significand >> shift) & u(1)
    half = (u(1) << shift >> u(1)) - 1 + odd
    small = (significand + jnp.where(shift > 0, half, 0)) >> shift
    tiny = (field < 1) & (magnitude != 0)
    return jnp.where(
        tiny, lax.bitcast_convert_type(small | (bits ^ magnitude), x.dtype), ldexp(x, exponent)
    )


def split_power(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a mantissa of a magnitude from 1 to 2 and the power of two that it is multiplied by.

    Zeros, infinities and NaN keep the power 1; numbers below twice the smallest normal one keep
    that.
    """
    _, _, bias = layout(x.dtype)
    usable = jnp.isfinite(x) & (x != 0)
    exponent = jnp.clip(exponent_of(jnp.where(usable, jnp.abs(x), 1)), 2 - bias, bias - 1)
    power = power_of_two(jnp.where(usable, exponent, 0), x.dtype)
    return x / power, power


def shrink(x: jax.Array, factor: jax.Array, rounding: str) -> jax.Array:
    """Returns ``x * factor``, which doesn't underflow to 0 before a directed rounding."""
    return nonzero(x * factor, x, rounding)


def nonzero(y: jax.Array, x: jax.Array, rounding: str) -> jax.Array:
    """Backends flush subnormal products. A directed rounding has to see that they weren't zero."""
    if rounding_mode(rounding).underflows_to_zero:
        return y
    least = np.asarray(2.0 ** (2 - layout(x.dtype)[2]), x.dtype)
    gone = (x != 0) & (jnp.abs(y) < least)
    return jnp.where(gone, jnp.copysign(least, x), y)


def quotient(x: jax.Array, divisor: jax.Array | np.floating) -> jax.Array:
    """Returns ``x / divisor`` on the exact quotient's side of each number of few bits.

    Rounded to a format of at most 10 mantissa bits (24 from float64), in any mode, the result is
    the correctly rounded quotient. XLA multiplies by a reciprocal where a divisor is broadcast,
    and even a correctly rounded float32 quotient can be a midpoint of the format that the exact
    one isn't: the nearest number was missed in one of 12,000 codes of NVFP4.

    The upper half ``q`` of an approximate quotient's bits leaves an exact remainder, ``x - q
    divisor``, if the divisor is split in two as well: each product of halves is exact, whether
    or not a compiler fuses it with a subtraction. The remainder's sign is the side.

    The divisor is positive and normal. The result is within a unit in its last place above
    2^-100 (float64: 2^-960); an infinity, a NaN and a zero are what division gives.
    """
    integer, mantissa_bits, bias = layout(x.dtype)
    low = (mantissa_bits + 2) // 2  # bits of the lower half
    upper = integer(-(1 << low))
    if isinstance(divisor, np.floating):  # known while tracing, and so is all that is made of it
        power = x.dtype.type(2.0 ** max(1 - bias, min(1 - int(np.frexp(divisor)[1]), bias - 1)))
        divisor = divisor * power
        inverse = divisor.dtype.type(1) / divisor
        first = (divisor.view(integer) & upper).view(divisor.dtype)
    else:
        power = power_of_two(jnp.clip(-exponent_of(divisor), 1 - bias, bias - 1), x.dtype)
        divisor = divisor * power
        inverse = 1 / divisor
        first = _masked(divisor, integer(0), upper)
    x = x * power  # from 1 to 4, as the divisor is: no remainder underflows
    near = x * inverse
    q = _masked(near, integer(1 << (low - 1)), upper)
    rest = (x - q * first) - q * (divisor - first)
    y = q + rest * inverse
    bits, side = (lax.bitcast_convert_type(z, integer) for z in (q, rest))
    step = integer(1) | (
        (side ^ bits) >> integer(np.iinfo(integer).bits - 1)
    )  # away from zero, or to it
    y = jnp.where(y == q, lax.bitcast_convert_type(bits + step, x.dtype), y)
    y = jnp.where(rest == 0, q, y)  # keeps the sign of zero
    return jnp.where(lax.abs(rest) < np.asarray(np.inf, x.dtype), y, near)


def _masked(x: jax.Array, addend: np.integer, mask: np.integer) -> jax.Array:
    bits = lax.bitcast_convert_type(x, addend.dtype)
    return lax.bitcast_convert_type((bits + addend) & mask, x.dtype)
