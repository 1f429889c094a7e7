"""Arguments that come quantized: products multiply their numbers as they are stored."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from .._jax import manual_now
from ..formats import BLOCK_FORMATS, E4M3FN, NVFP4, BlockFormat, Format
from ..formats import format as format_
from ..interpret import Argument, Equation, Value, is_float
from ..primitives import params
from ..rounding import EncodedArray, encode
from ..scaled import ScaledArray, quotient
from ..scalifying import ScaledValue, is_quantized, materialize
from ._blocks import Blocks, Factor, in_four_bits
from ._sending import COLLECTIVES, as_bits

STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedValue:
    """An argument in at most 8 bits, which nothing has changed so far.

    Operations that only move elements move the stored numbers. A product multiplies them; for all
    other operations :meth:`load` computes the value.

    Attributes:
        stored: the argument, whose scales (of both levels, in NVFP4) have as many axes as data, so
            that a loop may slice the first one.
        dtype: of the value in flight.
        given: the shapes of the argument's scales, if the value is an argument itself, or after
            assignments to parts of it; None for one that was moved.
        shared: for each array of scales, the mesh axes over which all devices are known to have
            the same one; () if none is known, as of arguments.
    """

    stored: ScaledArray
    dtype: DTypeLike = dataclasses.field(metadata=STATIC)
    given: tuple[tuple[int, ...], ...] | None = dataclasses.field(default=None, metadata=STATIC)
    shared: tuple[frozenset[str], ...] = dataclasses.field(default=(), metadata=STATIC)

    @property
    def data(self) -> jax.Array | EncodedArray:
        return self.stored.data

    @property
    def scale(self) -> jax.Array | ScaledArray | None:
        scale = self.stored.scale
        assert not isinstance(scale, EncodedArray)
        return scale

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def blocked(self) -> int | None:
        """The axis along which blocks lie."""
        return None if self.stored.block is None else self.stored.block[0] + self.data.ndim

    @property
    def one_scale(self) -> bool:
        return self.scale is None or (isinstance(self.scale, jax.Array) and self.scale.size == 1)

    @property
    def shared_scales(self) -> Sequence[tuple[jax.Array, frozenset[str]]]:
        """Each array of scales, with the mesh axes over which devices are known to share it."""
        arrays = jax.tree.leaves(self.scale)
        return [*zip(arrays, self.shared or [frozenset[str]()] * len(arrays), strict=True)]

    @property
    def argument(self) -> ScaledArray | None:
        """The argument that the value is, with scales of the same shapes; None for another."""
        if self.given is None:
            return None
        scales, tree = jax.tree.flatten(self.scale)
        own = [s.reshape(shape) for s, shape in zip(scales, self.given, strict=True)]
        return dataclasses.replace(self.stored, scale=tree.unflatten(own))

    @property
    def array(self) -> ScaledArray:
        """The value; of several scales of the upper level, which no device's units take, none."""
        scale = self.scale
        if isinstance(scale, ScaledArray):
            upper = jnp.asarray(scale.scale)
            if upper.size == 1:
                scale = ScaledArray(scale.data, upper.reshape(()))
            else:
                scale = scale.data.astype(jnp.float32) * upper
        return ScaledArray(self.data, scale, self.stored.block, self.stored.value_dtype)

    @property
    def format(self) -> Format | BlockFormat:
        """The block format that has these numbers, scales and blocks, else the numbers' format."""
        array = self.array
        data, block, scale = array.data, array.block, array.scale
        element = data.format if isinstance(data, EncodedArray) else format_(data.dtype)
        if block is None or scale is None:
            return element
        upper = isinstance(scale, ScaledArray)
        own = format_(scale.data.dtype if upper else scale.dtype)
        for fmt in BLOCK_FORMATS.values():
            known = fmt.element, fmt.scale, fmt.size, fmt.tensor_scale is not None
            if known == (element, own, block[1], upper):
                return fmt
        return BlockFormat(f"{element.name}_blocks", element, scale=own, size=block[1])

    @functools.cached_property
    def value(self) -> ScaledValue:
        return ScaledValue(self.array.astype(self.dtype))

    def load(self) -> ScaledValue:
        return self.value

    def split_over(
        self, mesh: Mesh, spec: PartitionSpec
    ) -> tuple[QuantizedValue, QuantizedValue] | None:
        """Returns the value as a ``shard_map`` takes it, and the specs of its arrays.

        None if numbers that share a scale of their own block would get to several devices.
        """
        axes = [() if n is None else (n,) if isinstance(n, str) else tuple(n) for n in spec]
        axes += [()] * (self.data.ndim - len(axes))
        counts = [math.prod(mesh.shape[n] for n in own) for own in axes]
        parts = list(counts)  # what the length of each axis has to be a multiple of
        if self.blocked is not None and self.stored.block:
            parts[self.blocked] *= self.stored.block[1]
        if any(n % k for n, k in zip(self.shape, parts, strict=True)):
            return None

        def own(x: jax.Array) -> tuple[tuple[str, ...], ...]:
            return tuple(n if k > 1 else () for n, k in zip(axes, x.shape, strict=False))

        data, new = self.data, frozenset(mesh.axis_names) - manual_now()
        shared = [(s | new) - {*itertools.chain(*own(x))} for x, s in self.shared_scales]
        if isinstance(data, EncodedArray) and data.length:
            length = data.length // counts[-1]
            if counts[-1] > 1 and length * data.format.bits % 8:
                return None
            data = dataclasses.replace(data, length=length)
        stored = ScaledArray.tree_unflatten(self.stored.tree_flatten()[1], (data, self.scale))
        here = dataclasses.replace(self, stored=stored, given=None, shared=tuple(shared))
        return here, jax.tree.map(lambda x: PartitionSpec(*own(x)), here)

    def as_operand(self) -> QuantizedOperand:
        """Returns a value of this shape and dtype without data, for rules of products."""
        blank = jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))
        return QuantizedOperand(blank, quantized=self)  # pyright: ignore[reportArgumentType]

    def factor(self, equation: Equation, contracted: Sequence[int]) -> Factor:
        """A scale that is the same for all numbers of a sum is applied behind the product."""
        scale, data = self.scale, self.data
        outside = (
            isinstance(scale, jax.Array)
            and self.blocked is None
            and equation.name == "dot_general"
            and all(scale.shape[a] == 1 for a in contracted)
        )
        if isinstance(data, EncodedArray) or not (self.one_scale or outside):
            # the dtype of the result, which an argument's own weak dtype doesn't decide
            half = equation.out_avals[0].dtype == jnp.bfloat16
            return Blocks(self.array, self.format, jnp.bfloat16 if half else self.dtype), None
        scale = jnp.float32(1) if scale is None else scale.astype(jnp.float32)
        return data, scale.reshape(()) if scale.size == 1 else scale

    def unstacked(self) -> QuantizedValue:
        def rows(x: jax.Array) -> jax.Array:
            return jnp.broadcast_to(x, (self.shape[0], *x.shape[1:]))

        stored = dataclasses.replace(self.stored, scale=jax.tree.map(rows, self.scale))
        return dataclasses.replace(self, stored=stored, given=None)


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedOperand(ScaledValue):
    quantized: QuantizedValue = dataclasses.field(kw_only=True)


