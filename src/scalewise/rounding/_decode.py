"""Codes to the numbers that they stand for, by integer operations."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from ..formats import Format, check_codes
from ..formats import format as format_
from ._bits import F32, fits, from_units


def decode(codes: Any, fmt: Format | str) -> jax.Array:
    """The numbers of codes, exactly, by integer operations that jit, vmap and shard.

    Args:
        codes: unsigned integers below 2^bits, as :func:`scalewise.cast` makes them, any shape.
            Under a transformation, where they can't be looked at, higher bits are ignored.
        fmt: a format of up to 32 bits, all of whose numbers float32 holds, or its name.

    Returns:
        float32 of the codes' shape.

    Raises:
        TypeError: codes aren't integers.
        ValueError: codes beyond the format's width, or numbers that float32 doesn't hold.

    Example:
        >>> decode(np.array([0x3C, 0x7E], np.uint8), "e4m3fn").tolist()
        [1.5, 448.0]
    """
    fmt = format_(fmt)
    codes = codes if isinstance(codes, jax.Array) else np.asarray(codes)
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        raise TypeError(f"decode: codes of {fmt.name} are {codes.dtype}; accepted: integers")
    if not fits(fmt, F32):
        raise ValueError(f"decode: {fmt.name} has numbers that float32 doesn't; use its own decode")
    if not isinstance(codes, Tracer):
        check_codes(fmt, codes)
    return decoded(codes, fmt)


@partial(jax.jit, static_argnums=1, inline=True)
def decoded(codes: jax.Array, fmt: Format) -> jax.Array:
    """:func:`decode` without its checks."""
    u, m = np.uint32, fmt.mantissa_bits
    assert fmt.bias is not None
    codes = codes.astype(u)
    magnitude = codes & u(2 ** (fmt.exponent_bits + m) - 1)
    field, fraction = magnitude >> u(m), magnitude & u(2**m - 1)
    bits = (magnitude << u(23 - m)) + u(((127 - fmt.bias) << 23) % 2**32)
    lowest = fmt.min_exponent - m + 149  # log2 of the smallest number's last place, in float32's
    first = fmt.min_exponent + fmt.bias  # the field of the smallest normal number
    if fmt.subnormals:
        small = (
            from_units(fraction << u(lowest), F32) if lowest < 32 - m else _scaled(fraction, fmt)
        )
        bits = jnp.where(field == u(0), small, bits)
    if fmt.min_exponent < -126:  # normal numbers of the format, subnormal ones of float32
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


def _scaled(fraction: jax.Array, fmt: Format) -> jax.Array:
    """Bits of a subnormal whose quantum is a normal number of float32."""
    quantum = np.float32(2.0 ** (fmt.min_exponent - fmt.mantissa_bits))
    return lax.bitcast_convert_type(fraction.astype(np.float32) * quantum, np.uint32)
