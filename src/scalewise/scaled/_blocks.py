"""``quantize`` for block formats, OCP Microscaling (MX) and NVFP4: one scale per block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ..formats import E8M0, BlockFormat, Format, Saturation
from ..rounding import EncodedArray, cast, encode, is_plain, round_to
from ._amax import amax_by_keys, is_known, to_top
from ._array import ScaledArray
from ._power import layout, nonzero, power_of_two, quotient, shrink
from ._scaling import Amax, FourOverSix, MsEden, Mx, Scaling


class CastOptions(TypedDict):
    rounding: str
    saturate: Saturation
    key: jax.Array | None


def quantize_blocks(
    x: jax.Array,
    fmt: BlockFormat,
    axis: int,
    scaling: Scaling | None,
    measured: jax.Array,
    tile: tuple[int, int] | None = None,
    numbers: bool = False,
    whole: jax.Array | None = None,
    **options: Unpack[CastOptions],
) -> ScaledArray:
    """Quantizes ``x``, float32 or float64, along an axis to a block format.

    Scales are computed from ``measured``: ``x``, or the same numbers computed separately.
    ``scaling`` is None for the format's own; ``tile`` is another axis, and how many of its
    indices share a scale. With ``numbers``, data and scales are floats of x's dtype in place of
    codes: the same numbers in a third of the operations. ``whole`` is the upper of two levels of
    scales if it is known; the result then has the lower ones alone.
    """
    if scaling is not None:
        scaling.check(fmt)
    narrowed = round_to if numbers else encode
    blocks, measured = (split_blocks(z, fmt.size, axis) for z in (x, measured))
    merged = partial(merge_blocks, shape=x.shape, axis=axis)
    if tile is not None:  # from here on an axis of the blocks
        tile = tile[0] + (tile[0] > axis), tile[1]
    measured, tainted = usable(measured, fmt, scaling, axis + 1, tile)

    def stored(blocks: jax.Array, saturate: Saturation | None = None) -> jax.Array | EncodedArray:
        if numbers or fmt.element.dtype is None or fmt.element.bits < 8:
            # codes of less than a byte are packed along the last axis
            return narrowed(merged(blocks), fmt.element, **options)
        # in the blocks' shape, in which XLA on a GPU fuses all that leads here
        own = options if saturate is None else CastOptions({**options, "saturate": saturate})
        return merged(cast(blocks, fmt.element, **own))

    if fmt.scale == E8M0:
        scaling = scaling or Mx()
        if not scaling.power_of_two:
            raise ValueError(f"{fmt.name} has powers of two for scales, {scaling!r} has others")
        exponent = scaling.exponents(measured, fmt.element, (axis + 1,))
        data = _over_powers(blocks, exponent, axis + 1, fmt.element, stored, options)
        code = (exponent + 127).astype(jnp.uint8)
        if tainted is not None:
            code = jnp.where(tainted, jnp.uint8(255), code)
        scale = lax.bitcast_convert_type(code, jnp.float8_e8m0fnu)
    else:
        finite = jnp.where(jnp.isfinite(measured), measured, 0)
        choose = None
        if isinstance(scaling, FourOverSix):
            choose = partial(_smaller_error, blocks, fmt.element, axis + 1, tile)
        scale, factor = scales_of(
            finite, tainted, fmt, axis + 1, scaling, choose, whole, encode=narrowed
        )
        scaled = over_scales(blocks, factor, axis + 1, options["rounding"])
        if isinstance(scaling, MsEden):
            key = options["key"]
            scale = scaling.corrected(scale, scaled, fmt, axis + 1, key, encode=narrowed)
            options["key"] = None
        data = stored(scaled)
    return ScaledArray(data, scale, (axis, fmt.size))


def usable(
    measured: jax.Array,
    fmt: BlockFormat,
    scaling: Scaling | None,
    axis: int,
    tile: tuple[int, int] | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the numbers of blocks from which scales are found, and which blocks are NaN."""
    tainted = None
    if nan_scales(fmt, scaling):
        tainted = _any(~jnp.isfinite(measured), axis)
    if tile is not None:
        finite = jnp.where(jnp.isfinite(measured), jnp.abs(measured), 0)
        measured = over_tiles(jnp.max, finite, tile)
    return measured, tainted


def over_scales(blocks: jax.Array, factor: jax.Array, axis: int, rounding: str) -> jax.Array:
    divisor = jnp.expand_dims(factor, axis).astype(blocks.dtype)
    return nonzero(quotient(blocks, divisor), blocks, rounding)


