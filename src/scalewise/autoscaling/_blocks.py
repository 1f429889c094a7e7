"""Operands whose blocks have scales of their own, and their products by a device's units."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .._jax import ad, batching, has_explicit_mesh, jex, mlir, needs_devices
from ..devices import Device
from ..formats import BF16, E2M1FN, E8M0, BlockFormat, Format, RoundingMode
from ..interpret import Equation, by_platform, outlined
from ..primitives import params
from ..rounding import EncodedArray, is_packed, round_to
from ..rounding import widened as from_codes
from ..scaled import (
    Amax,
    ScaledArray,
    Scaling,
    amax,
    is_known,
    merge_blocks,
    nan_scales,
    over_scales,
    over_tiles,
    quantize_measured,
    round_in_blocks,
    rounds_in_blocks,
    scales_of,
    split_blocks,
    tensor_scale_of,
    wide_value,
)
from ._block_kernel import BlockRounding, kernel_for, rounded_by_kernel
from ._keys import draws_by_index, random_bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """An operand whose blocks have scales of their own.

    Attributes:
        copy: numbers and scales. With a ``source``, a program for a CPU must not read them.
        format: a block format, or an element format with scales along some axes.
        in_flight: the dtype of the operand in flight.
        source: the operand itself, which a CPU rounds in one function without the copy between;
            None if it multiplies the copy's numbers by their scales.
        key: the numbers of the random key by which the source is rounded, if any.
        options: how the source is rounded, as :func:`in_blocks` is asked to.
    """

    copy: ScaledArray
    format: BlockFormat | Format = dataclasses.field(metadata={"static": True})
    in_flight: DTypeLike = dataclasses.field(metadata={"static": True})
    source: jax.Array | None = None
    key: jax.Array | None = None
    options: tuple = dataclasses.field(default=(), metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.copy.shape

    @property
    def ndim(self) -> int:
        return self.copy.ndim

    @property
    def dtype(self) -> np.dtype:
        """BF16 holds an FP8, FP6 or FP4 number times a power of two: it has float32's exponents."""
        fmt, dtype = self.format, jnp.dtype(self.in_flight)
        if not isinstance(fmt, BlockFormat) or fmt.scale != E8M0:
            return dtype
        exact = fmt.element.mantissa_bits <= BF16.mantissa_bits
        return jnp.dtype(jnp.bfloat16) if exact and dtype in (jnp.float32, jnp.bfloat16) else dtype

    def value(self, dtype: DTypeLike | None = None) -> jax.Array:
        dtype = jnp.dtype(self.dtype if dtype is None else dtype)
        operands = self.copy, self.source, self.key
        options = self.format, self.dtype, dtype, self.options
        if self.source is None:
            return outlined(_from_copy, options, *operands)
        result = jax.ShapeDtypeStruct(self.source.shape, dtype)
        routes = {"default": _from_copy, "whole_cpu": _from_source}
        return by_platform(routes, options, result, *operands)


Factor: TypeAlias = tuple[jax.Array | Blocks, jax.Array | None]
"""An operand's numbers, and their scale, a power of two; None for 1."""


def in_blocks(
    x: jax.Array,
    fmt: BlockFormat,
    scaling: Scaling | None,
    axis: int,
    rounding: RoundingMode = "nearest_even",
    tile: tuple[int, int] | None = None,
    key: jax.Array | None = None,
    device: Device | None = None,
    wide: jax.Array | None = None,
    signs: jax.Array | None = None,
) -> Blocks:
    """Returns ``x`` rounded to a block format along an axis.

    ``scaling`` is None for the format's own; ``tile`` is another axis, and how many of its
    indices share a scale; ``key`` is for stochastic rounding of the numbers or of the scales.
    ``device``, if one is known, may have a kernel, which reads ``wide`` instead of ``x``: it casts
    ``wide`` by itself and, with ``signs``, transforms it.
    """
    # the numbers of a key, since one of the older kind is an array of them
    data = None if key is None else jax.random.key_data(key)
    kind = None if key is None else jax.random.key_impl(key)
    options, element = (fmt, scaling, axis, rounding, tile, kind), fmt.element
    rule = kernel_for(x, options, signs, device)
    if rule is not None:
        options, given = (*options, rule), x if wide is None else wide
        result = _copy_type(x.shape, fmt, axis, by_kernel=True)
        routes = {"default": rounded_by_kernel, "whole_cpu": _unread}
        copy = by_platform(routes, options, result, given, data, signs)
        return Blocks(copy, fmt, x.dtype, x, data, options[:-1])
    known = all(map(is_known, x.shape)) and x.size and x.dtype.itemsize <= 4
    has_type = is_packed(element) or (element.dtype is not None and element.bits == 8)
    if not (known and has_type and fmt.scale.dtype is not None):
        return Blocks(outlined(_in_blocks, options, x, data), fmt, x.dtype)
    routes = {"default": _in_blocks, "whole_cpu": _unread}
    copy = by_platform(routes, options, _copy_type(x.shape, fmt, axis), x, data)
    return Blocks(copy, fmt, x.dtype, x, data, options)