def quantized_argument(x: Argument, dtype: DTypeLike) -> QuantizedValue | None:
    """Returns a ScaledArray as the value that products multiply as it is stored; else None."""
    if not is_quantized(x):
        return None
    scale = x.scale.data if isinstance(x.scale, ScaledArray) else x.scale
    if isinstance(scale, EncodedArray):
        return None

    def full(s: jax.Array) -> jax.Array:
        return s if s.ndim else s.reshape((1,) * x.ndim)

    stored = dataclasses.replace(x, scale=jax.tree.map(full, x.scale))
    return QuantizedValue(stored, dtype, tuple(s.shape for s in jax.tree.leaves(x.scale)))


def moved(equation: Equation, inputs: Sequence[Value]) -> QuantizedValue | None:
    move = MOVES.get(equation.name)
    floats = [x for x, a in zip(inputs, equation.in_avals, strict=True) if is_float(a)]
    if move is None or len(floats) != 1 or not isinstance(inputs[0], QuantizedValue):
        return None
    return move(equation, inputs)


def assigned(equation: Equation, inputs: Sequence[Value]) -> QuantizedValue | None:
    """Returns a quantized argument after an assignment to a part of it; None for all others.

    What is assigned is rounded to the argument's format, with the scales that are there: a cache of
    keys and values stays as it is stored. Numbers beyond the format saturate.
    """
    x = inputs[0] if inputs else None
    if equation.name not in ("dynamic_update_slice", "scatter") or not isinstance(
        x, QuantizedValue
    ):
        return None
    at = 1 if equation.name == "dynamic_update_slice" else 2
    new = inputs[at].load() if isinstance(inputs[at], QuantizedValue) else inputs[at]
    if (
        isinstance(x.data, EncodedArray)
        or x.blocked is not None
        or not isinstance(new, ScaledValue)
    ):
        return None
    numbers = materialize(new).astype(jnp.float32)
    if isinstance(x.scale, jax.Array):
        scale = _assigned_scale(equation, x.scale, numbers.shape)
        if scale is None:
            return None
        numbers = quotient(numbers, jnp.broadcast_to(scale, numbers.shape))
    codes = encode(numbers, format_(x.data.dtype), saturate="finite")
    rest = [codes if i == at else v for i, v in enumerate(inputs)]
    (data,) = equation.bind(x.data, *cast(Sequence[jax.Array], rest[1:]))
    return dataclasses.replace(x, stored=dataclasses.replace(x.stored, data=data))


