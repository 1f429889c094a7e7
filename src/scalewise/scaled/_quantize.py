"""``quantize``: an array in a narrow format behind a scale found from the array itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import BLOCK_FORMATS, CATALOGUE, BlockFormat, Format
from ..formats import format as format_
from ..rounding import cast
from ._array import ScaledArray
from ._blocks import quantize_blocks
from ._power import layout


@dataclasses.dataclass(frozen=True)
class Amax:
    """The power of two that puts the largest magnitude under the format's last full binade.

    Neither the largest magnitude nor its rounding overflows, so nothing saturates; one pass over
    the data. It isn't put above 2^15 in a format with more exponents, so that sums of products
    stay in float32's range. NaN and infinities stay what they are.
    """

    def scale(
        self, x: jax.Array, fmt: Format, axes: Sequence[int], keepdims: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """The scale over the given axes, and its exact inverse; both are normal numbers.

        Few operations, since a program pays them at each of its contractions: the exponent field
        of the largest magnitude is the power of two below it, and adding to it scales.
        """
        signed, mantissa_bits, bias = layout(x.dtype)
        integer = np.uint64 if signed is np.int64 else np.uint32
        top = min(fmt.max_exponent - 1, 14)
        axes = [a % x.ndim for a in axes]
        amax = lax.reduce_max(lax.abs(x), axes) if x.size else jnp.zeros((), x.dtype)
        if keepdims:
            amax = lax.expand_dims(amax, axes)
        one = 1 << mantissa_bits  # the lowest bit of the exponent field
        field = lax.bitcast_convert_type(amax, integer) & integer(2 * bias * one + one)
        field = lax.clamp(integer(max(1, top + 1) * one), field, integer(2 * bias * one))
        scale = lax.bitcast_convert_type(field - integer(top * one), x.dtype)
        inverse = lax.bitcast_convert_type(integer((2 * bias + top) * one) - field, x.dtype)
        return scale, inverse


def storable(fmt: Format) -> Format:
    """The format, if arrays of it can be stored with zeros and in whole bytes.

    Raises:
        ValueError: it can't.
    """
    if fmt.dtype is None or fmt.bits < 8 or not fmt.zero:
        can = [f.name for f in CATALOGUE.values() if f.dtype and 8 <= f.bits <= 16 and f.zero]
        raise ValueError(
            f"{fmt.name} has no storage dtype of whole bytes that holds zero; "
            f"accepted: {', '.join(can)}"
        )
    return fmt


def quantize(
    x: Any,
    fmt: Format | BlockFormat | str,
    *,
    scaling: Amax | None = None,
    axis: int | tuple[int, ...] | None = None,
) -> ScaledArray:
    """``x`` in a narrow format behind a power-of-two scale.

    Args:
        x: float32 or float64 (narrower floats are widened), any shape.
        fmt: a format or a block format, or a name; block formats as in :func:`quantize_blocks`.
        scaling: how the scale is chosen; :class:`Amax` by default.
        axis: axes that keep a scale for each index; None for one scale for the whole array. With a
            block format: the one axis along which the blocks lie, by default the last.

    Returns:
        Data as :func:`scalewise.cast` stores it; scale powers of two, of x's dtype, that broadcast
        over it. Each element is rounded once: ``x / scale`` is exact but for what lies more than
        the dtype's own range below the largest magnitude.

    Raises:
        TypeError: x isn't a real floating-point array.
        ValueError: an unknown format, one that no dtype stores, or an axis that x doesn't have.

    Example:
        >>> import jax.numpy as jnp
        >>> quantize(jnp.array([3e-6, 1e-6]), "e4m3fn").value().tolist()
        [3.0994415283203125e-06, 9.5367431640625e-07]
    """
    if isinstance(fmt, BlockFormat) or (isinstance(fmt, str) and fmt.lower() in BLOCK_FORMATS):
        along = -1 if axis is None else axis
        if scaling is not None or not isinstance(along, int):
            raise ValueError(
                f"quantize: {fmt} takes one axis and finds its own scales, not axis={axis!r}, "
                f"scaling={scaling!r}"
            )
        return quantize_blocks(x, fmt, axis=along)
    fmt = storable(format_(fmt))
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"quantize takes real floating-point arrays, not {x.dtype}")
    if x.dtype not in (jnp.float32, jnp.float64):
        x = x.astype(jnp.float32)
    axes = tuple(range(x.ndim))
    if axis is not None:
        kept = (axis,) if isinstance(axis, int) else tuple(axis)
        if not all(-x.ndim <= a < x.ndim for a in kept):
            raise ValueError(f"quantize: axis is {axis!r}, but x has shape {x.shape}")
        axes = tuple(a for a in axes if a not in {k % x.ndim for k in kept})
    scale, inverse = (scaling or Amax()).scale(x, fmt, axes, keepdims=axis is not None)
    data = cast(x * jnp.broadcast_to(inverse, x.shape), fmt)
    return ScaledArray(data, scale)
