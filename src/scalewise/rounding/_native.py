"""Casts by XLA's convert, for formats to which it rounds exactly as :func:`cast`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format

# Formats to which XLA's convert from float32 rounds as :func:`nearest_codes` does: once, to nearest
# even, subnormals included, overflow to infinity or NaN. `make prove` tests all inputs on a CPU.
# For NVIDIA GPUs XLA emits `cvt.rn.satfinite` (PTX ISA), which rounds values in range once, and
# replaces the saturated results of values out of range itself.
CONVERTED = frozenset({"e4m3fn", "e5m2", "e4m3"})


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
        infinite = lax.abs(x) == np.float32(np.inf)
        x = jnp.where(infinite, x, within) if saturate == "finite" else within
    return lax.convert_element_type(x, np.dtype(fmt.dtype))