def nan_scales(fmt: BlockFormat, scaling: Scaling | None) -> bool:
    return fmt.element.nan_code is None or (isinstance(scaling, Mx) and scaling.nan_scale)


def round_in_blocks(x: jax.Array, fmt: BlockFormat, scaling: Mx | None = None) -> jax.Array:
    """Returns float32 ``x`` rounded to a block format along the middle of three axes.

    The same numbers as ``quantize(x, fmt, axis=1, scaling=scaling).value()``, for pairs of format
    and scaling of which :func:`rounds_in_blocks` is True, in half the operations; what is subnormal
    in float32 becomes 0, as in the products of backends that read it. None of the operations is
    a function of jax.numpy: tracing, lowering and compiling each of them takes time.
    """
    u, element = np.uint32, fmt.element
    blocks = split_blocks(x, fmt.size, 1)

    def spread(per_block: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(per_block, blocks.shape, (0, 1, 3))

    bits = lax.bitcast_convert_type(blocks, u)
    magnitude = lax.bitwise_and(bits, u(0x7FFFFFFF))
    infinity = _bits_of(np.inf)
    whole_blocks = nan_scales(fmt, scaling)
    if whole_blocks:
        largest = lax.reduce_max(lax.bitcast_convert_type(magnitude, np.int32), (2,))
    else:
        largest = lax.bitcast_convert_type(amax_by_keys(blocks, (2,)), np.int32)
    field = lax.shift_right_logical(largest, np.int32(23))
    below, last = (scaling or Mx()).step(element, x.dtype)
    if last is not None:
        above = lax.gt(lax.bitwise_and(largest, np.int32(0x007FFFFF)), np.int32(last))
        field = lax.add(field, lax.convert_element_type(above, np.int32))
    unit = np.int32(127 + element.max_exponent + below)
    highest = np.int32(127 - element.max_exponent)  # as in_scale_range has it
    exponent = lax.min(lax.max(lax.sub(field, unit), np.int32(-127)), highest)

    # |x| / 2**exponent; float32's subnormals count
    tiny = lax.lt(magnitude, u(1 << 23))
    inverse = _power(lax.sub(np.int32(127), exponent))
    lower = _power(lax.max(lax.sub(np.int32(127 - 149), exponent), np.int32(1)))
    size = lax.select(
        tiny,
        lax.convert_element_type(magnitude, np.float32),
        lax.bitcast_convert_type(magnitude, np.float32),
    )
    size = lax.mul(size, lax.select(tiny, spread(lower), spread(inverse)))

    whole = lax.bitcast_convert_type(size, u)
    rounded = _rounded_bits(size, whole, element)
    if element.nan_code is not None:
        beyond = magnitude if element.infinities else lax.full_like(whole, _bits_of(np.nan))
        rounded = lax.select(lax.ge(magnitude, infinity), beyond, rounded)

    # times 2**exponent in two factors, each of which is a normal number
    first = lax.shift_right_arithmetic(exponent, np.int32(1))
    factors = [_power(lax.add(e, np.int32(127))) for e in (first, lax.sub(exponent, first))]
    if whole_blocks:
        nan = lax.full_like(factors[1], np.nan)
        factors[1] = lax.select(lax.ge(largest, infinity.view(np.int32)), nan, factors[1])
    sign = lax.bitwise_and(bits, u(1 << 31))
    value = lax.bitcast_convert_type(lax.bitwise_or(rounded, sign), np.float32)
    for factor in factors:
        value = lax.mul(value, spread(factor))
    return merge_blocks(value, x.shape, 1)


def _power(field: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(lax.shift_left(field, np.int32(23)), np.float32)


def _bits_of(number: float | Fraction) -> np.uint32:
    return np.float32(float(number)).view(np.uint32)


def _rounded_bits(size: jax.Array, whole: jax.Array, element: Format) -> jax.Array:
    """Returns the bits of magnitudes rounded to an element format, at most its largest number."""
    u, m = np.uint32, element.mantissa_bits
    quantum = element.min_exponent - m
    odd = lax.bitwise_and(lax.shift_right_logical(whole, u(23 - m)), u(1))
    half = lax.add(odd, u((1 << (22 - m)) - 1))
    rounded = lax.bitwise_and(lax.add(whole, half), u(2**32 - (1 << (23 - m))))
    units = lax.round(lax.mul(size, np.float32(2.0**-quantum)), lax.RoundingMethod.TO_NEAREST_EVEN)
    small = lax.bitcast_convert_type(lax.mul(units, np.float32(2.0**quantum)), u)
    rounded = lax.select(lax.lt(whole, _bits_of(element.smallest_normal)), small, rounded)
    return lax.min(rounded, _bits_of(element.max))


def rounds_in_blocks(fmt: BlockFormat, scaling: Scaling | None = None) -> bool:
    """Returns whether :func:`round_in_blocks` supports a block format with a strategy."""
    if scaling is not None and not isinstance(scaling, Mx):
        return False
    # the inverse of the largest scale, 2^(127 - max_exponent), has to be a normal number
    return fmt.scale == E8M0 and is_plain(fmt.element) and fmt.element.max_exponent >= 1


def split_blocks(x: jax.Array, size: int, axis: int) -> jax.Array:
    """Returns ``x`` with an axis split into blocks; zeros fill up the last one."""
    length = x.shape[axis]
    count = -(-length // size)
    if not is_known(length) or length % size:
        short = count * size - length
        x = jnp.pad(x, [(0, short if a == axis else 0) for a in range(x.ndim)])
    return x.reshape((*x.shape[:axis], count, size, *x.shape[axis + 1 :]))


def merge_blocks(blocks: jax.Array, shape: Sequence[int], axis: int) -> jax.Array:
    """Returns the array of the given shape that :func:`split_blocks` has split."""
    count, size = blocks.shape[axis : axis + 2]
    data = blocks.reshape((*shape[:axis], count * size, *shape[axis + 1 :]))
    even = is_known(shape[axis]) and shape[axis] == count * size
    return data if even else lax.slice_in_dim(data, 0, shape[axis], axis=axis)


def over_tiles(reduce: Callable, x: jax.Array, tile: tuple[int, int]) -> jax.Array:
    axis, rows = tile
    tiles = split_blocks(x, rows, axis)
    result = jnp.broadcast_to(reduce(tiles, axis=axis + 1, keepdims=True), tiles.shape)
    return merge_blocks(result, x.shape, axis)


def _smaller_error(
    blocks: jax.Array,
    element: Format,
    axis: int,
    tile: tuple[int, int] | None,
    factors: Sequence[jax.Array],
) -> jax.Array:
    """Returns whether the second of two factors of each block has the smaller squared error.

    It has to be smaller by more than the errors' own rounding: where both are equal, as for blocks
    of a few small integers, the first is taken whatever the scale, as in the authors' code.
    """
    finite, errors = jnp.where(jnp.isfinite(blocks), blocks, 0), []
    factors = [f.astype(blocks.dtype) for f in factors]
    for factor in factors:
        scaled = finite / jnp.expand_dims(factor, axis)
        wrong = round_to(scaled, element, saturate="finite") - scaled
        wrong = wrong * jnp.expand_dims(factor / factors[0], axis)  # squares of it don't flush
        errors.append(jnp.sum(jnp.square(wrong), axis, keepdims=True))
    if tile is not None:
        errors = [over_tiles(jnp.sum, e, tile) for e in errors]
    return jnp.squeeze(errors[1] < errors[0] * np.asarray(1 - 2.0**-16, blocks.dtype), axis)


def scales_of(
    usable: jax.Array,
    tainted: jax.Array | None,
    fmt: BlockFormat,
    axis: int,
    scaling: Scaling | None,
    choose: Callable[..., jax.Array] | None = None,
    whole: jax.Array | None = None,
    encode: Callable[..., jax.Array | EncodedArray] = encode,
) -> tuple[jax.Array | EncodedArray | ScaledArray, jax.Array]:
    """Returns scales that are no powers of two, as stored, and the factors that they stand for.

    With a tensor scale, ``whole`` if it is known, the largest of them becomes the largest number of
    their format. Each is multiplied by 3/2 where ``choose``, a function of two candidates' factors,
    returns True. ``encode`` rounds and stores them.
    """
    scale = _unrounded_scales(usable, fmt, (axis,), scaling)
    given = whole is not None
    if fmt.tensor_scale is not None:
        whole = tensor_scale(scale, fmt, scaling) if whole is None else whole
        scale = quotient(scale, whole.astype(scale.dtype))
    # float32's subnormals would be flushed, and zeros divided by 0
    smallest = max(float(fmt.scale.smallest), float(jnp.finfo(jnp.float32).tiny))
    smallest = np.asarray(smallest, scale.dtype)

    def encoded(scale: jax.Array) -> tuple[jax.Array | EncodedArray, jax.Array]:
        stored = encode(jnp.maximum(scale, smallest), fmt.scale, saturate=True)
        return stored, stored.astype(jnp.float32)

    stored, factor = encoded(scale)
    if choose is not None:
        unit = np.float32(1) if whole is None else whole
        _, other = encoded(scale * np.asarray(1.5, scale.dtype))
        factor = jnp.where(choose((factor * unit, other * unit)), other, factor)
        stored = encode(factor, fmt.scale)
    if tainted is not None:
        stored = encode(jnp.where(tainted, jnp.nan, factor), fmt.scale)
    if whole is None:
        return stored, factor
    return stored if given else ScaledArray(stored, whole), factor * whole


def tensor_scale(scale: jax.Array, fmt: BlockFormat, scaling: Scaling | None) -> jax.Array:
    """Returns the upper scale of two levels, from unrounded scales of blocks."""
    largest = jnp.max(scale, initial=0)
    top = None if scaling is None else scaling.largest_block_scale
    if top is not None:
        largest = largest * np.asarray(float(fmt.scale.max) / top, largest.dtype)
    return to_top(largest.astype(jnp.float32), fmt.scale, False)[0]


def tensor_scale_of(amax: jax.Array, fmt: BlockFormat, scaling: Scaling | None) -> jax.Array:
    return tensor_scale(_unrounded_scales(amax.reshape(1), fmt, (0,), scaling), fmt, scaling)


def _unrounded_scales(
    usable: jax.Array, fmt: BlockFormat, axes: tuple[int, ...], scaling: Scaling | None
) -> jax.Array:
    scale, _ = (scaling or Amax(power_of_two=False)).scale(usable, fmt.element, axes)
    return jnp.where(_any(usable != 0, axes), scale, 0)


def _any(condition: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """``jnp.any``; Triton has no reductions of booleans."""
    return jnp.max(condition.astype(jnp.int32), axis=axis, initial=0) > 0


def _over_powers(
    x: jax.Array,
    exponent: jax.Array,
    axis: int,
    element: Format,
    stored: Callable[..., jax.Array | EncodedArray],
    options: CastOptions,
) -> jax.Array | EncodedArray:
    exponent = jnp.expand_dims(exponent, axis)
    rounding = options["rounding"]
    inverse = _inverse(exponent, x.dtype)

    def plainly() -> jax.Array | EncodedArray:
        return stored(shrink(x, inverse, rounding))

    def on_gpu() -> jax.Array | EncodedArray:
        if options["saturate"] != "finite" or element.infinities:
            return plainly()
        return stored(in_range(x, exponent, element, rounding), saturate=False)

    if x.dtype == jnp.float64:
        return plainly()
    # without a branch for blocks that are large enough: it made two programs of each rounding
    return lax.platform_dependent(
        cuda=on_gpu, default=lambda: stored(_divided(x, exponent, inverse, rounding))
    )


def in_range(
    x: jax.Array, exponent: jax.Array, element: Format, rounding: str = "nearest_even"
) -> jax.Array:
    """Returns ``x / 2**exponent``, clamped to the range of a format; an infinity becomes NaN.

    XLA on NVIDIA's GPUs flushes no subnormals (``xla_gpu_ftz``), and transposes what it stores in
    the same kernel, if nothing is selected on the way there: hence a product with 0.
    """
    y = shrink(x, _inverse(exponent, x.dtype), rounding)
    top, zero = (np.asarray(n, x.dtype) for n in (float(element.max), 0.0))
    return lax.clamp(-top, y, top) + y * zero


def _inverse(exponent: jax.Array, dtype: DTypeLike) -> jax.Array:
    # an exponent of 127 takes an amax of 2^127 and an element format below 2: its inverse flushes
    return power_of_two(jnp.maximum(-exponent, 1 - layout(dtype)[2]), dtype)


def _divided(x: jax.Array, exponent: jax.Array, inverse: jax.Array, rounding: str) -> jax.Array:
    bits = lax.bitcast_convert_type(x, jnp.int32)
    units = (bits & jnp.int32(0x007FFFFF)).astype(jnp.float32)
    subnormal = (bits & jnp.int32(0x7F800000)) == 0
    lower = power_of_two(jnp.maximum(-149 - exponent, -126))
    wide = jnp.where(subnormal, jnp.where(bits < 0, -units, units), x)
    return shrink(wide, jnp.where(subnormal, lower, inverse), rounding)
