"""``quantize``: stores an array in a narrow format or a block format, with scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._check import checked
from .._resolve import as_format
from ..formats import (
    CATALOGUE,
    FP32,
    BlockFormat,
    BlockFormatLike,
    Format,
    RoundingMode,
    Saturation,
)
from ..rounding import encode, float_array, has_float64, round_to, saturation
from ._array import ScaledArray
from ._blocks import quantize_blocks
from ._power import nonzero, quotient, shrink
from ._scaling import Amax, Scaling


def storable(fmt: Format) -> Format:
    """Returns the format if XLA has a dtype of whole bytes for it that holds zero; else raises."""
    if fmt.dtype is None or fmt.bits < 8 or not fmt.zero:
        can = [f.name for f in CATALOGUE.values() if f.dtype and 8 <= f.bits <= 16 and f.zero]
        raise ValueError(
            f"{fmt.name} has no storage dtype of whole bytes that holds zero; "
            f"expected one of {', '.join(can)}"
        )
    return fmt


@checked
def quantize(
    x: ArrayLike | ScaledArray,
    fmt: BlockFormatLike,
    *,
    scaling: Scaling | None = None,
    axis: int | tuple[int, ...] | None = None,
    rounding: RoundingMode = "nearest_even",
    saturate: Saturation | None = None,
    key: jax.Array | None = None,
) -> ScaledArray:
    """Stores ``x`` in a narrow format, with a scale per tensor, per index of an axis or per block.

    Scales depend on the finite elements alone. An infinity stays one where the format has
    infinities, else it becomes NaN; a NaN stays NaN; the finite elements beside them keep their
    values. In a format without NaN, a scale whose elements include a NaN or an infinity is NaN, and
    so are all of these elements.

    Block formats are those of OCP Microscaling (MX) 1.0, section 6.3, and NVFP4 (arXiv
    2509.25149). A block of zeros has the smallest scale. The last block may be shorter. Subnormals
    of the input count, under jit too.

    Args:
        x: an array of floats of any width (narrower than float32 are widened), or a
            :class:`ScaledArray`.
        fmt: a format or a block format, or a name of one.
        scaling: how the scale is chosen: :class:`Amax` (by default), :class:`LeastSquares`,
            :class:`Unit`, :class:`Fixed`, :class:`Delayed`; for blocks with E8M0
            scales also :class:`Mx`, their default.
        axis: axes that keep a scale for each index; None for one scale for the whole array. With a
            block format: the one axis along which the blocks lie, by default the last.
        rounding: of the elements, as for :func:`scalewise.cast`.
        saturate: as for :func:`scalewise.cast`; by default ``"finite"`` where numbers can lie
            beyond the format's largest.
        key: a JAX random key, for stochastic rounding.

    Returns:
        Data as :func:`scalewise.rounding.encode` stores them; the array stands for one of x's
        dtype. The scale broadcasts over them; it is float32 (float64 for float64), or in a block
        format of the block's own dtype; with NVFP4 it is a ScaledArray itself. Each element is ``x
        / scale`` rounded once, in formats of at most 10 mantissa bits (except for what lies more
        than the dtype's own range below the largest magnitude).

    Raises:
        TypeError: x isn't a real floating-point array.
        ValueError: an unknown format, a format without zero, an axis that x doesn't have, a scale
            that the block format can't hold.

    Example:
        >>> import jax.numpy as jnp
        >>> quantize(jnp.array([3e-6, 1e-6]), "e4m3fn").value().tolist()
        [3.0994415283203125e-06, 9.5367431640625e-07]
        >>> a = quantize(jnp.array([1000.0, 1.0, -3.0]), "mxfp8_e4m3")
        >>> a.scale.tolist(), a.value().tolist()
        ([2.0], [896.0, 1.0, -3.0])
    """
    fmt = as_format(fmt, "quantize", blocks=True)
    if isinstance(fmt, Format) and not fmt.zero:
        raise ValueError(f"quantize: {fmt.name} has no zero: it is for scales, not for data")
    saturate = None if saturate is None else saturation(saturate, fmt)
    if isinstance(x, ScaledArray):
        return _again(x, fmt, scaling, axis, rounding=rounding, saturate=saturate, key=key)
    if getattr(x, "dtype", None) == np.float64 and not has_float64():
        x = round_to(x, FP32, rounding="to_odd")  # so that the second rounding gives what one would
    x = float_array(x, "quantize")
    dtype = np.dtype(x.dtype)
    if x.dtype not in (jnp.float32, jnp.float64):
        x = x.astype(jnp.float32)
    found = _run(x, key, scaling, (fmt, axis, rounding, saturate, True, None, False))
    return dataclasses.replace(found, value_dtype=dtype)


def quantize_measured(
    x: jax.Array,
    measured: jax.Array,
    fmt: Format | BlockFormat,
    scaling: Scaling | None,
    axis: int | None = None,
    *,
    rounding: RoundingMode = "nearest_even",
    tile: tuple[int, int] | None = None,
    key: jax.Array | None = None,
    numbers: bool = False,
) -> ScaledArray:
    """:func:`quantize` with scales found from another array of the same numbers.

    ``measured`` is ``x``, computed apart from it: what a compiler need not store for both. ``axis``
    is the one along which blocks lie, None for an element format, which gets one scale. ``tile`` is
    another axis, and how many of its indices share the scale of a block. With ``numbers``, data and
    scales of blocks are floats in place of codes, for a program that decodes them at once.
    """
    dtype = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    x, measured = x.astype(dtype), measured.astype(dtype)
    return _run(x, key, scaling, (fmt, axis, rounding, None, False, tile, numbers), measured)


def _run(x, key, scaling: Scaling | None, options: tuple, measured=None) -> ScaledArray:
    """Calls :func:`_quantized`, as one compiled program unless the strategy holds arrays."""
    run = _compiled
    try:
        hash(scaling)
    except TypeError:
        run = _quantized
    return run(x, key, scaling, options, measured)


def _quantized(
    x: jax.Array,
    key: jax.Array | None,
    scaling: Scaling | None,
    options: tuple,
    measured: jax.Array | None,
) -> ScaledArray:
    fmt, axis, rounding, saturate, nan_scale, tile, numbers = options
    axes = _axes(x, axis, isinstance(fmt, BlockFormat))
    measured = x if measured is None else measured
    if isinstance(fmt, BlockFormat):
        saturate = "finite" if saturate is None else saturate
        settings = {"rounding": rounding, "saturate": saturate, "key": key}
        return quantize_blocks(x, fmt, axes[0], scaling, measured, tile, numbers, **settings)
    scaling = Amax() if scaling is None else scaling
    over = tuple(a for a in range(x.ndim) if a not in axes)
    scale, inverse = scaling.scale(measured, fmt, over, keepdims=axis is not None)
    if scaling.power_of_two:
        data = shrink(x, jnp.broadcast_to(inverse, x.shape), rounding)
    else:
        data = nonzero(quotient(x, scale), x, rounding)
    if saturate is None:
        saturate = "finite" if scaling.may_exceed(fmt) else False
    if nan_scale and fmt.nan_code is None:
        finite = jnp.all(jnp.isfinite(x), axis=over, keepdims=axis is not None)
        scale = jnp.where(finite, scale, jnp.nan)
    return ScaledArray(encode(data, fmt, rounding=rounding, saturate=saturate, key=key), scale)


# Called outside of jit, quantize is one compiled program.
_compiled = jax.jit(_quantized, static_argnums=(2, 3))


def _axes(x: jax.Array, axis: int | Sequence[int] | None, block: bool) -> tuple[int, ...]:
    if block:
        axis = -1 if axis is None else axis
        if not isinstance(axis, int | np.integer):
            raise ValueError(f"quantize: blocks lie along one axis; axis is {axis!r}")
    if axis is None:
        return ()
    kept = (axis,) if isinstance(axis, int | np.integer) else tuple(axis)
    if not all(-x.ndim <= a < x.ndim for a in kept):
        raise ValueError(f"quantize: axis is {axis!r}, but x has shape {x.shape}")
    return tuple(a % x.ndim for a in kept)


def _again(x: ScaledArray, fmt, scaling, axis, **options) -> ScaledArray:
    """Quantizes a ScaledArray again: its scale is kept, or multiplied into the new one."""
    data = x.data.astype(x.wide_dtype)
    old = x.scale
    exact = (scaling is None or scaling.power_of_two) and not isinstance(fmt, BlockFormat)
    if not isinstance(old, jax.Array) or old.ndim or not exact:
        new = quantize(x.astype(x.wide_dtype), fmt, scaling=scaling, axis=axis, **options)
        return dataclasses.replace(new, value_dtype=x.value_dtype)
    settings = fmt, axis, options["rounding"], options["saturate"], True, None, False
    new = _run(data, options["key"], scaling, settings)
    assert isinstance(new.scale, jax.Array)
    return dataclasses.replace(x, data=new.data, scale=new.scale * old.astype(new.scale.dtype))