def _assigned_scale(
    equation: Equation, scale: jax.Array, shape: tuple[int, ...]
) -> jax.Array | None:
    """Returns the scale of what is assigned, with its axes; None if it has a part of the scales."""
    axes = params.assigned_axes(equation, scale.ndim)
    lengths = [1] * len(shape)
    for axis, n in enumerate(scale.shape):
        if n == 1:
            continue
        if axis not in axes or shape[axes[axis]] != n:
            return None
        lengths[axes[axis]] = n
    return scale.astype(jnp.float32).reshape(lengths)


def _convert(equation: Equation, inputs: Sequence[Value]) -> QuantizedValue | None:
    dtype = equation.out_avals[0].dtype
    if not jnp.issubdtype(dtype, jnp.floating) or np.dtype(dtype).itemsize < 2:
        return None
    kept, x = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32, inputs[0]
    given = x.given if dtype == equation.in_avals[0].dtype else None  # a weak type becomes strong
    return dataclasses.replace(x, dtype=kept, given=given)


def _each(
    x: QuantizedValue, f: Callable[[jax.Array], jax.Array], axis: int | None, last: bool
) -> QuantizedValue:
    """Applies a function to numbers and scales.

    Args:
        x: the value.
        f: the function.
        axis: where it leaves the axis of the blocks; None without blocks.
        last: whether it leaves the last axis as it is, so that packed codes stay packed.
    """
    if last and isinstance(x.data, EncodedArray):
        data = dataclasses.replace(x.data, codes=f(x.data.codes))
    else:
        data = f(_unpacked(x))
    block = None if x.stored.block is None else (cast(int, axis) - data.ndim, x.stored.block[1])
    stored = dataclasses.replace(x.stored, data=data, scale=jax.tree.map(f, x.scale), block=block)
    return dataclasses.replace(x, stored=stored, given=None)


def _of_one_scale(x: QuantizedValue, data: jax.Array) -> QuantizedValue:
    scale = None if x.scale is None else jnp.asarray(x.scale).reshape((1,) * data.ndim)
    stored = dataclasses.replace(x.stored, data=data, scale=scale)
    return dataclasses.replace(x, stored=stored, given=None)


def _unpacked(x: QuantizedValue) -> jax.Array:
    """Returns codes of fewer than 8 bits in a dtype that holds their numbers.

    NVFP4's stay as they are, four bits each, which units multiply; all others become E4M3FN.
    """
    data = x.data
    if not isinstance(data, EncodedArray):
        return data
    if x.format == NVFP4:
        return in_four_bits(data)
    return data.astype(jnp.float32).astype(E4M3FN.dtype)


def _transpose(equation: Equation, inputs: Sequence[Value]) -> QuantizedValue | None:
    (x,) = inputs
    order = params.permutation(equation)
    axis = None if x.blocked is None else list(order).index(x.blocked)
    return _each(x, lambda a: lax.transpose(a, order), axis, order[-1] == len(order) - 1)


def _reshape(equation: Equation, inputs: Sequence[Value]) -> QuantizedValue | None:
    """Moves axes of length 1, or any axes of an array with one scale."""
    x, shape = inputs[0], equation.out_avals[0].shape
    if math.prod(shape) != x.data.size:
        return None
    if x.one_scale and not isinstance(x.data, EncodedArray):
        return _of_one_scale(x, lax.reshape(x.data, shape))
    if [n for n in shape if n != 1] != [n for n in x.shape if n != 1]:
        return None
    # each axis of the result, with the axis that it was; None for one of length 1
    before = iter([i for i, n in enumerate(x.shape) if n != 1])
    origins = [None if n == 1 else next(before) for n in shape]
    blocked = x.blocked
    if blocked is not None and blocked not in origins:
        return None

    def f(a: jax.Array) -> jax.Array:
        return a.reshape([1 if i is None else a.shape[i] for i in origins])

    axis = None if blocked is None else origins.index(blocked)
    return _each(x, f, axis, origins[-1:] == [len(x.shape) - 1])


