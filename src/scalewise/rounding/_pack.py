"""Packing of codes narrower than a byte: two 4-bit codes in 1 byte, four 6-bit codes in 3."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._check import Natural, checked
from .._jax import Tracer
from ..formats import Format, check_codes
from ..formats import format as format_

WIDTHS = (3, 4, 6)  # a whole number of such codes fills 3 bytes or less


@checked
def pack(codes: ArrayLike, fmt: Format | str) -> jax.Array:
    """Packs the codes of a narrow format into bytes, without gaps along the last axis.

    The first code takes the lowest bits, as in ONNX's FLOAT4E2M1 and little-endian bit order
    (``np.packbits(..., bitorder="little")`` of each code's bits).

    Args:
        codes: integers from 0 to 2^bits - 1, as :func:`scalewise.cast` returns them, or an array of
            the format's own dtype; at least one dimension.
        fmt: a format of 3, 4 or 6 bits, or its name.

    Returns:
        A uint8 array with ``ceil(n * bits / 8)`` bytes along the last axis. Unused high bits of
        the last byte are 0.

    Raises:
        TypeError: the codes are neither integers nor of the format's dtype.
        ValueError: the format has another width, there is no dimension, or a code is out of range
            (under jit codes aren't checked, and their higher bits are ignored).

    Example:
        >>> pack(np.array([1, 2, 3], np.uint8), "e2m1fn").tolist()
        [33, 3]
    """
    fmt = _narrow(fmt, "pack")
    codes = _codes(codes, fmt)
    per, width = _group(fmt)
    length = codes.shape[-1]
    pad = [(0, 0)] * (codes.ndim - 1) + [(0, -length % per)]
    groups = jnp.pad(codes, pad).reshape(*codes.shape[:-1], -(-length // per), per)
    shifts = np.arange(per, dtype=np.uint32) * np.uint32(fmt.bits)
    word = jnp.sum(groups << _last(shifts, groups.ndim), axis=-1, dtype=jnp.uint32, keepdims=True)
    places = np.arange(width, dtype=np.uint32) * np.uint32(8)
    parts = (word >> _last(places, word.ndim)) & jnp.uint32(0xFF)
    whole = parts.astype(jnp.uint8).reshape(*codes.shape[:-1], groups.shape[-2] * width)
    return whole[..., : -(-length * fmt.bits // 8)]


@checked
def unpack(packed: ArrayLike, fmt: Format | str, size: Natural) -> jax.Array:
    """Returns the codes that :func:`pack` packed.

    Args:
        packed: uint8, with ``ceil(size * bits / 8)`` bytes along the last axis.
        fmt: the format, or its name.
        size: the number of codes along the last axis.

    Returns:
        The codes as uint8, with ``size`` along the last axis.

    Raises:
        TypeError: ``packed`` isn't uint8.
        ValueError: the format has another width, or the last axis another length.

    Example:
        >>> unpack(np.array([33, 3], np.uint8), "e2m1fn", 3).tolist()
        [1, 2, 3]
    """
    fmt = _narrow(fmt, "unpack")
    packed = jnp.asarray(packed)
    if packed.dtype != jnp.uint8:
        raise TypeError(f"unpack: packed is {packed.dtype}; expected uint8")
    need = -(-size * fmt.bits // 8)
    if packed.ndim == 0 or packed.shape[-1] != need:
        raise ValueError(
            f"unpack: packed has shape {packed.shape}; expected {need} bytes along the last axis "
            f"for {size} codes of {fmt.name}"
        )
    per, width = _group(fmt)
    groups = -(-size // per)
    pad = [(0, 0)] * (packed.ndim - 1) + [(0, groups * width - need)]
    parts = jnp.pad(packed, pad).reshape(*packed.shape[:-1], groups, width).astype(jnp.uint32)
    places = np.arange(width, dtype=np.uint32) * np.uint32(8)
    word = jnp.sum(parts << _last(places, parts.ndim), axis=-1, dtype=jnp.uint32, keepdims=True)
    shifts = np.arange(per, dtype=np.uint32) * np.uint32(fmt.bits)
    codes = (word >> _last(shifts, word.ndim)) & jnp.uint32(2**fmt.bits - 1)
    return codes.astype(jnp.uint8).reshape(*packed.shape[:-1], groups * per)[..., :size]


def _narrow(fmt: Format | str, name: str) -> Format:
    fmt = format_(fmt)
    if fmt.bits not in WIDTHS:
        raise ValueError(
            f"{name}: {fmt.name} has {fmt.bits} bits; expected a format of 3, 4 or 6 bits"
        )
    return fmt


def _codes(codes: Any, fmt: Format) -> jax.Array:
    if fmt.dtype is not None and getattr(codes, "dtype", None) == fmt.dtype:
        if not isinstance(codes, jax.Array):
            codes = np.asarray(codes).view(np.uint8)
        else:
            codes = lax.bitcast_convert_type(codes, jnp.uint4 if fmt.bits == 4 else jnp.uint8)
            return codes.astype(jnp.uint32)
    if not isinstance(codes, jax.Array):
        codes = np.asarray(codes)
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        raise TypeError(f"pack: codes are {codes.dtype}; expected integers or {fmt.dtype}")
    if codes.ndim == 0:
        raise ValueError("pack: codes have no dimension; expected at least one")
    if not isinstance(codes, Tracer):
        check_codes(fmt, codes)
    return jnp.asarray(codes).astype(jnp.uint32) & jnp.uint32(2**fmt.bits - 1)


def _group(fmt: Format) -> tuple[int, int]:
    """Returns the smallest number of codes that fills whole bytes, and the number of bytes."""
    whole = math.lcm(fmt.bits, 8)
    return whole // fmt.bits, whole // 8


def _last(x: np.ndarray, ndim: int) -> np.ndarray:
    return x.reshape((1,) * (ndim - 1) + x.shape)
