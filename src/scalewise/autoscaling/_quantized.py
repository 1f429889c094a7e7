"""Arguments that come quantized: products multiply their numbers as they are stored."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ..formats import BLOCK_FORMATS, E4M3FN, FP32, NVFP4, BlockFormat, Format
from ..formats import format as format_
from ..interpret import Argument, Equation, Value, is_float
from ..primitives import params
from ..rounding import EncodedArray, encode
from ..scaled import ScaledArray
from ..scaled._power import quotient
from ._blocks import Blocks, Factor, in_four_bits
from ._value import ScaledValue, materialize

STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedValue:
    """``data * scale * upper``: an argument in at most 8 bits, which nothing has changed so far.

    Operations that only move elements move the stored numbers. A product multiplies them; for all
    other operations :meth:`load` computes the value.

    Attributes:
        data: the stored numbers, an array or an :class:`EncodedArray`.
        scale: with as many axes as data, each of length 1, of data's own length, or of the number
            of blocks along the blocked axis; None for 1.
        upper: the upper of two levels of scales (NVFP4), with as many axes; None for 1.
        block: the blocked axis, counted from the last, and the size of blocks; or None.
        dtype: of the value in flight.
        given: the shape of the argument's scale, if the value is an argument itself, or after
            assignments to parts of it; None for one that was moved.
    """

    data: jax.Array | EncodedArray
    scale: jax.Array | None
    upper: jax.Array | None
    block: tuple[int, int] | None = dataclasses.field(metadata=STATIC)
    dtype: DTypeLike = dataclasses.field(metadata=STATIC)
    given: tuple[int, ...] | None = dataclasses.field(default=None, metadata=STATIC)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def ndim(self) -> int:
        return len(self.data.shape)

    @property
    def argument(self) -> ScaledArray | None:
        """The argument that the value is, with a scale of the same shape; None for another."""
        array = self.array
        if self.given is not None and isinstance(array.scale, jax.Array):
            array = dataclasses.replace(array, scale=array.scale.reshape(self.given))
        return None if self.given is None else array

    @property
    def array(self) -> ScaledArray:
        scale, upper = self.scale, self.upper
        if scale is not None and upper is not None:
            if self._has_uppers:
                scale = scale.astype(jnp.float32) * upper
            else:
                scale = ScaledArray(scale, upper.reshape(()))
        block = self.block and (self.block[0] + self.ndim, self.block[1])
        return ScaledArray(self.data, scale, block)

    @property
    def _has_uppers(self) -> bool:
        """Whether there are several scales of the upper level, which no device's units take."""
        return self.upper is not None and self.upper.size > 1

    @property
    def format(self) -> Format | BlockFormat:
        """The block format that has these numbers, scales and blocks, else the numbers' format."""
        data = self.data
        element = data.format if isinstance(data, EncodedArray) else format_(data.dtype)
        if self.block is None or self.scale is None:
            return element
        scale = FP32 if self._has_uppers else format_(self.scale.dtype)
        for fmt in BLOCK_FORMATS.values():
            two_levels = (fmt.tensor_scale is not None) == (self.upper is not None)
            if (fmt.element, fmt.scale, fmt.size) == (element, scale, self.block[1]) and two_levels:
                return fmt
        return BlockFormat(f"{element.name}_blocks", element, scale=scale, size=self.block[1])

    @functools.cached_property
    def value(self) -> ScaledValue:
        return ScaledValue(self.array.value().astype(self.dtype))

    def load(self) -> ScaledValue:
        return self.value

    def as_operand(self) -> QuantizedOperand:
        """Returns a value of this shape and dtype without data, for rules of products."""
        blank = jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))
        return QuantizedOperand(blank, quantized=self)  # pyright: ignore[reportArgumentType]

    def factor(self, equation: Equation, contracted: Sequence[int]) -> Factor:
        """A scale that is the same for all numbers of a sum is applied behind the product."""
        scale, data = self.scale, self.data
        whole = self.upper is None and (scale is None or scale.size == 1)
        outside = (
            scale is not None
            and self.block is None
            and self.upper is None
            and equation.name == "dot_general"
            and all(scale.shape[a] == 1 for a in contracted)
        )
        if isinstance(data, EncodedArray) or not (whole or outside):
            # the dtype of the result, which an argument's own weak dtype doesn't decide
            half = equation.out_avals[0].dtype == jnp.bfloat16
            return Blocks(self.array, self.format, jnp.bfloat16 if half else self.dtype), None
        if scale is None:
            return data, jnp.ones((), jnp.float32)
        scale = scale.astype(jnp.float32)
        return data, scale.reshape(()) if scale.size == 1 else scale

    def unstacked(self) -> QuantizedValue:
        def rows(x: jax.Array | None) -> jax.Array | None:
            return x if x is None else jnp.broadcast_to(x, (self.shape[0], *x.shape[1:]))

        fields = {"scale": rows(self.scale), "upper": rows(self.upper)}
        return dataclasses.replace(self, **fields, given=None)


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedOperand(ScaledValue):
    quantized: QuantizedValue = dataclasses.field(kw_only=True)


