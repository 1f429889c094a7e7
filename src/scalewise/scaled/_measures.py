"""Finds powers of two that bring data to unit size, by the measure of their magnitudes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format
from ._power import exponent_of, power_of_two
from ._scaling import LeastSquares, top_exponent
from ._sizes import is_known

ZERO_EXPONENT = -(1 << 20)  # the exponent of zeros, below all others
LOWEST, HIGHEST = np.int32(-126), np.int32(126)  # 2^e and 2^-e are normal float32 numbers
MEASURES = ("max", "l1", "l2", "least_squares")


def scaled_down(data: jax.Array, measure: str, fmt: Format) -> tuple[jax.Array, jax.Array]:
    """Returns ``data / 2**exponent`` with an exponent that brings float data well into a format.

    The largest magnitude (``"max"``) is brought to the format's last but one binade, but at most to
    2^14 to 2^15, which is FP16's.
    By the root mean square (``"l2"``), the mean (``"l1"``) or the smallest squared error
    (``"least_squares"``) the data are brought to unit size. NaN and infinities don't count.

    Args:
        data: float32 or float64. For ``"l2"``, squares below float32's smallest number count as
            zeros.
        measure: one of the four.
        fmt: the format that ``"max"`` and ``"least_squares"`` scale for.

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
        return _log2(top) - np.int32(top_exponent(fmt)), top == 0
    if measure == "least_squares":
        return exponent_of(LeastSquares().scale(data, fmt, range(data.ndim))[0]), top == 0
    exponent = lax.clamp(LOWEST, _log2(top), HIGHEST)
    mean = jnp.mean(size * power_of_two(-exponent))
    return exponent + _log2(mean), top == 0


def _log2(x: jax.Array) -> jax.Array:
    return (lax.bitcast_convert_type(x, jnp.int32) >> 23) - np.int32(127)


def _as_float32(data: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns float64 data divided by their largest finite magnitude's power of two, its log2."""
    size = jnp.where(jnp.isfinite(data), jnp.abs(data), 0)
    moved = exponent_of(jnp.maximum(jnp.max(size, initial=0.0), 2.0**-1000))
    moved = lax.clamp(np.int32(-1000), moved.astype(jnp.int32), np.int32(1000))
    return (data * power_of_two(-moved, jnp.float64)).astype(jnp.float32), moved
