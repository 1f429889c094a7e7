"""Rounding to a format passed as data, so that one compiled program serves every format."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import FP32, FP64, FormatLike, Saturation
from ..formats import format as format_

# Mantissa bits, lowest exponent, largest number, result of overflow, result of rounding an
# infinity, smallest number, whether -0 exists, whether negative numbers exist.
FORMAT_PARAMS = 8
RANGE = 3  # the first of them, which tell formats apart


SMALLEST_EXPONENT = -800  # of a normal number, of formats that `round_by` rounds to


def format_params(fmt: FormatLike, saturate: Saturation = False) -> np.ndarray:
    """Returns a format as the eight numbers that :func:`round_by` reads: float64[8].

    Raises:
        ValueError: :func:`round_by` can't round to ``fmt``.
    """
    fmt = format_(fmt)
    if fmt == FP64:
        return np.array([52, -1022, np.finfo(np.float64).max, np.inf, np.inf, 0, 1, 1])
    if fmt.mantissa_bits < 1 or not fmt.zero or fmt.min_exponent - fmt.mantissa_bits < -900:
        raise ValueError(
            f"{fmt.name} isn't supported; expected a format with a zero, at least one "
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


def scale_params(params: np.ndarray, power: int) -> np.ndarray:
    """Rounding to that format equals multiplying by ``2**power``, rounding to the original format
    and dividing again: it models a scale, or a loss scale, without a change to the program."""
    params = params.copy()
    params[1] -= power
    params[[2, 3, 4, 5]] *= 2.0**-power
    return params


FP32_PARAMS, FP64_PARAMS = format_params(FP32), format_params(FP64)


def is_wide(params: Any) -> Any:
    return params[0] >= FP32.mantissa_bits


def is_wider(params: Any) -> Any:
    return params[0] > FP32.mantissa_bits


def round_by(x: jax.Array, params: jax.Array) -> jax.Array:
    """Rounds ``x`` once, to nearest with ties to even, to the format that ``params`` describes.

    Adding a power of two whose last bit is the last one that the format keeps, and subtracting it
    again, rounds all lower bits away. The power is taken from the number's own binade, or from the
    format's lowest binade for a subnormal number. The result has the same bits as
    :func:`scalewise.round_to` from the same dtype.

    Args:
        x: float64, or float32 if all of the format's numbers are normal in float32. For a wider
            format tried as a fix, numbers whose binade has no such power keep float32's digits.
        params: float64 that begins with :func:`format_params`'s numbers, known only at run time.
    """
    digits, integer = jnp.finfo(x.dtype).nmant, _INTEGERS[x.dtype.name]
    top = np.array(np.inf, x.dtype).view(integer)  # the exponent's field, all ones
    mantissa, lowest = params[0].astype(integer), params[1].astype(integer)
    largest, beyond, infinite, smallest = (params[i].astype(x.dtype) for i in range(2, 6))
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
    sign = jnp.where((y != 0) | (params[6] != 0), bits ^ magnitude, 0)
    y = lax.bitcast_convert_type(lax.bitcast_convert_type(y, integer) | sign, x.dtype)
    y = jnp.where((params[7] == 0) & (x < 0), jnp.nan, y)
    return jnp.where(mantissa >= digits, x, y)


_INTEGERS = {"float32": np.int32, "float64": np.int64}


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Returns 2 to an int64 exponent from -1022 to 1023, exactly (XLA's ``exp2`` isn't exact)."""
    return lax.bitcast_convert_type((exponent + 1023) << 52, jnp.float64)
