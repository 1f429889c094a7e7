"""Rounding to a format that is data, so that one compiled program serves every format."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import FP32, FP64, Format
from ..formats import format as format_

WIDTH = 8  # mantissa bits, lowest exponent, largest, overflow, infinity, smallest, -0, sign


def as_row(fmt: Format | str, saturate: bool | str = False) -> np.ndarray:
    """A format as the eight numbers that :func:`round_by` reads.

    Args:
        fmt: with at least one mantissa bit, and normal numbers from 2^-900 up.
        saturate: as for :func:`scalewise.round_to`.

    Returns:
        float64[8].

    Raises:
        ValueError: a format that this rounding can't do.
    """
    fmt = format_(fmt)
    if fmt == FP64:
        return np.array([52, -1022, np.finfo(np.float64).max, np.inf, np.inf, 0, 1, 1])
    if fmt.mantissa_bits < 1 or not fmt.zero or fmt.min_exponent - fmt.mantissa_bits < -900:
        raise ValueError(
            f"audit: {fmt.name} can't be audited; accepted: formats with a zero, at least one "
            "mantissa bit and no number under 2^-900"
        )
    largest = float(fmt.max)
    beyond = np.inf if fmt.infinities else np.nan
    if fmt.nan_code is None and not fmt.infinities:
        beyond = largest
    return np.array([
        fmt.mantissa_bits,
        fmt.min_exponent,
        largest,
        beyond if saturate is False else largest,
        largest if saturate is True else beyond,
        0.0 if fmt.subnormals else float(fmt.smallest),
        bool(fmt.negative_zero),
        fmt.signed,
    ])  # fmt: skip


def scaled(row: np.ndarray, power: int) -> np.ndarray:
    """The row of a format whose numbers are all ``2**-power`` times those of ``row``'s format.

    Rounding to it is multiplying by ``2**power``, rounding, and dividing again: a scale, or a loss
    scale, without a change to the program.
    """
    row = row.copy()
    row[1] -= power
    row[[2, 3, 4, 5]] *= 2.0**-power
    return row


SINGLE, DOUBLE = as_row(FP32), as_row(FP64)


def round_by(x: jax.Array, row: jax.Array) -> jax.Array:
    """``x`` rounded once, to nearest, ties to even, to the format of ``row``.

    What is dropped of a normal number's bits decides by integers; a subnormal one is a whole number
    of quanta, which are powers of two, so that dividing by them is exact. The same bits as
    :func:`scalewise.round_to` from float64.

    Args:
        x: float64.
        row: float64[8] from :func:`as_row`, known only at run time.
    """
    mantissa, lowest = row[0].astype(jnp.int64), row[1].astype(jnp.int64)
    largest, beyond, infinite, smallest = row[2], row[3], row[4], row[5]
    bits = lax.bitcast_convert_type(x, jnp.int64)
    magnitude = bits & np.int64(2**63 - 1)
    size = lax.bitcast_convert_type(magnitude, jnp.float64)
    drop = jnp.maximum(52 - mantissa, 1)
    nearly_half = (np.int64(1) << (drop - 1)) - 1
    kept = ((magnitude + (nearly_half + ((magnitude >> drop) & 1))) >> drop) << drop
    quantum = jnp.clip(lowest - mantissa, -1022, 1022)
    quanta = lax.round(size * power_of_two(-quantum), lax.RoundingMethod.TO_NEAREST_EVEN)
    subnormal = size < power_of_two(jnp.clip(lowest, -1022, 1022))
    y = jnp.where(
        subnormal, quanta * power_of_two(quantum), lax.bitcast_convert_type(kept, jnp.float64)
    )
    y = jnp.where(size < smallest, jnp.where(size > smallest / 2, smallest, 0.0), y)
    y = jnp.where(y > largest, jnp.where(size == jnp.inf, infinite, beyond), y)
    sign = jnp.where((y != 0) | (row[6] != 0), bits ^ magnitude, 0)
    y = lax.bitcast_convert_type(lax.bitcast_convert_type(y, jnp.int64) | sign, jnp.float64)
    y = jnp.where((row[7] == 0) & (x < 0), jnp.nan, y)
    return jnp.where((mantissa >= 52) | jnp.isnan(x), x, y)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2 to an int64 exponent from -1022 to 1023, exactly (``exp2`` isn't, under XLA)."""
    return lax.bitcast_convert_type((exponent + 1023) << 52, jnp.float64)
