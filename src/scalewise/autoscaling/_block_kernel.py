"""A kernel for NVIDIA's GPUs that rounds an array to blocks, in the layouts that products read.

It casts, transforms and rounds an array that it reads once for both of its last axes. XLA reads it
for the scales along each axis and to round, and writes transforms and codes in 32 bits.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .._jax import gpu_kernel, has_explicit_mesh
from ..devices import Device, units_for
from ..formats import E8M0, NVFP4, BlockFormat, Format, RoundingMode
from ..rounding import EncodedArray, codes_of, nearest_codes, pack, round_bits, stored
from ..scaled import (
    Amax,
    Mx,
    ScaledArray,
    Scaling,
    amax,
    amax_by_keys,
    in_range,
    is_known,
    nan_scales,
    over_scales,
    over_tiles,
    quantize_measured,
    rounds_in_blocks,
    scales_of,
    split_blocks,
    tensor_scale_of,
    usable,
)
from ._kernels import kernel_primitive
from ._keys import draws_by_index, hadamard_transform, random_bits

TILE = 64  # rows and columns of an array that one program of the kernel rounds


@dataclasses.dataclass(frozen=True)
class BlockRounding:
    """How the kernel rounds a matrix.

    Attributes:
        fmt, scaling, rounding: as for ``quantize``.
        axes: those along which blocks lie.
        dtype: to which numbers are cast first.
        tile: the number of rows, or columns, that share a scale.
        operands: the names of the operands beside the matrix: ``"whole"``, the tensor's scale;
            ``"key"``, of random bits; ``"signs"``, of a Hadamard transform.
    """

    fmt: BlockFormat
    scaling: Scaling | None
    axes: tuple[int, ...]
    dtype: DTypeLike
    rounding: RoundingMode = "nearest_even"
    tile: int = 1
    operands: tuple[str, ...] = ()

    @property
    def packed(self) -> int:
        return 8 // self.fmt.element.bits

    def types(self, shape: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
        """Returns the types of numbers and scales for each axis, which is the last one of both."""
        fmt, found = self.fmt, []
        data = jnp.uint8 if self.packed > 1 else fmt.element.dtype
        for axis in self.axes:
            a, b = shape if axis else shape[::-1]
            found.append(jax.ShapeDtypeStruct((a, b // self.packed), data))
            found.append(jax.ShapeDtypeStruct((a, b // fmt.size), fmt.scale.dtype))
        return found


def kernel_for(
    x: jax.Array, options: tuple, signs: jax.Array | None, device: Device | None
) -> BlockRounding | None:
    """Returns how the kernel rounds an operand for a GPU with units for its blocks, or None."""
    fmt, scaling, axis, rounding, tile, kind = options
    if device is None or device.platform != "cuda" or units_for(fmt, fmt, device) is None:
        return None
    last = {x.ndim - 2, x.ndim - 1}
    if x.ndim < 2 or axis not in last or x.dtype.itemsize > 4 or has_explicit_mesh():
        return None
    if not all(map(is_known, x.shape)) or not 0 < x.size < 2**31 or x.shape[-2] % fmt.size:
        return None
    if x.shape[-1] % TILE or x.size // x.shape[-1] % TILE:
        return None
    nearest, both = rounding == "nearest_even" and kind is None, fmt != NVFP4 or tile is not None
    if fmt == NVFP4:
        fits = nearest or (rounding == "stochastic" and draws_by_index(kind))
        fits = fits and isinstance(scaling, Amax | None)
        fits = fits and (tile is None or ({axis, tile[0]} == last and tile[1] == fmt.size))
        fits = fits and (signs is None or signs.size in (4, 16, 64))
    else:
        fits = nearest and signs is None and tile is None and rounds_in_blocks(fmt, scaling)
        fits = fits and fmt.element.bits == 8 and not fmt.element.infinities
        fits = fits and not nan_scales(fmt, scaling)
    axes, size = (1, 0) if both else (axis - x.ndim + 2,), 1 if tile is None else tile[1]
    return BlockRounding(fmt, scaling, axes, x.dtype, rounding, size) if fits else None


def rounded_by_kernel(
    options: tuple, x: jax.Array, key: jax.Array | None, signs: jax.Array | None
) -> ScaledArray:
    """Returns an array in blocks along an axis; the kernels of both axes may be one for XLA."""
    _, _, axis, *_, rule = options
    matrix, whole, fmt = x.reshape(-1, x.shape[-1]), None, rule.fmt
    named = {name: z for name, z in (("key", key), ("signs", signs)) if z is not None}
    if fmt.tensor_scale is not None:
        whole = tensor_scale_of(largest(rule, matrix, signs), fmt, rule.scaling)
        named["whole"] = whole
    rule = dataclasses.replace(rule, operands=tuple(named))
    outs = by_kernel_p.bind(matrix, *named.values(), rule=rule)
    at = 2 * rule.axes.index(axis - x.ndim + 2)
    data, scale = outs[at : at + 2]
    if rule.packed > 1:
        data = lax.bitcast_convert_type(data, fmt.element.dtype).reshape(data.shape[0], -1)
    if axis == x.ndim - 1:
        data, scale = (y.reshape(*x.shape[:-1], -1) for y in (data, scale))
    else:
        sizes = x.shape[-2], x.shape[-2] // fmt.size
        data, scale = (
            jnp.moveaxis(y.reshape(-1, *x.shape[:-2], n), 0, -1)
            for y, n in zip((data, scale), sizes, strict=True)
        )
    scale = scale if whole is None else ScaledArray(scale, whole)
    return ScaledArray(data, scale, (axis, fmt.size))


def largest(rule: BlockRounding, x: jax.Array, signs: jax.Array | None) -> jax.Array:
    """Returns the largest finite magnitude of an operand, or of its transform, in one pass of XLA.

    Each row of a transform's part is an array of its own, so that nothing is stored in between.
    """
    wide = x.astype(rule.dtype).astype(jnp.float32)
    if signs is None:
        return amax(wide, (0, 1), False)
    size, axis = signs.size, rule.axes[0] + 1
    blocks = split_blocks(wide, size, rule.axes[0])
    rows = [lax.index_in_dim(blocks, i, axis, False) * signs[i] for i in range(size)]
    half = size // 2
    while half:
        rows = [rows[i - half] - y if i & half else y + rows[i + half] for i, y in enumerate(rows)]
        half //= 2
    rows = [(y * np.float32(size**-0.5)).astype(rule.dtype).astype(jnp.float32) for y in rows]
    return amax_by_keys(rows, range(rows[0].ndim))


# -- one tile ------------------------------------------------------------------------------------


def by_kernel(
    x: jax.Array, *operands: jax.Array, rule: BlockRounding, interpret: bool = False
) -> list[jax.Array]:
    types, results = rule.types(x.shape), []
    for i, y in enumerate(types):
        order = (0, 1) if rule.axes[i // 2] else (1, 0)
        tile = TILE, TILE * y.shape[1] // x.shape[order[1]]
        codes = jax.ShapeDtypeStruct(y.shape, jnp.uint8) if i % 2 else y
        results.append((codes, tile, order))
    given = [(x, (TILE, TILE), (0, 1)), *((z.reshape(-1), (z.size,), None) for z in operands)]
    grid, kernel = tuple(n // TILE for n in x.shape), partial(_round_tile, rule, x.shape[1])
    outs = gpu_kernel(kernel, grid, given, results, interpret)
    return [lax.bitcast_convert_type(y, t.dtype) for y, t in zip(outs, types, strict=True)]


def _round_tile(rule: BlockRounding, columns: int, at: tuple, x, *refs) -> None:
    """Rounds a tile along the last axis, transposed first for blocks along the other one.

    Transposed at the end, Triton takes minutes to compile it.
    """
    fmt, element = rule.fmt, rule.fmt.element
    own, outs = dict(zip(rule.operands, refs, strict=False)), list(refs[len(rule.operands) :])
    signs = own["signs"][...] if "signs" in own else None
    for axis in rule.axes:
        tile = (x[...] if axis else x[...].T).astype(rule.dtype).astype(jnp.float32)
        if signs is not None:
            tile = butterflies(tile, signs).astype(rule.dtype).astype(jnp.float32)
        blocks = split_blocks(tile, fmt.size, 1)
        if fmt.scale == E8M0:
            exponent = (rule.scaling or Mx()).exponents(blocks, element, (2,))
            data = in_range(blocks, jnp.expand_dims(exponent, 2), element).astype(element.dtype)
            scale = (exponent + 127).astype(jnp.uint8)
        else:
            measured, tainted = usable(blocks, fmt, rule.scaling, 2, None)
            finite = jnp.where(jnp.isfinite(measured), jnp.abs(measured), 0)
            if rule.tile > 1:  # the largest of each block before those of the tile
                largest = over_tiles(jnp.max, jnp.max(finite, 2), (0, rule.tile))
                finite = jnp.expand_dims(largest, 2)
            options = {"whole": own["whole"][0], "encode": _encode}
            scale, factor = scales_of(finite, tainted, fmt, 2, rule.scaling, **options)
            bits = _bits(own["key"], columns, at, axis) if "key" in own else None
            data = over_scales(blocks, factor, 2, rule.rounding)
            if bits is None:
                data = nearest_codes(data, element, "finite")
            else:
                bits = bits.reshape(data.shape)
                data = codes_of(round_bits(data, element, "finite", rule.rounding, bits), element)
            scale = lax.bitcast_convert_type(jnp.asarray(scale), jnp.uint8)
        data = data.reshape(TILE, TILE)
        if rule.packed > 1:
            pairs = data.astype(jnp.uint32).reshape(TILE, -1, 2)
            shift = 4 * lax.broadcasted_iota(jnp.uint32, pairs.shape, 2)
            data = jnp.sum(pairs << shift, axis=-1, dtype=jnp.uint32).astype(jnp.uint8)
        outs.pop(0)[...] = data
        outs.pop(0)[...] = scale


def butterflies(x: jax.Array, signs: jax.Array) -> jax.Array:
    """Returns the Hadamard transform of parts of a matrix's rows; their size is 4**k."""
    size, (rows, length) = signs.size, x.shape
    blocks = x.reshape(rows, length // size, size)
    x, half = blocks * lax.broadcast_in_dim(signs, blocks.shape, (2,)), size // 2
    while half:
        pairs = x.reshape(rows, length // (2 * half), 2, 1, half)
        i, j = (lax.broadcasted_iota(jnp.int32, (2, 2), a) for a in (0, 1))
        sign = (1 - 2 * (i & j)).astype(jnp.float32)
        sign = lax.broadcast_in_dim(sign, (*pairs.shape[:3], 2, half), (2, 3))
        x, half = jnp.sum(pairs * sign, axis=2), half // 2
    return x.reshape(rows, length) * np.float32(size**-0.5)


def _encode(x: jax.Array, fmt: Format, saturate: bool = True) -> jax.Array:
    return stored(nearest_codes(x, fmt, saturate), fmt)


def _bits(key, columns: int, at: tuple, axis: int) -> jax.Array:
    own = (
        TILE * at[a] + lax.broadcasted_iota(jnp.int32, (TILE, TILE), a ^ 1 ^ axis) for a in (0, 1)
    )
    row, column = own
    return random_bits(key[0], key[1], (row * columns + column).astype(jnp.uint32))


# -- without the kernel --------------------------------------------------------------------------


def by_xla(x: jax.Array, *operands: jax.Array, rule: BlockRounding) -> list[jax.Array]:
    own, found = dict(zip(rule.operands, operands, strict=True)), []
    key = jax.random.wrap_key_data(own["key"]) if "key" in own else None
    for axis in rule.axes:
        y = x.astype(rule.dtype)
        if "signs" in own:
            y = hadamard_transform(y, axis, own["signs"]).astype(rule.dtype)
        tile = None if rule.tile == 1 else (1 - axis, rule.tile)
        options = {"rounding": rule.rounding, "tile": tile, "key": key}
        copy = quantize_measured(y, y, rule.fmt, rule.scaling, axis, **options)
        data = copy.data.unpacked() if isinstance(copy.data, EncodedArray) else copy.data
        scale = copy.scale.data if isinstance(copy.scale, ScaledArray) else copy.scale
        data, scale = (z if axis else z.T for z in map(jnp.asarray, (data, scale)))
        found += [pack(data, rule.fmt.element) if rule.packed > 1 else data, scale]
    return found


def _types(x, *operands, rule: BlockRounding) -> list[jax.ShapeDtypeStruct]:
    del operands
    return rule.types(x.shape)


by_kernel_p = kernel_primitive("by_kernel", by_kernel, by_xla, _types)
