"""Fast paths of the default rounding of float32: by integer operations, or by XLA's convert."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format

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
    assert fmt.bias is not None
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
