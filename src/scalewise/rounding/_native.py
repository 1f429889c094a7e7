"""Casts by the device's own convert instruction, where that rounds as :func:`cast` defines it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format

# Formats to which XLA's convert from float32 rounds once, to nearest even, subnormals included. XLA
# defines it so (tested on all inputs on a CPU, `make prove`), and NVIDIA's `cvt.rn.satfinite` (PTX
# ISA, "cvt") does the same for whatever is in range. What isn't is decided here.
CONVERTED = frozenset({"e4m3fn", "e5m2", "e4m3"})


def converted(x: jax.Array, fmt: Format, saturate: bool | str) -> jax.Array:
    """``x`` in the format's dtype, by one convert and comparisons: a single fused kernel.

    The result equals the integer route's (:func:`nearest_codes`) on every input; it differs in
    speed alone: XLA on a CPU converts more slowly than integers are rounded, a GPU has an
    instruction for it, and XLA fuses it with the transposition that a product asks for.

    Args:
        x: float32, any shape.
        fmt: one whose name is in ``CONVERTED``.
        saturate: as for :func:`scalewise.cast`.
    """
    dtype, top = np.dtype(fmt.dtype), np.float32(float(fmt.max))
    size = lax.abs(x)
    y = lax.convert_element_type(lax.clamp(-top, x, top), dtype)
    code = lax.bitcast_convert_type(y, np.uint8)
    sign = jnp.where(lax.bitcast_convert_type(x, np.int32) < 0, np.uint8(128), np.uint8(0))
    if saturate is not True:
        infinite = size == np.float32(np.inf)
        over = infinite if saturate == "finite" else size > _limit(fmt)
        beyond = fmt.nan_code if fmt.infinity_code is None else fmt.infinity_code
        code = jnp.where(over, sign | np.uint8(beyond), code)
    code = jnp.where(size != size, sign | np.uint8(fmt.nan_code), code)
    return lax.bitcast_convert_type(code, dtype)


def _limit(fmt: Format) -> np.float32:
    """The largest float32 that rounds to the format's largest number.

    That is half a quantum above it; a tie goes down only where the largest number's code is even.
    """
    quantum = 2.0 ** (fmt.max_exponent - fmt.mantissa_bits)
    tie = np.float32(float(fmt.max) + quantum / 2)
    return tie if fmt.max_code % 2 == 0 else np.nextafter(tie, np.float32(0))
