"""Casts by the device's own convert instruction, where that rounds as :func:`cast` defines it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format

# Formats to which XLA's convert from float32 rounds as :func:`nearest_codes` does: once, to nearest
# even, subnormals included, overflow to infinity or NaN. On a CPU that is tested on all inputs
# (`make prove`); on NVIDIA's devices XLA emits `cvt.rn.satfinite` (PTX ISA), which rounds what is
# in range once, and replaces what would round beyond the largest number itself.
CONVERTED = frozenset({"e4m3fn", "e5m2", "e4m3"})


def converted(x: jax.Array, fmt: Format, saturate: bool | str) -> jax.Array:
    """``x`` in the format's dtype by one convert: a single kernel where an instruction does it.

    The result equals the integer route's (:func:`nearest_codes`) on every input, but for the sign
    and the payload of a NaN. XLA on a CPU converts more slowly than integers are rounded; on a GPU
    integers take three passes over the data, and only a convert is fused with the transposition
    that a product asks for.

    Args:
        x: float32, any shape.
        fmt: one whose name is in ``CONVERTED``.
        saturate: as for :func:`scalewise.cast`.
    """
    top = np.float32(float(fmt.max))
    if saturate is not False:
        within = lax.clamp(-top, x, top)
        infinite = lax.abs(x) == np.float32(np.inf)
        x = jnp.where(infinite, x, within) if saturate == "finite" else within
    return lax.convert_element_type(x, np.dtype(fmt.dtype))
