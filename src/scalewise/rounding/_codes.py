"""Exact conversion between codes and floats that a format represents, in integer operations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format
from ..formats import format as format_
from ._bits import F32, carrier_of, fits
from ._carrier import from_float64
from ._decode import decoded


def widened(x: jax.Array) -> jax.Array:
    if x.dtype in (jnp.float32, jnp.float64):
        return x
    if x.dtype == jnp.float16:  # its subnormals are normal numbers of float32
        return lax.convert_element_type(x, jnp.float32)
    if x.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(x, np.uint16).astype(np.uint32)
        return lax.bitcast_convert_type(bits << np.uint32(16), np.float32)
    fmt = format_(x.dtype)
    codes = lax.bitcast_convert_type(x, jnp.uint4 if fmt.bits == 4 else np.uint8)
    return decoded(codes, fmt)


def stored(codes: jax.Array, fmt: Format) -> jax.Array:
    codes = codes.astype(jnp.uint4) if fmt.bits == 4 else codes
    return lax.bitcast_convert_type(codes, np.dtype(fmt.dtype))


def codes_of(x: jax.Array, fmt: Format) -> jax.Array:
    """Returns the codes of float32 or float64 values that the format represents.

    NaN becomes ``fmt.nan_code``, or 0 in a format without NaN.
    """
    if x.dtype == jnp.float64 and fits(fmt, F32):
        x = from_float64(x, np.dtype(np.float32))
    c = carrier_of(x.dtype)
    u, m, wide = c.const, fmt.mantissa_bits, c.mantissa_bits
    bias = fmt.bias or 0
    bits = lax.bitcast_convert_type(x, c.uint)
    sign, magnitude = bits >> u(c.bits - 1), bits & u((1 << (c.bits - 1)) - 1)
    code = (magnitude >> u(wide - m)) - _constant((1 - c.min_exponent - bias) << m, c)
    if fmt.min_exponent < c.min_exponent:  # for subnormals of the carrier, find the leading bit
        lead = u(c.bits - 1) - lax.clz(magnitude | u(1))
        body = magnitude << (u(wide) - jnp.minimum(lead, u(wide)))
        field = lead + _constant(bias + c.min_exponent - wide, c)
        tiny = (field << u(m)) + (body >> u(wide - m)) - u(1 << m)
        code = jnp.where(magnitude < u(1 << wide), tiny, code)
    if (
        fmt.subnormals and fmt.min_exponent != c.min_exponent
    ):  # if equal, the shifted bits are right
        # shift the significand right to units of the format's smallest subnormal
        field = jnp.maximum(magnitude >> u(wide), u(1))
        significand = magnitude - ((field - u(1)) << u(wide))
        right = u(1 - c.min_exponent + wide + fmt.min_exponent - m) - field
        small = significand >> jnp.minimum(right, u(c.bits - 1))
        code = jnp.where(magnitude < u(c.bits_of(fmt.smallest_normal)), small, code)
    if fmt.zero:
        code = jnp.where(magnitude == 0, u(0), code)
    infinity = u(c.bits_of(np.inf))
    if fmt.infinity_code is not None:
        code = jnp.where(magnitude == infinity, u(fmt.infinity_code), code)
    if fmt.signed:
        code = code | (sign << u(fmt.bits - 1))
    nan = 0 if fmt.nan_code is None else fmt.nan_code
    return jnp.where(magnitude > infinity, u(nan), code).astype(fmt.code_dtype)


def _constant(value: int, c) -> np.generic:
    return c.const(value % (1 << c.bits))
