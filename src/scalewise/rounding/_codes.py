"""Dtypes that hold a format's numbers, and exact conversions between floats, float64 and codes.

The conversions keep subnormals, which backends flush. The default rounding of float32 has fast
paths.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._check import checked
from .._jax import Tracer
from ..formats import Format, check_codes
from ..formats import format as format_
from ._bits import F32, F64, Carrier, carrier_of, fits, from_units

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
    bias = fmt.bias
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


@checked
def decode(codes: ArrayLike, fmt: Format | str) -> jax.Array:
    """Returns the numbers of codes, exactly. Works under jit, vmap and sharding.

    Args:
        codes: unsigned integers below 2^bits, as :func:`scalewise.cast` returns them, any shape.
            Under a JAX transformation they aren't checked, and higher bits are ignored.
        fmt: a format of up to 32 bits, all of whose numbers float32 represents, or its name.

    Returns:
        A float32 array of the codes' shape.

    Raises:
        TypeError: the codes aren't integers.
        ValueError: a code is out of range, or float32 doesn't represent all numbers of the format.

    Example:
        >>> decode(np.array([0x3C, 0x7E], np.uint8), "e4m3fn").tolist()
        [1.5, 448.0]
    """
    fmt = format_(fmt)
    codes = codes if isinstance(codes, jax.Array) else np.asarray(codes)
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        raise TypeError(f"decode: codes of {fmt.name} are {codes.dtype}; expected integers")
    check_decodes(fmt, "decode")
    if not isinstance(codes, Tracer):
        check_codes(fmt, codes)
    return decoded(codes, fmt)


def check_decodes(fmt: Format, name: str) -> None:
    """Raises ValueError for a format that :func:`decoded` can't decode."""
    if not fits(fmt, F32):
        raise ValueError(
            f"{name}: float32 doesn't represent all numbers of {fmt.name}; use Format.decode"
        )


@partial(jax.jit, static_argnums=1, inline=True)
def decoded(codes: jax.Array, fmt: Format) -> jax.Array:
    u, m = np.uint32, fmt.mantissa_bits
    codes = codes.astype(u)
    magnitude = codes & u(2 ** (fmt.exponent_bits + m) - 1)
    field, fraction = magnitude >> u(m), magnitude & u(2**m - 1)
    bits = (magnitude << u(23 - m)) + u(((127 - fmt.bias) << 23) % 2**32)
    lowest = (
        fmt.min_exponent - m + 149
    )  # log2 of the quantum over the smallest subnormal of float32
    first = fmt.min_exponent + fmt.bias  # the exponent field of the smallest normal number
    if fmt.subnormals:
        if lowest < 32 - m:
            small = from_units(fraction << u(lowest), F32)
        else:
            size = fraction.astype(np.float32) * np.float32(2.0 ** (fmt.min_exponent - m))
            small = lax.bitcast_convert_type(size, u)
        bits = jnp.where(field == u(0), small, bits)
    if fmt.min_exponent < -126:  # some normal numbers of the format are subnormal in float32
        units = (fraction | u(1 << m)) << (field + u((lowest - first) % 2**32))
        among = (field >= u(first)) & (field < u(first - 126 - fmt.min_exponent))
        bits = jnp.where(among, units, bits)
    if fmt.zero:
        bits = jnp.where(magnitude == 0, u(0), bits)
    if fmt.infinity_code is not None:
        bits = jnp.where(magnitude == u(fmt.infinity_code), u(F32.bits_of(np.inf)), bits)
    nan = u(F32.bits_of(np.nan))
    if fmt.nan in ("ieee", "all_ones"):
        last = fmt.max_code if fmt.infinity_code is None else fmt.infinity_code
        bits = jnp.where(magnitude > u(last), nan, bits)
    if fmt.signed:
        sign = (codes >> u(fmt.bits - 1)) & u(1)
        if fmt.nan == "negative_zero":
            bits = jnp.where((sign != 0) & (magnitude == 0), nan, bits)
        elif not fmt.negative_zero:
            sign = jnp.where(magnitude == 0, u(0), sign)
        bits |= sign << u(31)
    return lax.bitcast_convert_type(bits, np.float32)


