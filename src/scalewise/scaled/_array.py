"""``ScaledArray``: data times a scale, for one scale a tensor, a channel or a block."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..rounding import EncodedArray
from ._power import ldexp


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class ScaledArray:
    """An array stored as ``data * scale``.

    Attributes:
        data: the stored numbers, any float dtype or an :class:`scalewise.rounding.EncodedArray`,
            any shape.
        scale: factors of any float dtype (E8M0, say), or int32 exponents of two, or a ScaledArray
            (two levels of scales: NVFP4); a shape that broadcasts to data's, but along the blocked
            axis, where it has one entry for each block. Zero is a legal scale (a zero array).
        block: None, or (axis, size): one scale for each run of ``size`` elements along ``axis``;
            the last may be shorter.

    Raises:
        ValueError: the scale doesn't broadcast, or the block isn't one.

    Example:
        >>> import jax.numpy as jnp
        >>> x = ScaledArray(jnp.array([1.0, 1.5], jnp.float8_e4m3fn), jnp.int32(20))
        >>> x.value().tolist(), x.dtype.name, x.shape
        ([1048576.0, 1572864.0], 'float32', (2,))
    """

    data: jax.Array | EncodedArray
    scale: jax.Array | EncodedArray | ScaledArray
    block: tuple[int, int] | None = None

    def __post_init__(self):
        shape, scale = np.shape(self.data), np.shape(self.scale)
        if self.block is not None:
            axis, size = self.block
            if not -len(shape) <= axis < len(shape) or size < 1:
                raise ValueError(
                    f"ScaledArray: block is {self.block!r}; accepted: (axis, size) with an axis of "
                    f"data of shape {shape} and a positive size"
                )
            axis %= len(shape)
            blocks = -(-shape[axis] // size)
            shape = (*shape[:axis], blocks, *shape[axis + 1 :])
        pairs = zip(reversed(scale), reversed(shape), strict=False)
        if len(scale) > len(shape) or not all(s in (1, n) for s, n in pairs):
            raise ValueError(
                f"ScaledArray: a scale of shape {scale} doesn't broadcast over {shape}"
                + (f", the blocks of data of shape {np.shape(self.data)}" if self.block else "")
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def size(self) -> int:
        return self.data.size

    @property
    def dtype(self) -> np.dtype:
        """The dtype of :meth:`value`: float64 for float64 data, else float32."""
        return np.dtype(np.float64 if self.data.dtype == np.float64 else np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of data and scale together."""
        return self.data.nbytes + self.scale.nbytes

    def value(self) -> jax.Array:
        """The plain array: the scale is applied in two exact halves, so nothing overflows on the
        way to a result that doesn't."""
        return _value(self)

    @property
    def T(self) -> ScaledArray | jax.Array:
        data = self._whole()
        return self.value().T if data is None else ScaledArray(data.T, self.scale)

    def reshape(self, *shape: Any) -> ScaledArray | jax.Array:
        """Behind the same scale, where that is one for all; else the plain numbers."""
        data = self._whole()
        if data is None:
            return self.value().reshape(*shape)
        return ScaledArray(data.reshape(*shape), self.scale)

    def astype(self, dtype: Any) -> jax.Array:
        """The plain numbers in a dtype."""
        return self.value().astype(dtype)

    def _whole(self) -> jax.Array | None:
        """The data, if parts of it keep the scale as it is."""
        if self.block is not None or np.ndim(self.scale) or isinstance(self.data, EncodedArray):
            return None
        return self.data

    def __getitem__(self, index: Any) -> ScaledArray | jax.Array:
        """A part behind the same scale, where that is one for all; else the plain numbers."""
        data = self._whole()
        return self.value()[index] if data is None else ScaledArray(data[index], self.scale)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a ScaledArray without axes")
        return self.shape[0]

    def __iter__(self) -> Iterator[ScaledArray | jax.Array]:
        return (self[i] for i in range(len(self)))

    def __neg__(self) -> ScaledArray | jax.Array:
        if isinstance(self.data, EncodedArray):
            return -self.value()
        return ScaledArray(-self.data, self.scale, self.block)

    def __mul__(self, other: Any) -> ScaledArray | jax.Array:
        """By a number, which goes into a scale of floats; else plain numbers are multiplied."""
        number = isinstance(other, int | float) or np.shape(other) == ()
        scale = self.scale
        if number and isinstance(scale, jax.Array) and scale.dtype in (np.float32, np.float64):
            return ScaledArray(self.data, scale * other, self.block)
        return self.value() * other

    __rmul__ = __mul__

    # All others are those of the plain numbers: what they give has a scale of its own.

    def __add__(self, other: Any) -> jax.Array:
        return self.value() + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> jax.Array:
        return self.value() - other

    def __rsub__(self, other: Any) -> jax.Array:
        return other - self.value()

    def __truediv__(self, other: Any) -> jax.Array:
        return self.value() / other

    def __rtruediv__(self, other: Any) -> jax.Array:
        return other / self.value()

    def __pow__(self, other: Any) -> jax.Array:
        return self.value() ** other

    def __rpow__(self, other: Any) -> jax.Array:
        return other ** self.value()

    def __matmul__(self, other: Any) -> jax.Array:
        return self.value() @ other

    def __rmatmul__(self, other: Any) -> jax.Array:
        return other @ self.value()

    def __abs__(self) -> jax.Array:
        return abs(self.value())

    def __lt__(self, other: Any) -> jax.Array:
        return self.value() < other

    def __le__(self, other: Any) -> jax.Array:
        return self.value() <= other

    def __gt__(self, other: Any) -> jax.Array:
        return self.value() > other

    def __ge__(self, other: Any) -> jax.Array:
        return self.value() >= other

    def __eq__(self, other: Any) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.value() == other

    def __ne__(self, other: Any) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.value() != other

    __hash__ = None  # pyright: ignore[reportAssignmentType]  (as arrays)

    def __float__(self) -> float:
        return float(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = np.asarray(self.value())
        return value if dtype is None else value.astype(dtype)

    def __jax_array__(self) -> jax.Array:
        return self.value()

    def __repr__(self) -> str:
        block = f", block={self.block}" if self.block else ""
        return f"ScaledArray({self.data!r}, scale={self.scale!r}{block})"

    def tree_flatten(self):
        return (self.data, self.scale), self.block

    @classmethod
    def tree_unflatten(cls, block, children):
        self = object.__new__(cls)  # leaves may be anything while a tree is mapped: no checks
        for name, value in zip(("data", "scale", "block"), (*children, block), strict=True):
            object.__setattr__(self, name, value)
        return self


def rebalance(a: ScaledArray, factor: Any) -> ScaledArray:
    """The same value, a factor moved from the data to the scale: ``(data / s, scale * s)``.

    Args:
        a: any ScaledArray.
        factor: what the scale is multiplied by. For an int32 scale, the exponent of a power of
            two, added to it; then the value doesn't change at all unless data leaves its range.

    Returns:
        A ScaledArray whose data is of the same dtype.
    """
    if isinstance(a.data, EncodedArray) or isinstance(a.scale, EncodedArray):
        raise ValueError("rebalance: data or scale lie in codes; quantize the value again instead")
    wide = a.data.astype(a.dtype)
    if jnp.issubdtype(a.scale.dtype, jnp.integer):
        factor = jnp.asarray(factor, jnp.int32)
        data = ldexp(wide, -factor)
        return ScaledArray(data.astype(a.data.dtype), a.scale + factor, a.block)
    factor = jnp.asarray(factor, a.dtype)
    data = (wide / factor).astype(a.data.dtype)
    if isinstance(a.scale, ScaledArray):  # of two levels, the upper one takes it
        upper = a.scale.scale
        scale = ScaledArray(a.scale.data, upper * factor.astype(upper.dtype), a.scale.block)
        return ScaledArray(data, scale, a.block)
    scale = (a.scale.astype(a.dtype) * factor).astype(a.scale.dtype)
    return ScaledArray(data, scale, a.block)


def dequantize(a: ScaledArray) -> jax.Array:
    """The plain array of a quantized one: :meth:`ScaledArray.value` as a function.

    Exact wherever ``data * scale`` is a normal number of the result's dtype.

    Example:
        >>> from scalewise.scaled import quantize
        >>> dequantize(quantize(jnp.array([3.0, -0.5]), "mxfp4")).tolist()
        [3.0, -0.5]
    """
    if not isinstance(a, ScaledArray):
        raise TypeError(f"dequantize takes a ScaledArray, not {type(a).__name__}")
    return a.value()


@partial(jax.jit, inline=True)
def _value(a: ScaledArray) -> jax.Array:
    data, scale = a.data.astype(a.dtype), a.scale
    if not isinstance(scale, jax.Array | np.ndarray):
        scale = scale.__jax_array__()
    if a.block is not None:
        axis, size = a.block
        scale = jnp.repeat(scale, size, axis=axis)
        scale = jax.lax.slice_in_dim(scale, 0, a.shape[axis], axis=axis)
    scale = scale.reshape((1,) * (data.ndim - scale.ndim) + scale.shape)
    if jnp.issubdtype(scale.dtype, jnp.integer):
        return ldexp(data, scale)
    if scale.dtype == jnp.float8_e8m0fnu:  # 2^-127 is a float32 subnormal, which XLA flushes
        code = jax.lax.bitcast_convert_type(scale, jnp.uint8)
        value = ldexp(data, code.astype(jnp.int32) - 127)
        return jnp.where(code == 255, jnp.asarray(jnp.nan, a.dtype), value)
    return data * scale.astype(a.dtype)
