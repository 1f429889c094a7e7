"""Dtypes that carry a format's numbers: which hold them all, and exact conversions of float64.

The conversions keep subnormals, which backends flush.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from ..formats import Format
from ..formats import format as format_
from ._bits import F32, F64, Carrier, fits

_UNIT = 2.0**-149  # the smallest subnormal of float32


def has_float64() -> bool:
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


_CARRIERS = {
    np.dtype(np.float16): Carrier(np.float16, np.uint16, 10, -14),
    np.dtype(ml_dtypes.bfloat16): Carrier(ml_dtypes.bfloat16, np.uint16, 7, -126),
    np.dtype(np.float32): F32,
    np.dtype(np.float64): F64,
}


@functools.lru_cache(maxsize=1024)
def holds(dtype: np.dtype, fmt: Format) -> bool:
    """Returns True if a float dtype represents all of a format, with its -0, infinities and NaN."""
    if dtype in _CARRIERS:
        return fits(fmt, _CARRIERS[dtype])
    own = format_(dtype)
    if fmt == own:
        return True
    if fmt.bits > 16 or (fmt.negative_zero and not own.negative_zero):
        return False
    theirs, ours = fmt.values(), own.values()
    known = np.isin(theirs, ours) | (np.isnan(theirs) & np.isnan(ours).any())
    return bool(known.all())


def contains(fmt: Format, dtype: np.dtype, saturate: Any) -> bool:
    """Returns True if rounding values of a dtype to a format always gives values of that dtype.

    It does if the format represents all values of the dtype, infinities included if the dtype has
    them and ``saturate`` doesn't replace them; NaN may stand for infinity.
    """
    own = format_(dtype)
    exact = (
        own.precision <= fmt.precision
        and own.max <= fmt.max
        and own.min_exponent - own.mantissa_bits >= fmt.min_exponent - fmt.mantissa_bits
        and (fmt.subnormals or own.smallest >= fmt.smallest)
        and (fmt.signed or not own.signed)
        and (fmt.zero or not own.zero)
    )
    if not own.infinities:
        return exact
    return exact and saturate is not True and (fmt.infinities or fmt.nan_code is not None)


def result_dtype(dtype: np.dtype, fmt: Format, saturate: Any, name: str) -> np.dtype:
    """Returns the first of ``dtype``, float32 and float64 that represents all results."""
    dtype = np.dtype(dtype)
    if holds(dtype, fmt) or contains(fmt, dtype, saturate):
        return dtype
    for wider in (np.float32, np.float64)[: 1 + has_float64()]:
        if np.dtype(wider).itemsize >= dtype.itemsize and holds(np.dtype(wider), fmt):
            return np.dtype(wider)
    raise ValueError(
        f"{name}: {dtype} doesn't represent all numbers of {fmt.name}; pass x as float64"
    )
