"""Conversion between float64 and narrower floats that keeps subnormals, which backends flush."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_UNIT = 2.0**-149  # the smallest subnormal of float32


def has_float64() -> bool:
    """Returns True if JAX's x64 mode is on, so that float64 is available."""
    return jax.dtypes.canonicalize_dtype(np.float64) == np.float64


def to_float64(x: jax.Array) -> jax.Array:
    """Converts a float array to float64, exactly, including subnormals.

    Call it under ``jax.enable_x64(True)``.
    """
    if x.dtype == jnp.float64:
        return x
    if x.dtype == jnp.float16:
        return lax.convert_element_type(x, jnp.float64)
    x = lax.convert_element_type(x, jnp.float32)
    bits = lax.bitcast_convert_type(x, np.int32)
    units = lax.convert_element_type(bits & np.int32(0x007FFFFF), jnp.float64)
    small = jnp.where(bits < 0, -units, units) * np.float64(_UNIT)
    subnormal = (bits & np.int32(0x7F800000)) == 0
    return jnp.where(subnormal, small, lax.convert_element_type(x, jnp.float64))


def from_float64(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Converts a float64 array to a narrower dtype, to nearest even, including subnormals.

    Conversion to bfloat16 rounds to float32 first.
    """
    if dtype == jnp.float64:
        return x
    if dtype == jnp.float16:
        return lax.convert_element_type(x, dtype)
    units = lax.round(jnp.abs(x) * np.float64(1 / _UNIT), lax.RoundingMethod.TO_NEAREST_EVEN)
    tiny = units < np.float64(2.0**23)
    bits = lax.convert_element_type(jnp.where(tiny, units, 0.0), np.uint32)
    sign = lax.bitcast_convert_type(lax.convert_element_type(x, jnp.float32), np.uint32)
    small = lax.bitcast_convert_type(bits | (sign & np.uint32(0x80000000)), jnp.float32)
    result = jnp.where(tiny, small, lax.convert_element_type(x, jnp.float32))
    return lax.convert_element_type(result, dtype)