def quantized_argument(x: Argument, dtype: DTypeLike) -> QuantizedValue | None:
    """Returns a ScaledArray as the value that products multiply as it is stored; else None."""
    if not is_quantized(x):
        return None
    scale, upper = x.scale, x.tensor_scale
    if isinstance(scale, ScaledArray):
        if not isinstance(scale.data, jax.Array):
            return None
        scale = scale.data
    if scale is not None and not isinstance(scale, jax.Array):
        return None
    block = x.block
    if block is not None:
        block = block[0] % x.ndim - x.ndim, block[1]

    def full(s: jax.Array | None) -> jax.Array | None:
        return None if s is None else s.reshape((1,) * (x.ndim - s.ndim) + s.shape)

    given = () if scale is None else scale.shape
    return QuantizedValue(x.data, full(scale), full(upper), block, dtype, given)


def is_quantized(x: object) -> bool:
    """Returns whether a ScaledArray has axes, at most 8 bits, and scales that aren't exponents."""
    if not isinstance(x, ScaledArray) or x.exponent is not None or not x.ndim:
        return False
    if isinstance(x.data, EncodedArray):
        return x.data.format.bits <= 8
    return jnp.issubdtype(x.data.dtype, jnp.floating) and np.dtype(x.data.dtype).itemsize == 1


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
    if isinstance(x.data, EncodedArray) or x.block is not None or not isinstance(new, ScaledValue):
        return None
    numbers = materialize(new).astype(jnp.float32)
    if x.scale is not None:
        scale = _assigned_scale(equation, x, numbers.shape)
        if scale is None:
            return None
        numbers = quotient(numbers, jnp.broadcast_to(scale, numbers.shape))
    codes = encode(numbers, format_(x.data.dtype), saturate="finite")
    rest = [codes if i == at else v for i, v in enumerate(inputs)]
    (data,) = equation.bind(x.data, *cast(Sequence[jax.Array], rest[1:]))
    return dataclasses.replace(x, data=data)


def _assigned_scale(
    equation: Equation, x: QuantizedValue, shape: tuple[int, ...]
) -> jax.Array | None:
    """Returns the scale of what is assigned, with its axes; None if it has a part of the scales."""
    assert x.scale is not None
    axes = params.assigned_axes(equation, x.data.ndim)
    lengths = [1] * len(shape)
    for axis, n in enumerate(x.scale.shape):
        if n == 1:
            continue
        if axis not in axes or shape[axes[axis]] != n:
            return None
        lengths[axes[axis]] = n
    return x.scale.astype(jnp.float32).reshape(lengths)


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
    scale, upper = (None if s is None else f(s) for s in (x.scale, x.upper))
    data = f(_unpacked(x))
    block = None
    if x.block is not None and axis is not None:
        block = axis - len(data.shape), x.block[1]
    return QuantizedValue(data, scale, upper, block, x.dtype)


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
    axis = None if x.block is None else list(order).index(x.block[0] + x.ndim)
    return _each(x, lambda a: lax.transpose(a, order), axis)


def _reshape(equation: Equation, inputs: Sequence[Value]) -> QuantizedValue | None:
    """Moves axes of length 1, or any axes of an array with one scale."""
    x, shape = inputs[0], equation.out_avals[0].shape
    one_scale = (x.scale is None or x.scale.size == 1) and x.upper is None
    if one_scale and not isinstance(x.data, EncodedArray):
        data = lax.reshape(x.data, shape)
        scale = None if x.scale is None else x.scale.reshape((1,) * len(shape))
        return QuantizedValue(data, scale, None, None, x.dtype)
    if [n for n in shape if n != 1] != [n for n in x.shape if n != 1]:
        return None
    # each axis of the result, with the axis that it was; None for one of length 1
    before = iter([i for i, n in enumerate(x.shape) if n != 1])
    origins = [None if n == 1 else next(before) for n in shape]
    blocked = None if x.block is None else x.block[0] + x.ndim
    if blocked is not None and blocked not in origins:
        return None

    def f(a: jax.Array) -> jax.Array:
        return a.reshape([1 if i is None else a.shape[i] for i in origins])

    return _each(x, f, None if blocked is None else origins.index(blocked))


def _slices(equation: Equation, inputs: Sequence[Value]) -> QuantizedValue | None:
    """Cuts a slice out of axes along which all numbers, or none, share a scale."""
    x, *rest = inputs
    shape = equation.out_avals[0].shape
    blocked = None if x.block is None else x.block[0] + x.ndim
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
    if (x.scale is not None and x.scale.size > 1) or isinstance(x.data, EncodedArray):
        return None
    if equation.name == "gather" and params.fill_value(equation) is not None:
        return None
    (data,) = equation.bind(x.data, *rest)
    one = (1,) * data.ndim
    scale, upper = (None if s is None else s.reshape(one) for s in (x.scale, x.upper))
    return QuantizedValue(data, scale, upper, None, x.dtype)


Move = Callable[[Equation, Sequence[Value]], QuantizedValue | None]
MOVES: dict[str, Move] = {
    "convert_element_type": _convert,
    **dict.fromkeys(("copy", "copy_p"), lambda equation, inputs: inputs[0]),
    "transpose": _transpose,
    **dict.fromkeys(("reshape", "squeeze"), _reshape),
    **dict.fromkeys(("slice", "dynamic_slice"), _slices),
    **dict.fromkeys(("gather", "all_gather", "sharding_constraint"), _take),
}