def _copy_type(
    shape: tuple[int, ...], fmt: BlockFormat, axis: int, *, by_kernel: bool = False
) -> ScaledArray:
    *outer, length = shape
    element = fmt.element
    data: Any
    scale: Any
    data = jax.ShapeDtypeStruct(shape, element.dtype)
    if is_packed(element) and not by_kernel:
        packed = jax.ShapeDtypeStruct((*outer, -(-length * element.bits // 8)), jnp.uint8)
        data = EncodedArray.tree_unflatten((element, length), (packed,))
    counts = tuple(-(-n // fmt.size) if i == axis else n for i, n in enumerate(shape))
    scale = jax.ShapeDtypeStruct(counts, fmt.scale.dtype)
    if fmt.tensor_scale is not None:
        whole: Any = jax.ShapeDtypeStruct((), jnp.float32)
        scale = ScaledArray(scale, whole)
    return ScaledArray(data, scale, (axis, fmt.size))


def _unread(options: tuple, x: jax.Array, *given: jax.Array | None) -> ScaledArray:
    """Returns zeros whose scales are NaN, in place of a copy that nothing reads."""
    del given
    fmt, _, axis, *_, rule = options

    def blank(type_: jax.ShapeDtypeStruct) -> jax.Array:
        number = np.nan if type_.dtype in (jnp.float8_e8m0fnu, jnp.float32) else 0
        return lax.full(type_.shape, number, type_.dtype)

    by_kernel = isinstance(rule, BlockRounding)
    return jax.tree.map(blank, _copy_type(x.shape, fmt, axis, by_kernel=by_kernel))


def quantized(x: Blocks) -> ScaledArray:
    if x.source is None:
        return x.copy
    return outlined(_in_blocks, x.options, x.source, x.key)


def _in_blocks(options: tuple, x: jax.Array, data: jax.Array | None = None) -> ScaledArray:
    fmt, scaling, axis, rounding, tile, kind = options
    key = None if data is None else jax.random.wrap_key_data(data, impl=kind)
    # passed twice, since XLA on a GPU chooses different layouts for the maxima and the numbers
    return quantize_measured(x, x, fmt, scaling, axis, rounding=rounding, tile=tile, key=key)


def _from_copy(options: tuple, copy: ScaledArray, *_: jax.Array | None) -> jax.Array:
    fmt, narrow, dtype, _ = options
    data = copy.data
    data = data if isinstance(data, EncodedArray) else widened(data, jnp.float32)
    wide = wide_value(dataclasses.replace(copy, data=data, value_dtype=None), flushes=True)
    return _through(wide, fmt, narrow).astype(dtype)


def _through(x: jax.Array, fmt: BlockFormat | Format, narrow: np.dtype) -> jax.Array:
    """Returns float32 numbers rounded to the dtype in flight, which holds those of a power of two.

    Of two converts, to bfloat16 and back, XLA would leave out both.
    """
    if jnp.finfo(narrow).nmant >= 23 or (isinstance(fmt, BlockFormat) and fmt.scale == E8M0):
        return x.astype(narrow)
    return lax.reduce_precision(x, jnp.finfo(narrow).nexp, jnp.finfo(narrow).nmant).astype(narrow)


def _from_source(
    options: tuple, copy: ScaledArray, source: jax.Array, key: jax.Array | None
) -> jax.Array:
    fmt, narrow, dtype, (_, scaling, axis, rounding, tile, kind) = options
    key = None if key is None else jax.random.wrap_key_data(key, impl=kind)
    nearest = rounding == "nearest_even" and key is None
    if nearest and tile is None and rounds_in_blocks(fmt, scaling):
        outer, length, inner = (source.shape[s] for s in (slice(axis), axis, slice(axis + 1, None)))
        count, length = (1, length) if length % fmt.size else (length // fmt.size, fmt.size)
        # the middle one of three axes is that of blocks
        rows = source.reshape(math.prod(outer) * count, length, math.prod(inner))
        return outlined(_rounded, (fmt, dtype, scaling), rows).reshape(source.shape)
    if fmt.scale == E8M0 or not isinstance(scaling, Amax | None):
        given = source, None if key is None else jax.random.key_data(key)
        value = outlined(_decoded, (fmt, scaling, axis, rounding, tile, kind), *given)
        return _through(value, fmt, narrow).astype(dtype)
    square, along = False, axis
    if tile is not None and tile[1] == fmt.size:
        # a weight has the same finite numbers in both orientations, which XLA computes once
        square, axis, tile = True, max(axis, tile[0]), (min(axis, tile[0]), fmt.size)
    largest = outlined(_largest, (fmt, axis, tile), source)
    tainted = None
    if nan_scales(fmt, scaling) and not square:
        tainted = outlined(_tainted, (fmt, axis), source).reshape(-1)
    whole = None
    if fmt.tensor_scale is not None:
        whole = outlined(_tensor_scale, (fmt, scaling), jnp.max(largest, initial=0))
    factor = outlined(_factors, (fmt, scaling), largest.reshape(-1), tainted, whole)
    blocks = split_blocks(source, fmt.size, axis)
    outer, inner = blocks.shape[: axis + 1], blocks.shape[axis + 2 :]
    shape = math.prod(outer), fmt.size, math.prod(inner)
    factor = factor.reshape(shape[0], shape[2])
    bits = None
    if key is not None:
        bits = outlined(_bits, (source.shape, kind), jax.random.key_data(key))
        bits = split_blocks(bits, fmt.size, axis).reshape(shape)
    value = outlined(_over_factors, (fmt, rounding), blocks.reshape(shape), factor, bits)
    value = merge_blocks(value.reshape(blocks.shape), source.shape, axis)
    if nan_scales(fmt, scaling) and square:
        value = outlined(_with_nan, (fmt, along), source, value)
    return _through(value, fmt, narrow).astype(dtype)


def _rounded(options: tuple, x: jax.Array) -> jax.Array:
    fmt, dtype, scaling = options
    return round_in_blocks(x.astype(jnp.float32), fmt, scaling).astype(dtype)


def _decoded(options: tuple, x: jax.Array, data: jax.Array | None) -> jax.Array:
    fmt, scaling, axis, rounding, tile, kind = options
    key = None if data is None else jax.random.wrap_key_data(data, impl=kind)
    own = {"rounding": rounding, "tile": tile, "key": key}
    copy = quantize_measured(x, x, fmt, scaling, axis, numbers=True, **own)
    return wide_value(copy, flushes=True)


# The steps of rounding to blocks whose scales aren't powers of two. Equal ones share a function,
# for which a CPU's compiler takes a tenth of a second and more: the tensor's scale is the same for
# arrays of all shapes, blocks' scales for equally many blocks.


def _largest(options: tuple, x: jax.Array) -> jax.Array:
    """Returns each block's largest magnitude."""
    fmt, axis, tile = options
    found = amax(split_blocks(x.astype(jnp.float32), fmt.size, axis), (axis + 1,), False)
    return found if tile is None else over_tiles(jnp.max, found, tile)


def _tainted(options: tuple, x: jax.Array) -> jax.Array:
    """Returns whether one of a block's numbers isn't finite."""
    fmt, axis = options
    return jnp.any(~jnp.isfinite(split_blocks(x, fmt.size, axis)), axis + 1)


def _with_nan(options: tuple, x: jax.Array, value: jax.Array) -> jax.Array:
    fmt, axis = options
    blocks = split_blocks(value, fmt.size, axis)
    nan = jnp.where(jnp.expand_dims(_tainted(options, x), axis + 1), np.float32(np.nan), blocks)
    return merge_blocks(nan, x.shape, axis)


def _tensor_scale(options: tuple, largest: jax.Array) -> jax.Array:
    return tensor_scale_of(largest, *options)


def _factors(
    options: tuple, largest: jax.Array, tainted: jax.Array | None, whole: jax.Array | None
) -> jax.Array:
    """Returns what blocks are divided by, and multiplied by afterwards; NaN for tainted ones."""
    fmt, scaling = options
    found = scales_of(largest[:, None], None, fmt, 1, scaling, whole=whole, encode=round_to)
    return found[1] if tainted is None else jnp.where(tainted, np.float32(np.nan), found[1])


def _bits(options: tuple, data: jax.Array) -> jax.Array:
    shape, kind = options
    size = math.prod(shape)
    if draws_by_index(kind) and size < 2**32:
        return random_bits(data[0], data[1], lax.iota(jnp.uint32, size)).reshape(shape)
    return jax.random.bits(jax.random.wrap_key_data(data, impl=kind), shape, jnp.uint32)


def _over_factors(
    options: tuple, blocks: jax.Array, factor: jax.Array, bits: jax.Array | None
) -> jax.Array:
    fmt, rounding = options
    scaled = over_scales(blocks.astype(jnp.float32), factor, 1, rounding)
    rounded = round_to(scaled, fmt.element, rounding=rounding, saturate="finite", bits=bits)
    return rounded * jnp.expand_dims(factor, 1)


def widened(x: jax.Array, dtype: DTypeLike, shift: int = 0) -> jax.Array:
    """Returns ``x / 2**shift`` in a dtype that holds it.

    XLA treats two converts, to FP8 and back, as one that changes nothing, and on a GPU or a TPU
    leaves both out. So FP8 numbers are widened from their codes.
    """
    if x.dtype == dtype and not shift:
        return x
    if x.dtype.itemsize > 1 or not shift:
        wide = x if x.dtype.itemsize > 1 else from_codes(x)
        return wide.astype(dtype)
    return (x.astype(jnp.float32) * np.float32(2.0**-shift)).astype(dtype)


block_product_p = jex.Primitive("block_product")


def takes_blocks(equation: Equation, a: ScaledArray, b: ScaledArray) -> bool:
    """Returns whether both operands' blocks are of one size, along one pair of contracted axes.

    False on an explicit mesh, where the sharding of such a product isn't known.
    """
    if equation.name != "dot_general" or has_explicit_mesh():
        return False
    if a.block is None or b.block is None:
        return False
    (left, right), _ = params.dot_dimensions(equation)
    (i, size), (j, other) = a.block, b.block
    i, j = i + a.ndim, j + b.ndim
    return size == other and i in left and right[left.index(i)] == j and 0 not in (a.size, b.size)


def block_product(
    dimensions: Sequence[params.AxisPair],
    a: ScaledArray,
    b: ScaledArray,
    multiply: Callable[..., jax.Array],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Multiplies two operands block by block; the factors are still to be applied.

    ``multiply`` gets each operand's numbers and both operands' scales, ``[batch, free, ...]``.
    """
    contracted, batch = dimensions
    assert a.block is not None
    # of several contracted axes, the one along which blocks lie becomes the innermost
    last = contracted[0].index(a.block[0] + a.ndim)
    order = [k for k in range(len(contracted[0])) if k != last] + [last]
    shape, arranged = [a.shape[i] for i in batch[0]], []
    for z, axes, own in zip((a, b), contracted, batch, strict=True):
        shape += [n for i, n in enumerate(z.shape) if i not in (*axes, *own)]
        arranged.append(_arranged(z, [axes[k] for k in order], own))
    (x, x_scale), (y, y_scale) = arranged
    out = multiply(x, y, x_scale, y_scale)
    scales = [z.tensor_scale for z in (a, b)]
    return out.reshape(shape), tuple(s.astype(jnp.float32) for s in scales if s is not None)


def on_device(x, y, x_scale, y_scale, *, dtype: DTypeLike) -> jax.Array:
    """Returns the sums over blocks of ``scale_x * scale_y * dot(block_x, block_y)``, in float32."""
    return block_product_p.bind(x, y, x_scale, y_scale, dtype=jnp.dtype(dtype))


def _arranged(
    x: ScaledArray, contracted: Sequence[int], batch: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """Returns an operand's numbers, ``[batch, free, contracted]``, and its scales likewise."""
    assert x.block is not None
    data = in_four_bits(x.data) if isinstance(x.data, EncodedArray) else x.data
    scale = x.scale.data if isinstance(x.scale, ScaledArray) else x.scale
    assert isinstance(scale, jax.Array)
    axis, size = x.block
    free = [i for i in range(x.ndim) if i not in (*contracted, *batch)]
    order = (*batch, *free, *contracted)
    short = -x.shape[axis] % size
    data = jnp.transpose(data, order)
    if short:  # pads with zeros, which have any scale
        data = jnp.pad(data, [(0, 0)] * (x.ndim - 1) + [(0, short)])
    sizes = [math.prod(x.shape[i] for i in axes) for axes in (batch, free)]
    scale = jnp.transpose(scale, order)
    return data.reshape(*sizes, -1), scale.reshape(*sizes, -1)


def in_four_bits(data: EncodedArray) -> jax.Array:
    """Returns packed codes of E2M1 as an array of XLA's dtype, without a copy."""
    assert data.format == E2M1FN
    pairs = lax.bitcast_convert_type(data.codes, jnp.float4_e2m1fn)
    whole = pairs.reshape(*data.codes.shape[:-1], -1)
    return lax.slice_in_dim(whole, 0, data.length, axis=-1)


def _in_float32(x, y, x_scale, y_scale, *, dtype):
    def whole(data, scale):
        size = data.shape[-1] // scale.shape[-1]
        return data.astype(jnp.float32) * jnp.repeat(scale.astype(jnp.float32), size, axis=-1)

    axes = (((2,), (2,)), ((0,), (0,)))
    out = lax.dot_general(whole(x, x_scale), whole(y, y_scale), axes)
    return out.astype(dtype)


def _abstract(x, y, x_scale, y_scale, *, dtype):
    return x.update(shape=(*x.shape[:2], y.shape[1]), dtype=dtype, weak_type=False)


def _batched(args, dims, *, dtype):
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    moved = [batching.bdim_at_front(x, d, size) for x, d in zip(args, dims, strict=True)]
    out = block_product_p.bind(*[x.reshape(-1, *x.shape[2:]) for x in moved], dtype=dtype)
    return out.reshape(size, -1, *out.shape[1:]), 0


def _jvp(primals, tangents, *, dtype):
    out = block_product_p.bind(*primals, dtype=dtype)
    wide = [p.astype(jnp.float32) for p in primals]
    given = [
        jnp.zeros_like(p) if type(t) is ad.Zero else t.astype(jnp.float32)  # pyright: ignore
        for p, t in zip(wide, tangents, strict=True)
    ]
    _, tangent = jax.jvp(lambda *args: _in_float32(*args, dtype=dtype), wide, given)
    return out, tangent


block_product_p.def_impl(jax.jit(_in_float32, static_argnames="dtype"))
block_product_p.def_abstract_eval(_abstract)
batching.primitive_batchers[block_product_p] = _batched
ad.primitive_jvps[block_product_p] = _jvp
mlir.register_lowering(block_product_p, mlir.lower_fun(_in_float32, multiple_results=False))
_by_units = mlir.lower_fun(
    lambda *x, dtype: jax.nn.scaled_matmul(*x, preferred_element_type=dtype),
    multiple_results=False,
)
mlir.register_lowering(block_product_p, _by_units, platform="cuda")
needs_devices(block_product_p)