def _slices(equation: Equation, inputs: Sequence[Value]) -> QuantizedValue | None:
    """Cuts a slice out of axes along which all numbers, or none, share a scale."""
    x, *rest = inputs
    shape = equation.out_avals[0].shape
    blocked = x.blocked
    if blocked is not None and shape[blocked] != x.shape[blocked]:
        return None

    def cut(a: jax.Array) -> jax.Array:
        whole = [a.shape[i] != x.shape[i] for i in range(a.ndim)]
        if equation.name == "dynamic_slice":
            starts = [jnp.zeros_like(s) if w else s for s, w in zip(rest, whole, strict=True)]
            sizes = [a.shape[i] if w else shape[i] for i, w in enumerate(whole)]
            return lax.dynamic_slice(a, starts, sizes)
        own = zip(*params.slice_bounds(equation), a.shape, whole, strict=True)
        bounds = [(0, n, 1) if w else (start, end, step) for start, end, step, n, w in own]
        return lax.slice(a, *zip(*bounds, strict=True))

    return _each(x, cut, blocked, shape[-1] == x.shape[-1])


def _take(equation: Equation, inputs: Sequence[Value]) -> QuantizedValue | None:
    x, *rest = inputs
    if not x.one_scale or isinstance(x.data, EncodedArray):
        return None
    if equation.name == "gather" and params.fill_value(equation) is not None:
        return None
    return _of_one_scale(x, equation.bind(x.data, *rest)[0])


def _sent(equation: Equation, inputs: Sequence[Value]) -> QuantizedValue | None:
    """Sends the stored numbers by a collective that only moves them, and scales that differ.

    Where a device joins numbers that had one scale each, it repeats the scale for each of them.
    Blocks and bytes stay whole.
    """
    (x,), (split, joined) = inputs, params.exchanged_axes(equation)
    axes, groups = params.axis_name(equation), params.axis_groups(equation)
    over = frozenset(map(str, axes if isinstance(axes, tuple) else (axes,)))
    count = lax.axis_size(axes) if groups is None else len(groups[0])
    gathers = split is None and joined is not None
    new = joined if gathers and not params.is_tiled(equation) else None
    data, block, after = x.data, x.stored.block, equation.out_avals[0].shape

    lengths: dict[int, int] = {}  # along each axis that changes, of the numbers that stay together
    if joined is not None and new is None:
        lengths[joined] = x.shape[joined]
    if split is not None:
        lengths[split] = x.shape[split] // count
    last, packed = data.ndim - 1, isinstance(data, EncodedArray) and data.length > 0
    bits = lengths.get(last, 0) * data.format.bits if packed else 0
    size = 1 if block is None else block[1]
    if bits % 8 or (block and lengths.get(data.ndim + block[0], 0) % size):
        return None
    if (packed and new == data.ndim) or data.dtype == jnp.float8_e8m0fnu:  # which has no zero
        return None

    def sent(
        level: int, scale: jax.Array, shared: frozenset[str]
    ) -> tuple[jax.Array, frozenset[str]]:
        one = [i for i in lengths if scale.shape[i] == 1]
        # of blocks only the lower level of scales has one for each
        blocks = level == 0 and x.blocked in one
        if over <= shared and len(one) == len(lengths) and not blocks:
            return scale if new is None else lax.expand_dims(scale, (new,)), shared
        if split is not None and split in one:
            scale = jnp.repeat(scale, count, split)
        scale = as_bits(lambda x: equation.bind(x)[0], scale)
        if joined is not None and joined in one:  # of each device one scale
            times = lengths[joined] // (size if joined == x.blocked else 1)
            scale = jnp.repeat(scale, times, joined)
        return scale, shared | over if gathers and groups is None else shared - over

    pairs = [sent(level, *each) for level, each in enumerate(x.shared_scales)]
    scale = jax.tree.unflatten(jax.tree.structure(x.scale), [scale for scale, _ in pairs])
    if isinstance(data, EncodedArray):
        length = after[-1] if packed else 0
        data = dataclasses.replace(data, codes=equation.bind(data.codes)[0], length=length)
    else:
        data = as_bits(lambda x: equation.bind(x)[0], data)
    if block is not None and new is not None and new > x.data.ndim + block[0]:
        block = (block[0] - 1, size)
    stored = dataclasses.replace(x.stored, data=data, scale=scale, block=block)
    return dataclasses.replace(
        x, stored=stored, given=None, shared=tuple(shared for _, shared in pairs)
    )


Move = Callable[[Equation, Sequence[Value]], QuantizedValue | None]
MOVES: dict[str, Move] = {
    "convert_element_type": _convert,
    **dict.fromkeys(("copy", "copy_p", "pcast", "pvary"), lambda equation, inputs: inputs[0]),
    "transpose": _transpose,
    **dict.fromkeys(("reshape", "squeeze", "expand_dims", "broadcast_in_dim"), _reshape),
    **dict.fromkeys(("slice", "dynamic_slice"), _slices),
    **dict.fromkeys(("gather", "sharding_constraint"), _take),
    **dict.fromkeys(COLLECTIVES, _sent),
}
