"""``quantize_blocks``: OCP Microscaling (MX), a power-of-two scale for each run of elements."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import E8M0, BlockFormat, Format, block_format
from ..rounding import round_to
from ._array import ScaledArray
from ._power import ldexp

# How the scale's exponent is found from the largest magnitude of a block, by name.
SCALES = ("floor", "ceil", "even", "rceil")


def quantize_blocks(
    x: Any, fmt: BlockFormat | str, *, axis: int = -1, scale: str = "floor"
) -> ScaledArray:
    """``x`` in a block format: elements and their E8M0 scales along an axis.

    A block's scale is ``2^(floor(log2(amax)) - emax)`` as in the MX specification 1.0, 6.3, with
    ``amax`` the largest finite magnitude and ``emax`` the element format's largest exponent, held
    at E8M0's ends. Elements are rounded to nearest even, once; finite ones saturate. Subnormals
    of the input count, under jit too. A block of zeros has the smallest scale. An infinity stays
    one where the element format has it, else it becomes NaN. In an element format without NaN, a
    block that holds NaN or infinity has NaN for its scale, so that all of it is NaN.

    Args:
        x: float32, float16 or bfloat16, of at least one dimension.
        fmt: a block format, or its name: ``"mxfp8_e4m3"``, ``"mxfp8_e5m2"``, ``"mxfp4"``.
        axis: along which the blocks lie. The last block may be shorter.
        scale: the exponent, by torchao's names: ``"floor"`` as specified (a magnitude above the
            element's largest saturates); ``"ceil"``: ``ceil(log2(amax)) - emax``; ``"even"``:
            floor, after amax is rounded to the element's precision, ties up; ``"rceil"``:
            ``ceil(log2(amax / max))``, the smallest power of two with which nothing saturates.

    Returns:
        A ScaledArray whose data has the element's dtype and x's shape, whose scale is E8M0, and
        whose block is ``(axis, fmt.size)``.

    Raises:
        TypeError: x isn't float32, float16 or bfloat16.
        ValueError: an unknown format or scale, an axis that x doesn't have, or an element format
            without a dtype that XLA knows.

    Example:
        >>> import jax.numpy as jnp
        >>> a = quantize_blocks(jnp.array([1000.0, 1.0, -3.0]), "mxfp8_e4m3")
        >>> a.scale.tolist(), a.value().tolist()
        ([2.0], [896.0, 1.0, -3.0])
    """
    fmt = block_format(fmt)
    x = jnp.asarray(x)
    if x.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        raise TypeError(f"quantize_blocks takes float32, float16 or bfloat16, not {x.dtype}")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"quantize_blocks: axis is {axis!r}, but x has shape {x.shape}")
    if scale not in SCALES:
        accepted = " or ".join(map(repr, SCALES))
        raise ValueError(f"quantize_blocks: scale is {scale!r}; accepted: {accepted}")
    element, dtype = fmt.element, fmt.element.dtype
    if dtype is None or element.bits == 6 or fmt.scale != E8M0:
        raise ValueError(
            f"quantize_blocks: {fmt.name} has {element.name} elements and {fmt.scale.name} scales; "
            "accepted: elements with a dtype of 4, 8 or 16 bits, and E8M0 scales"
        )
    axis %= x.ndim
    length = x.shape[axis]
    wide = x.astype(jnp.float32)
    short = -length % fmt.size
    padding = [(0, short if a == axis else 0) for a in range(x.ndim)]
    split = (*x.shape[:axis], (length + short) // fmt.size, fmt.size, *x.shape[axis + 1 :])
    blocks = jnp.pad(wide, padding).reshape(split)
    exponent, broken = _exponent(blocks, element, axis + 1, scale)
    data = _scaled_down(blocks, jnp.expand_dims(exponent, axis + 1))
    data = round_to(data, element, saturate="finite")
    data = data.reshape(tuple(n + p for n, (_, p) in zip(x.shape, padding, strict=True)))
    data = lax.slice_in_dim(data, 0, length, axis=axis)
    code = (exponent + 127).astype(jnp.uint8)
    if element.nan_code is None:
        code = jnp.where(broken, jnp.uint8(255), code)
    scales = lax.bitcast_convert_type(code, jnp.float8_e8m0fnu)
    return ScaledArray(lax.convert_element_type(data, dtype), scales, (axis, fmt.size))


def _exponent(
    blocks: jax.Array, element: Format, axis: int, scale: str
) -> tuple[jax.Array, jax.Array]:
    """Each block's scale as a power of two, int32 in -127..127; whether it isn't all finite."""
    magnitude = lax.bitcast_convert_type(blocks, jnp.uint32) & jnp.uint32(0x7FFFFFFF)
    finite = magnitude < jnp.uint32(0x7F800000)
    amax = jnp.max(jnp.where(finite, magnitude, jnp.uint32(0)), axis=axis, initial=np.uint32(0))
    field = (amax >> jnp.uint32(23)).astype(jnp.int32)  # 0, a subnormal, ends at -127 anyway
    exponent = field - 127 - element.max_exponent
    fraction = amax & jnp.uint32(0x7FFFFF)
    largest = int(np.float32(float(element.max)).view(np.uint32)) & 0x7FFFFF
    half = 1 << (22 - element.mantissa_bits)
    above = {"ceil": 0, "even": (1 << 23) - half - 1, "rceil": largest}  # from there, one higher
    if scale in above:
        exponent += (fraction > jnp.uint32(above[scale])).astype(jnp.int32)
    return jnp.clip(exponent, -127, 127), ~jnp.all(finite, axis=axis)


def _scaled_down(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """``x / 2**exponent``, float32 subnormals of x counted although backends flush them."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    units = (bits & jnp.int32(0x007FFFFF)).astype(jnp.float32)
    subnormal = (bits & jnp.int32(0x7F800000)) == 0
    units = jnp.where(bits < 0, -units, units)
    return ldexp(jnp.where(subnormal, units, x), -exponent - jnp.where(subnormal, 149, 0))
