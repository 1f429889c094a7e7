"""Finds exponents from data and rounds to a narrow format, for ``store="every_op"``."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format
from ..scaled import LeastSquares, exponent_of, is_known, power_of_two

ZERO_EXPONENT = -(1 << 20)  # the exponent of zeros, below all others
LOWEST, HIGHEST = np.int32(-126), np.int32(126)  # 2^e and 2^-e are normal float32 numbers
TOP = 15  # log2 of the largest data: FP16 ends just below 2^16


def scaled_down(data: jax.Array, measure: str, fmt: Format) -> tuple[jax.Array, jax.Array]:
    """Returns ``data / 2**exponent`` with an exponent that brings float data well into a format.

    The largest magnitude (``"max"``) is brought to between 2^14 and 2^15, the top of FP16's range.
    By the root mean square (``"l2"``), the mean (``"l1"``) or the smallest squared error
    (``"least_squares"``) the data are brought to unit size. NaN and infinities don't count.

    Args:
        data: float32 or float64. For ``"l2"``, squares below float32's smallest number count as
            zeros.
        measure: one of the four.
        fmt: the format that ``"least_squares"`` rounds to.

    Returns:
        The data, and an int32 exponent from -126 to 126; :data:`ZERO_EXPONENT` for zeros alone.
        The quotient is exact. XLA doesn't repeat a division in each of the kernels that read its
        result, as it repeats a product: that made an optimizer step compile three times as long.
    """
    if data.dtype == jnp.float64:
        data, moved = _as_float32(data)
        data, exponent = scaled_down(data, measure, fmt)
        return data, jnp.where(exponent == ZERO_EXPONENT, exponent, exponent + moved)
    exponent, zero = _exponent(data, measure, fmt)
    exponent = lax.clamp(LOWEST, exponent, HIGHEST)
    return data / power_of_two(exponent), lax.select(zero, np.int32(ZERO_EXPONENT), exponent)


def rescaled(options: tuple, data: jax.Array, exponent: jax.Array) -> list[jax.Array]:
    """Returns ``data * 2**exponent`` with an exponent that is found from the data.

    Args:
        options: the measure and the format, as for :func:`scaled_down`, and whether to round.
        data: float32 or float64.
        exponent: int32.

    Returns:
        Data in the format's dtype, rounded once, or in float32; and an int32 exponent.
    """
    measure, fmt, rounds = options
    down, found = scaled_down(data, measure, fmt)
    exponent = jnp.where(found == ZERO_EXPONENT, found, found + exponent)
    if not rounds:
        return [down, exponent]
    clip = bound_of(measure, data.size) > TOP
    return [to_format(down, data.astype(jnp.float32), fmt, clip=clip), exponent]


def rounded(options: tuple, data: jax.Array) -> list[jax.Array]:
    """Returns float32 data in a format's dtype; ``options`` are the format and ``clip``."""
    fmt, clip = options
    return [to_format(data, data, fmt, clip=clip)]


def _exponent(data: jax.Array, measure: str, fmt: Format) -> tuple[jax.Array, jax.Array]:
    size = lax.abs(data)
    size = lax.select(size < np.float32(np.inf), size, lax.full_like(size, 0))
    if measure == "l2":
        if is_known(size.size) and not size.size:
            return jnp.int32(0), jnp.bool_(True)
        mean = jnp.mean(lax.square(size))
        return _log2(mean) >> 1, mean == 0
    top = jnp.max(size, initial=0.0)
    if measure == "max":
        return _log2(top) - np.int32(14), top == 0
    if measure == "least_squares":
        return exponent_of(LeastSquares().scale(data, fmt, range(data.ndim))[0]), top == 0
    exponent = lax.clamp(LOWEST, _log2(top), HIGHEST)
    mean = jnp.mean(size * power_of_two(-exponent))
    return exponent + _log2(mean), top == 0


def _log2(x: jax.Array) -> jax.Array:
    """Returns the exponent of a float32 number that is not negative."""
    return (lax.bitcast_convert_type(x, jnp.int32) >> 23) - np.int32(127)


def _as_float32(data: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns float64 data divided by their largest finite magnitude's power of two, its log2."""
    size = jnp.where(jnp.isfinite(data), jnp.abs(data), 0)
    moved = exponent_of(jnp.maximum(jnp.max(size, initial=0.0), 2.0**-1000))
    moved = lax.clamp(np.int32(-1000), moved.astype(jnp.int32), np.int32(1000))
    return (data * power_of_two(-moved, jnp.float64)).astype(jnp.float32), moved


def bound_of(measure: str, size: Any) -> int:
    """Returns log2 of the largest magnitude of ``size`` data after :func:`scaled_down`."""
    if measure == "l2" and is_known(size):  # one element may hold the whole sum of squares
        return 1 + math.ceil(math.log2(max(1, size)) / 2)
    return TOP if measure == "max" else TOP + 1


def to_format(data: jax.Array, signs: jax.Array, fmt: Format, *, clip: bool) -> jax.Array:
    """Rounds float32 data to the nearest numbers of a 16-bit format, in its dtype.

    FP16's subnormals are kept. A number too small for them becomes the smallest one rather than
    zero, since it may be a divisor or the argument of a logarithm. (BF16 has float32's range.)
    Rounds by ``reduce_precision``, which flushes subnormals, since XLA drops a convert there and
    back.

    Args:
        data: to be rounded, once.
        signs: the same numbers before they were scaled down, which may have made some of them zero.
        fmt: FP16 or BF16.
        clip: whether finite data may exceed the format's largest number, and are clipped to it;
            infinities stay.
    """
    if clip:
        data = clipped(data, float(fmt.max))
    whole = lax.reduce_precision(data, fmt.exponent_bits, fmt.mantissa_bits)
    if fmt.exponent_bits == 8:
        return whole.astype(fmt.dtype)
    size, unit = lax.abs(data), np.float32(float(fmt.smallest))
    few = lax.round(data * np.float32(1 / unit), lax.RoundingMethod.TO_NEAREST_EVEN) * unit
    few = lax.select(size < unit, lax.sign(signs).astype(jnp.float32) * unit, few)
    return lax.select(size < np.float32(float(fmt.smallest_normal)), few, whole).astype(fmt.dtype)


def clipped(data: jax.Array, top: float) -> jax.Array:
    """Clips finite data to between ``-top`` and ``top``; infinities stay."""
    limit = data.dtype.type(top)
    infinite = lax.abs(data) == data.dtype.type(np.inf)
    return lax.select(infinite, data, lax.clamp(-limit, data, limit))


def zeros_exponent(exponent: Any) -> Any:
    """Returns :data:`ZERO_EXPONENT` for an exponent that roots or powers have made of it."""
    beyond = lax.abs(jnp.int32(exponent)) > -ZERO_EXPONENT // 4
    return jnp.where(beyond, np.int32(ZERO_EXPONENT), jnp.int32(exponent))
