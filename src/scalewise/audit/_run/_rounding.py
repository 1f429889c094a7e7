"""Rounding to a format that is data, so that one compiled program serves every format."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...formats import FP32, FP64, Format
from ...formats import format as format_

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

    Adding a number whose last bit is the last that the format keeps, and taking it off again, drops
    all bits behind: of a normal number that is one of its own binade, of a subnormal one that of
    the format's lowest. The same bits as :func:`scalewise.round_to` from that dtype.

    Args:
        x: float64, or float32 where all the format's numbers are normal there; of a trial's wider
            format, numbers whose binade has no such other number keep float32's digits.
        row: float64 that begins with :func:`as_row`'s, known only at run time.
    """
    digits, integer = jnp.finfo(x.dtype).nmant, _INTEGERS[x.dtype.name]
    top = np.array(np.inf, x.dtype).view(integer)  # the exponent's field, all ones
    mantissa, lowest = row[0].astype(integer), row[1].astype(integer)
    largest, beyond, infinite, smallest = (row[i].astype(x.dtype) for i in range(2, 6))
    bits = lax.bitcast_convert_type(x, integer)
    magnitude = bits & np.iinfo(integer).max
    size = lax.bitcast_convert_type(magnitude, x.dtype)
    bias = (1 << (np.iinfo(integer).bits - digits - 2)) - 1
    binade = jnp.maximum(magnitude & top, jnp.clip(lowest + bias, 1, 2 * bias) << digits)
    other = jnp.minimum(binade + ((digits - mantissa) << digits), 2 * bias << digits)
    other = lax.bitcast_convert_type(other, x.dtype)
    y = (size + other) - other
    y = jnp.where(size < smallest, jnp.where(size > smallest / 2, smallest, 0), y)
    y = jnp.where(y > largest, jnp.where(size == jnp.inf, infinite, beyond), y)
    sign = jnp.where((y != 0) | (row[6] != 0), bits ^ magnitude, 0)
    y = lax.bitcast_convert_type(lax.bitcast_convert_type(y, integer) | sign, x.dtype)
    y = jnp.where((row[7] == 0) & (x < 0), jnp.nan, y)
    return jnp.where(mantissa >= digits, x, y)


def narrowed(x: jax.Array, row: jax.Array, dtype: Any) -> jax.Array:
    """``x`` in a lane's dtype, so that rounding it to the format of ``row`` is rounding ``x``.

    Rounded to float32 to odd: a last bit that says whether anything was cut off decides ties
    (Boldo and Melquiond, "When double rounding is odd", 2005). What is too large or too small for
    float32 stays finite, and other than zero.

    Args:
        x: float64.
        row: float64[8] from :func:`as_row`; float32 itself gets ``x`` rounded to nearest.
        dtype: float32 or float64.
    """
    if dtype == jnp.float64:
        return x
    bits, limits = lax.bitcast_convert_type(x, jnp.int64), jnp.finfo(jnp.float32)
    rest = bits & np.int64(2**29 - 1)
    odd = lax.bitcast_convert_type((bits ^ rest) | jnp.where(rest != 0, 2**29, 0), jnp.float64)
    size = jnp.clip(jnp.abs(odd), float(limits.tiny), float(limits.max))
    whole = (odd == 0) | ~jnp.isfinite(odd)
    odd = jnp.where(whole, odd, jnp.copysign(size, odd))
    return jnp.where(row[0] > 21, x, odd).astype(jnp.float32)


_INTEGERS = {"float32": np.int32, "float64": np.int64}


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2 to an int64 exponent from -1022 to 1023, exactly (``exp2`` isn't, under XLA)."""
    return lax.bitcast_convert_type((exponent + 1023) << 52, jnp.float64)