INFINITY = np.uint32(0x7F800000)
# Formats to which XLA's convert from float32 rounds as :func:`nearest_codes` does: once, to nearest
# even, subnormals included, overflow to infinity or NaN. `make prove` tests all inputs on a CPU.
# For NVIDIA GPUs XLA emits `cvt.rn.satfinite` (PTX ISA), which rounds values in range once, and
# replaces the saturated results of values out of range itself.
CONVERTED = frozenset({"e4m3fn", "e5m2", "e4m3"})


def is_plain(fmt: Format) -> bool:
    """Returns whether a format has the fields of IEEE 754 and subnormals.

    Their quantum times 2^23 has to be a normal number of float32.
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
    """Returns the codes of float32 values rounded to nearest even in a plain format.

    The format is one for which :func:`is_plain` is True; ``saturate`` is as for ``cast``.

    It takes a dozen integer operations and one float addition. From the smallest normal number
    on, the bits are rounded as an integer, and a carry increments the exponent. Below it, adding
    the power of two whose last place is the format's quantum rounds the value; a backend only
    flushes values far below half of the quantum. NaN becomes ``fmt.nan_code``, or 0 without NaN.
    """
    u, m = np.uint32, fmt.mantissa_bits
    drop = 23 - m
    bits = lax.bitcast_convert_type(x, u)
    magnitude = lax.bitwise_and(bits, u(0x7FFFFFFF))
    odd = lax.bitwise_and(lax.shift_right_logical(magnitude, u(drop)), u(1))
    half = lax.add(u((1 << (drop - 1)) - 1), odd)
    rounded = lax.shift_right_logical(lax.add(magnitude, half), u(drop))
    normal = lax.sub(rounded, u((127 - fmt.bias) << m))
    unit = np.float32(2.0 ** (fmt.min_exponent - m + 23))
    size = lax.bitcast_convert_type(magnitude, np.float32)
    small = lax.sub(lax.bitcast_convert_type(lax.add(size, unit), u), unit.view(u))
    first = np.float32(float(fmt.smallest_normal)).view(u)
    code = lax.select(lax.lt(magnitude, first), small, normal)
    code = _limited(code, magnitude, fmt, saturate)
    sign = lax.shift_right_logical(bits, u(32 - fmt.bits))
    sign = lax.bitwise_and(sign, u(1 << (fmt.bits - 1)))
    if fmt.nan_code is None:  # NaN becomes 0, without its sign
        sign = _replaced(sign, lax.gt(magnitude, INFINITY), 0)
    return lax.convert_element_type(lax.bitwise_or(code, sign), fmt.code_dtype)


def _replaced(codes: jax.Array, where: jax.Array, code: int) -> jax.Array:
    return lax.select(where, lax.full_like(codes, code), codes)


def _limited(code: jax.Array, magnitude: jax.Array, fmt: Format, saturate: bool | str) -> jax.Array:
    nan = 0 if fmt.nan_code is None else fmt.nan_code
    beyond = fmt.infinity_code
    if beyond is None:
        beyond = fmt.max_code if fmt.nan_code is None else nan
    limit = fmt.max_code if saturate else beyond
    code = lax.min(code, np.uint32(limit))
    if saturate == "finite" and beyond != limit:
        code = _replaced(code, lax.eq(magnitude, INFINITY), beyond)
    if limit != nan:  # otherwise the minimum above has replaced NaN, too
        code = _replaced(code, lax.gt(magnitude, INFINITY), nan)
    return code


def converted(x: jax.Array, fmt: Format, saturate: bool | str) -> jax.Array:
    """Converts float32 to the format's dtype, one of ``CONVERTED``, with a single XLA convert.

    Overflow is treated as ``saturate`` says, as for ``cast``.

    The result equals that of :func:`nearest_codes` on every input, except for the sign and
    payload of NaN. On a CPU the integer operations of :func:`nearest_codes` are faster; on a GPU
    they take three passes over the data, and XLA fuses only a convert with the transpose before
    a matrix product.
    """
    top = np.float32(float(fmt.max))
    if saturate is not False:
        within = lax.clamp(-top, x, top)
        if saturate != "finite":
            x = within
        elif fmt.infinities:
            x = jnp.where(lax.abs(x) == np.float32(np.inf), x, within)
        else:  # NaN for an infinity, without a select, which XLA on a GPU computes in a pass before
            x = within + x * np.float32(0)
    return lax.convert_element_type(x, np.dtype(fmt.dtype))
