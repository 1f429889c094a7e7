"""Codes of the nearest number, ties to even, in one go: the rounding that everybody waits for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format

INFINITY = np.uint32(0x7F800000)


def is_plain(fmt: Format) -> bool:
    """Whether :func:`nearest_codes` serves a format: sign, exponent, fraction as IEEE 754 has them.

    With subnormals, whose quantum times 2^23 is a normal number of float32.
    """
    return bool(
        fmt.signed
        and fmt.subnormals
        and fmt.zero
        and fmt.negative_zero
        and (fmt.infinities or fmt.nan in ("all_ones", "none"))
        and 1 <= fmt.mantissa_bits < 23
        and fmt.bits <= 16
        and fmt.min_exponent - fmt.mantissa_bits >= -100
        and fmt.max_exponent <= 127
    )


def nearest_codes(x: jax.Array, fmt: Format, saturate: bool | str) -> jax.Array:
    """Codes of float32 numbers rounded to nearest even: a dozen integer operations, one float's.

    Above the smallest normal number the bits themselves are rounded, and a carry moves into the
    exponent. Below it an addition does it: of the power of two whose last place is the format's
    quantum. What a backend flushes there is far less than half a quantum.

    Args:
        x: float32, any shape.
        fmt: one that :func:`is_plain`.
        saturate: as for :func:`scalewise.cast`.

    Returns:
        Codes of ``fmt.code_dtype``; a NaN's is ``fmt.nan_code``, or 0 where there is none.
    """
    u, m = np.uint32, fmt.mantissa_bits
    assert fmt.bias is not None
    drop = 23 - m
    bits = lax.bitcast_convert_type(x, u)
    magnitude = bits & u(0x7FFFFFFF)
    odd = (magnitude >> u(drop)) & u(1)
    rounded = (magnitude + (u((1 << (drop - 1)) - 1) + odd)) >> u(drop)
    normal = rounded - u((127 - fmt.bias) << m)
    unit = np.float32(2.0 ** (fmt.min_exponent - m + 23))
    size = lax.bitcast_convert_type(magnitude, np.float32)
    small = lax.bitcast_convert_type(size + unit, u) - unit.view(u)
    first = np.float32(float(fmt.smallest_normal)).view(u)
    code = jnp.where(magnitude < first, small, normal)
    code = _limited(code, magnitude, fmt, saturate)
    sign = (bits >> u(32 - fmt.bits)) & u(1 << (fmt.bits - 1))
    if fmt.nan_code is None:  # nothing is known of what was no number, its sign neither
        sign = jnp.where(magnitude > INFINITY, u(0), sign)
    return (code | sign).astype(fmt.code_dtype)


def _limited(code: jax.Array, magnitude: jax.Array, fmt: Format, saturate: bool | str) -> jax.Array:
    """What lies above the largest number: its code, infinity's or NaN's."""
    nan = 0 if fmt.nan_code is None else fmt.nan_code
    beyond = fmt.infinity_code
    if beyond is None:
        beyond = fmt.max_code if fmt.nan_code is None else nan
    limit = fmt.max_code if saturate else beyond
    code = jnp.minimum(code, np.uint32(limit))
    if saturate == "finite" and beyond != limit:
        code = jnp.where(magnitude == INFINITY, np.uint32(beyond), code)
    if limit != nan:  # else a NaN, above all numbers, has become one
        code = jnp.where(magnitude > INFINITY, np.uint32(nan), code)
    return code
