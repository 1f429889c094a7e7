"""Codes narrower than a byte, packed without gaps: two of 4 bits in a byte, four of 6 in three."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from ..formats import Format, check_codes
from ..formats import format as format_

WIDTHS = (3, 4, 6)  # those of which some whole bytes, at most three, hold a whole number


def pack(codes: Any, fmt: Format | str) -> jax.Array:
    """The codes of a narrow format as bytes, without gaps along the last axis.

    The first code stands in the lowest bits, as in ONNX's FLOAT4E2M1 and little-endian bit order
    (``np.packbits(..., bitorder="little")`` of each code's bits).

    Args:
        codes: integers from 0 to 2^bits - 1, as :func:`scalewise.cast` makes them, or an array of
            the format's own dtype; at least one dimension.
        fmt: a format of 3, 4 or 6 bits, or its name.

    Returns:
        uint8, the last axis ``ceil(n * bits / 8)`` long; unused high bits of the last byte are 0.

    Raises:
        TypeError: codes are neither integers nor of the format's dtype.
        ValueError: a format of another width, no dimension, or a code beyond the format's width
            (under jit, where codes aren't known, its higher bits are cut off).

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
    whole = parts.astype(jnp.uint8).reshape(*codes.shape[:-1], -1 if codes.size else 0)
    return whole[..., : -(-length * fmt.bits // 8)]


def unpack(packed: Any, fmt: Format | str, size: int) -> jax.Array:
    """The codes that :func:`pack` packed.

    Args:
        packed: uint8, the last axis ``ceil(size * bits / 8)`` long.
        fmt: the format, or its name.
        size: how many codes the last axis held.

    Returns:
        uint8 codes, the last axis ``size`` long.

    Raises:
        TypeError: packed isn't uint8.
        ValueError: a format of another width, or a last axis of another length.

    Example:
        >>> unpack(np.array([33, 3], np.uint8), "e2m1fn", 3).tolist()
        [1, 2, 3]
    """
    fmt = _narrow(fmt, "unpack")
    packed = jnp.asarray(packed)
    if packed.dtype != jnp.uint8:
        raise TypeError(f"unpack: packed is {packed.dtype}; accepted: uint8")
    if size < 0:
        raise ValueError(f"unpack: size is {size!r}; accepted: 0 or more")
    need = -(-size * fmt.bits // 8)
    if packed.ndim == 0 or packed.shape[-1] != need:
        raise ValueError(
            f"unpack: packed has shape {packed.shape}; accepted: {need} bytes along the last axis, "
            f"as {size} codes of {fmt.name} take"
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
        raise ValueError(f"{name}: {fmt.name} has {fmt.bits} bits; accepted: formats of 3, 4 or 6")
    return fmt


def _codes(codes: Any, fmt: Format) -> jax.Array:
    """uint32 codes, checked where their values are at hand."""
    if fmt.dtype is not None and getattr(codes, "dtype", None) == fmt.dtype:
        if not isinstance(codes, jax.Array):
            codes = np.asarray(codes).view(np.uint8)
        else:
            codes = lax.bitcast_convert_type(codes, jnp.uint4 if fmt.bits == 4 else jnp.uint8)
            return codes.astype(jnp.uint32)
    if not isinstance(codes, jax.Array):
        codes = np.asarray(codes)
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        raise TypeError(f"pack: codes are {codes.dtype}; accepted: integers or {fmt.dtype}")
    if codes.ndim == 0:
        raise ValueError("pack: codes have no dimension; accepted: at least one")
    if not isinstance(codes, Tracer):
        check_codes(fmt, codes)
    return jnp.asarray(codes).astype(jnp.uint32) & jnp.uint32(2**fmt.bits - 1)


def _group(fmt: Format) -> tuple[int, int]:
    """How many codes fill how many bytes."""
    whole = math.lcm(fmt.bits, 8)
    return whole // fmt.bits, whole // 8


def _last(x: np.ndarray, ndim: int) -> np.ndarray:
    """x along the last of ndim axes."""
    return x.reshape((1,) * (ndim - 1) + x.shape)
