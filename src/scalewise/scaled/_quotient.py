"""Quotients that are rounded to a narrow format next, so that this is the only rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._power import exponent_of, layout, power_of_two


def quotient(x: jax.Array, divisor: jax.Array) -> jax.Array:
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
    power = power_of_two(jnp.clip(-exponent_of(divisor), 1 - bias, bias - 1), x.dtype)
    x, divisor = x * power, divisor * power  # from 1 to 4: no remainder underflows
    inverse = 1 / divisor
    first = _masked(divisor, integer(0), upper)
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
    """Returns the float whose bits are ``(bits of x + addend) & mask``."""
    bits = lax.bitcast_convert_type(x, addend.dtype)
    return lax.bitcast_convert_type((bits + addend) & mask, x.dtype)
