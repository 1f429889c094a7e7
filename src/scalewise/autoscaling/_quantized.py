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

from ..formats import BLOCK_FORMATS, E4M3FN, NVFP4, BlockFormat, Format
from ..formats import format as format_
from ..interpret import Argument, Equation, Value, is_float
from ..primitives import params
from ..rounding import EncodedArray, encode
from ..scaled import ScaledArray, quotient
from ..scalifying import ScaledValue, is_quantized, materialize
from ._blocks import Blocks, Factor, in_four_bits

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
        varies: for each array of scales, the mesh axes over which devices have their own; ()
            outside of a ``shard_map``.
    """

    stored: ScaledArray
    dtype: DTypeLike = dataclasses.field(metadata=STATIC)
    given: tuple[tuple[int, ...], ...] | None = dataclasses.field(default=None, metadata=STATIC)
    varies: tuple[frozenset[str], ...] = dataclasses.field(default=(), metadata=STATIC)

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
        return ScaledArray(self.data, scale, self.stored.block, None, self.stored.value_dtype)

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
        names = [() if n is None else (n,) if isinstance(n, str) else tuple(n) for n in spec]
        names += [()] * (self.data.ndim - len(names))
        counts = [math.prod(mesh.shape[n] for n in own) for own in names]
        parts = list(counts)  # what the length of each axis has to be a multiple of
        if self.blocked is not None and self.stored.block:
            parts[self.blocked] *= self.stored.block[1]
        if any(n % k for n, k in zip(self.shape, parts, strict=True)):
            return None

        def own(x: jax.Array) -> tuple[tuple[str, ...], ...]:
            return tuple(n if k > 1 else () for n, k in zip(names, x.shape, strict=False))

        data, scales = self.data, jax.tree.leaves(self.scale)
        varies = tuple(frozenset(itertools.chain(*own(x))) for x in scales)
        if isinstance(data, EncodedArray) and data.length:
            if data.codes.shape[-1] % counts[-1]:
                return None
            data = dataclasses.replace(data, length=data.length // counts[-1])
        stored = ScaledArray.tree_unflatten(self.stored.tree_flatten()[1], (data, self.scale, None))
        here = dataclasses.replace(self, stored=stored, given=None, varies=varies)
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


def apart(operands: tuple[Factor, Factor]) -> tuple[Factor, Factor]:
    """Returns operands in a form in which XLA computes their product by itself.

    XLA on a GPU joins products that have an operand in common: it would write the weights of an
    attention's queries, keys and values side by side in each call.
    """
    return lax.optimization_barrier(operands)


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
    x: QuantizedValue, f: Callable[[jax.Array], jax.Array], axis: int | None = None
) -> QuantizedValue:
    """Applies a function to numbers and scales; ``axis`` is where it leaves the blocks."""
    data, block = f(_unpacked(x)), x.stored.block
    block = None if block is None or axis is None else (axis - data.ndim, block[1])
    scale = jax.tree.map(f, x.scale)
    stored = dataclasses.replace(x.stored, data=data, scale=scale, block=block)
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
    return _each(x, lambda a: lax.transpose(a, order), axis)


def _reshape(equation: Equation, inputs: Sequence[Value]) -> QuantizedValue | None:
    """Moves axes of length 1, or any axes of an array with one scale."""
    x, shape = inputs[0], equation.out_avals[0].shape
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

    return _each(x, f, None if blocked is None else origins.index(blocked))


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

    return _each(x, cut, blocked)


def _take(equation: Equation, inputs: Sequence[Value]) -> QuantizedValue | None:
    x, *rest = inputs
    if not x.one_scale or isinstance(x.data, EncodedArray):
        return None
    if equation.name == "gather" and params.fill_value(equation) is not None:
        return None
    return _of_one_scale(x, equation.bind(x.data, *rest)[0])


def _gathered(equation: Equation, inputs: Sequence[Value]) -> QuantizedValue | None:
    """Sends the stored numbers, and the scales where devices have scales of their own."""
    (x,) = inputs
    at, tiled = params.gathered_axis(equation), params.is_tiled(equation)
    own = params.axis_name(equation)
    if params.axis_groups(equation) is not None:
        return None
    names = frozenset(own if isinstance(own, tuple) else (own,))
    size = x.stored.block[1] if x.blocked == at and x.stored.block else 1

    def sent(a: jax.Array) -> jax.Array:
        return equation.bind(a)[0]

    scales: list[jax.Array] = []
    arrays, tree = jax.tree.flatten(x.scale)
    for a, varies in zip(arrays, x.varies or [frozenset()] * len(arrays), strict=True):
        differ = not names.isdisjoint(varies)
        if differ and tiled and a.shape[at] * size < x.shape[at]:
            return None  # a scale for each device's part of the axis
        if not a.ndim or (tiled and not differ and a.shape[at] == 1):
            scales.append(a)
        else:
            scales.append(sent(a) if differ or tiled else lax.expand_dims(a, (at,)))
    data: jax.Array | EncodedArray
    if isinstance(x.data, EncodedArray):
        last = at == x.data.ndim - 1
        if last and not tiled:
            return None
        codes = sent(x.data.codes)
        factor = codes.shape[-1] // x.data.codes.shape[-1]
        data = dataclasses.replace(x.data, codes=codes, length=x.data.length * factor)
    else:
        data = sent(x.data)
    block = x.stored.block
    if block is not None and not tiled and at > x.data.ndim + block[0]:
        block = (block[0] - 1, block[1])
    scale = jax.tree.unflatten(tree, scales)
    stored = dataclasses.replace(x.stored, data=data, scale=scale, block=block)
    varies = tuple(own - names for own in x.varies)
    return dataclasses.replace(x, stored=stored, given=None, varies=varies)


Move = Callable[[Equation, Sequence[Value]], QuantizedValue | None]
MOVES: dict[str, Move] = {
    "convert_element_type": _convert,
    **dict.fromkeys(("copy", "copy_p"), lambda equation, inputs: inputs[0]),
    "transpose": _transpose,
    **dict.fromkeys(("reshape", "squeeze"), _reshape),
    **dict.fromkeys(("slice", "dynamic_slice"), _slices),
    **dict.fromkeys(("gather", "sharding_constraint"), _take),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), _gathered),
}
