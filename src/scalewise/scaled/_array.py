"""``ScaledArray``: data times one scale per tensor, channel or block.

A scale has no axes or as many as the data. The constructor adds the axes that broadcasting leaves
out, of length 1, in front. As a leaf of the pytree a scale has as many axes as the data, always:
``jax.vmap``, ``lax.scan`` and ``jnp.stack`` give data and scale a new axis at the same place, any
place. The blocked axis is counted from the last, and is found again from the shapes where an axis
behind it was added or taken away.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._check import checked, shown
from .._jax import ShapedArray, Tracer
from ..rounding import PACKED_AXIS, EncodedArray, StoredArray, is_packed
from ._power import ldexp, ldexp_subnormal

Index: TypeAlias = tuple[Any, ...]
Block: TypeAlias = tuple[int, int] | None


def indexed(
    shape: Sequence[int], block: Block, scale: Sequence[int], index: object
) -> tuple[Index, Index, Block] | None:
    """Returns the index of the data with an entry for each axis, that of the scale, and the block.

    Args:
        shape: of the data.
        block: (axis, size), the axis counted from the last.
        scale: the shape of the scale, with as many axes.
        index: as in ``x[index]``.

    Returns:
        None for a mask, for a slice that cuts blocks, and for an array of indices at or behind the
        blocked axis.
    """
    entries = _entries(index, len(shape))
    if entries is None:
        return None
    own: list[Any] = []
    new, axis = None, 0
    for i, entry in enumerate(entries):
        if entry is None:
            own.append(None)
            continue
        n, s = shape[axis], scale[axis]
        if block is not None and axis - len(shape) == block[0]:
            rest = entries[i + 1 :]
            arrays = any(_is_array(e) for e in (entry, *rest))
            part = None if arrays else _of_blocks(entry, n, s, block[1])
            if part is None:
                return None
            own.append(part)
            if isinstance(entry, slice):
                new = -1 - sum(e is None or isinstance(e, slice) for e in rest), block[1]
        else:
            own.append(_first(entry) if s == 1 else entry)
        axis += 1
    return entries, tuple(own), new


def _entries(index: object, ndim: int) -> Index | None:
    """Returns an index with an entry for each axis: None, an integer, a slice or integers."""
    entries: list[Any] = list(index) if isinstance(index, tuple) else [index]
    entries = [np.asarray(e) if isinstance(e, list) else e for e in entries]
    if any(_is_mask(e) for e in entries):
        return None
    missing = ndim - sum(e is not None and e is not Ellipsis for e in entries)
    if missing < 0:
        return None
    at = next((i for i, e in enumerate(entries) if e is Ellipsis), len(entries))
    return (*entries[:at], *[slice(None)] * missing, *entries[at + 1 :])


def _is_mask(entry: object) -> bool:
    if isinstance(entry, bool | np.bool_):
        return True
    return isinstance(entry, jax.Array | np.ndarray) and not jnp.issubdtype(
        entry.dtype, jnp.integer
    )


def _is_array(entry: object) -> bool:
    return isinstance(entry, jax.Array | np.ndarray) and entry.ndim > 0


def _first(entry: Any) -> Any:
    """Returns an index of the same kind into an axis of length 1."""
    if isinstance(entry, slice):
        return slice(None)
    return np.zeros((1,) * entry.ndim, np.int32) if _is_array(entry) else 0


def _of_blocks(entry: Any, n: int, blocks: int, size: int) -> Any:
    if blocks == 1 and not (isinstance(entry, slice) and not range(n)[entry]):
        return _first(entry)
    if isinstance(entry, slice):
        start, stop, step = entry.indices(n)
        whole = step == 1 and start % size == 0 and (stop % size == 0 or stop == n)
        return slice(start // size, -(-stop // size)) if whole else None
    if isinstance(entry, jax.Array):
        return jnp.where(entry < 0, entry + n, entry) // size
    return (entry + n if entry < 0 else entry) // size


REAL = np.floating, np.integer, np.bool_


class _Same(int):
    """A bool in the static part of a pytree that makes no two trees different."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int)

    def __hash__(self) -> int:
        return 0


def _on_value(operate: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def compute(self: ScaledArray, *other: ArrayLike) -> jax.Array:
        """Computes with the plain array, and returns one."""
        return operate(self.value(), *other)

    return compute


@checked
@dataclasses.dataclass(frozen=True, eq=False)
class ScaledArray(StoredArray):
    """An array stored as ``data * scale``.

    Attributes:
        data: the stored numbers, of any float dtype or an
            :class:`scalewise.rounding.EncodedArray`, any shape.
        scale: what the data are multiplied by: a number of either sign, an array (E8M0 and other
            floats are kept as they are, integers become floats), or a ScaledArray (two levels of
            scales, as in NVFP4); None for no scale. 0 makes every element zero. Its shape
            broadcasts to that of data, except along the blocked axis, where it has one entry per
            block. It is stored without axes or with as many as data. XLA may take subnormal
            numbers of a ``jax.Array`` for 0.
        block: None, or (axis, size): one scale per ``size`` consecutive elements along ``axis``;
            the last block may be shorter. The axis is stored counted from the last, as -1.
        value_dtype: the dtype of the array that this one stands for in a program: a quantized
            bfloat16 weight is bfloat16. None for float32 (float64 for float64 data), which is a
            weak type under :func:`scalewise.autoscale` if the data have at most 8 bits.

    As a pytree, it means the same wherever it was made: ``vmap``, ``lax.map``, ``scan`` and
    ``jax.tree.map`` of ``jnp.stack`` return ScaledArrays whose scales have the new axis, too.
    Along an axis whose indices share scales (one for the tensor, in NVFP4 too, or for each column)
    JAX refuses to take an array apart: "scan got values with different leading axis sizes: 4, 1".
    Call :meth:`with_scales_along` first, or map over indices ``i`` of ``a[i]``.
    As a leaf, a scale has as many axes as the data. Codes packed into bytes stay the last axis:
    ``in_axes`` and ``out_axes`` have to be in front of it, others are refused when it is read.

    Raises:
        TypeError: data that aren't an array of real numbers, or a scale that isn't of real numbers.
        ValueError: a scale that doesn't broadcast, a Python number or a NumPy one out of the normal
            range of :attr:`wide_dtype`, or an invalid block.

    Example:
        >>> import jax.numpy as jnp
        >>> x = ScaledArray(jnp.array([1.0, 1.5], jnp.float8_e4m3fn), 2.0**20)
        >>> x.value().tolist(), x.dtype.name, x.shape
        ([1048576.0, 1572864.0], 'float32', (2,))
    """

    STATIC: ClassVar = ("block", "value_dtype")

    # whatever is given, `__post_init__` says what is wrong with it
    data: Annotated[jax.Array | EncodedArray, Any]
    scale: Annotated[jax.Array | EncodedArray | ScaledArray | None, Any] = None
    block: Annotated[tuple[int, int] | None, Any] = None
    value_dtype: Annotated[np.dtype | None, Any] = None
    _one: ClassVar[bool]  # of an instance: whether its scale was made without axes

    def __post_init__(self):
        super().__post_init__()
        dtype = getattr(self.data, "dtype", None) if hasattr(self.data, "shape") else None
        if dtype is None or not any(jnp.issubdtype(dtype, kind) for kind in REAL):
            raise TypeError(
                f"ScaledArray: data is {shown(self.data)}; expected an array of real numbers, or "
                "an EncodedArray"
            )
        if self.value_dtype is not None:
            self._set("value_dtype", _float_dtype(self.value_dtype))
        stored = isinstance(self.scale, EncodedArray | ScaledArray | jax.ShapeDtypeStruct)
        if self.scale is not None and not stored:
            self._set("scale", as_number("ScaledArray: scale", self.scale, self.wide_dtype))
        self._check_block()
        if self.block is not None:
            self._set("block", (self.block[0] % self.ndim - self.ndim, int(self.block[1])))
        self._check_shapes()
        self._set("_one", self.scale is not None and not self.scale.ndim)
        if self.scale is not None and self.scale.ndim:
            self._set("scale", _with_axes(self.scale, self.ndim))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        (data, scale), static = super().tree_flatten()
        return (data, self._leaf(scale, data)), (*static, _Same(self._one))

    def _leaf(self, scale: Any, data: Any) -> Any:
        if not (_is_known(data) and _is_known(scale)) or scale.ndim == data.ndim:
            return scale
        leaf = vars(self).get("_kept")
        if leaf is None or leaf.ndim != data.ndim:
            leaf = _with_axes(scale, data.ndim)
            if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
                self._set("_kept", leaf)
        return leaf

    @classmethod
    def tree_unflatten(cls, static: Any, children: tuple[Any, ...]) -> ScaledArray:
        """Returns a ScaledArray of any leaves.

        A scale that was made without axes has none as long as it is one number. If the leaves have
        got or lost an axis behind the blocked one, the blocks are along the axis where there is a
        scale for each.
        """
        *own, one = static
        self = super().tree_unflatten(tuple(own), children)
        self._set("_one", bool(one))
        scale = self.scale
        if scale is None or not (_is_known(self.data) and _is_known(scale)):
            return self
        if one and scale.ndim and scale.size == 1:
            self._set("scale", _with_axes(scale, 0))
        elif self.block is not None and not self._fits(self.block):
            fitting = ((a, self.block[1]) for a in range(-self.ndim, 0))
            self._set("block", next(filter(self._fits, fitting), self.block))
        return self

    def _check_block(self) -> None:
        if self.block is None:
            return
        ndim = self.ndim
        pair: Any = self.block if isinstance(self.block, tuple | list) else ()
        whole = len(pair) == 2 and all(isinstance(n, int | np.integer) for n in pair)
        axis, size = pair if whole else (0, 0)
        if not -ndim <= axis < ndim or size < 1:
            raise ValueError(
                f"ScaledArray: block is {self.block!r}; expected (axis, size) with an axis of "
                f"data of shape {self.shape} and a positive size"
            )

    def _check_shapes(self) -> None:
        if self._fits(self.block):
            return
        shape = list(self.shape)
        if self.block is not None:
            if -self.block[0] > self.ndim:
                raise ValueError(
                    f"ScaledArray: block is {self.block}, but data have the shape {self.shape}"
                )
            shape[self.block[0]] = -(-shape[self.block[0]] // self.block[1])
        packed = isinstance(self.data, EncodedArray) and is_packed(self.data.format)
        raise ValueError(
            f"ScaledArray: scale of shape {np.shape(self.scale)} doesn't broadcast over "  # pyright: ignore
            f"{tuple(shape)}"
            + (f", the blocks of data of shape {self.shape}" if self.block else "")
            + (f". {PACKED_AXIS}" if packed else "")
        )

    def _fits(self, block: tuple[int, int] | None) -> bool:
        """Returns whether there is a scale for each of such blocks, where it has axes."""
        scale = () if self.scale is None else self.scale.shape
        counts, axis = list(self.shape), None if block is None else block[0]
        if block is not None and axis is not None:
            if -axis > self.ndim:
                return False
            counts[axis] = -(-counts[axis] // block[1])
        full = (*(1,) * (self.ndim - len(scale)), *scale)
        broadcasts = len(full) == self.ndim and all(
            s in (1, n) for s, n in zip(full, counts, strict=True)
        )
        return broadcasts and (not scale or axis is None or full[axis] == counts[axis])

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
        """The dtype of :meth:`value`."""
        return self.wide_dtype if self.value_dtype is None else self.value_dtype

    @property
    def wide_dtype(self) -> np.dtype:
        """The dtype in which data and scale are multiplied: float32, or float64."""
        wide = np.float64 in (self.data.dtype, self.value_dtype)
        return np.dtype(np.float64 if wide else np.float32)

    @property
    def aval(self) -> ShapedArray:
        """The abstract value of the data, as the Scalify design has it: their shape and dtype."""
        return ShapedArray(self.data.shape, self.data.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of data and scale together."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    @property
    def tensor_scale(self) -> jax.Array | None:
        """The upper of two levels of scales (NVFP4); None if there is one level."""
        upper = self.scale.scale if isinstance(self.scale, ScaledArray) else None
        assert upper is None or isinstance(upper, jax.Array)
        return upper

    def value(self) -> jax.Array:
        """Returns the plain array.

        A product beyond the range of a narrower :attr:`dtype` becomes its largest number.

        Raises:
            ValueError: the pytree was made from leaves that don't fit, as by ``vmap`` along an axis
                whose indices share scales.
        """
        return self.astype(self.dtype)

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """Returns the plain array in a dtype, rounded once."""
        self._check_shapes()
        wide = wide_value(self)
        if self.value_dtype == np.float16 == np.dtype(dtype):
            top = jnp.asarray(jnp.finfo(dtype).max, wide.dtype)
            wide = jnp.where(jnp.isfinite(wide), jnp.clip(wide, -top, top), wide)
        return wide.astype(dtype)

    @property
    def T(self) -> ScaledArray | jax.Array:
        """The transposed array: a ScaledArray, or a plain one if data or scales are in codes."""
        data: Any = self.data
        scale: Any = self.scale
        stored = data, scale, getattr(scale, "data", None)
        if any(isinstance(x, EncodedArray) for x in stored):
            return self.value().T
        block = self.block and (-1 - self.ndim - self.block[0], self.block[1])
        return self._replaced(data.T, scale if scale is None else scale.T, block)

    def reshape(self, *shape: int | Sequence[int]) -> ScaledArray | jax.Array:
        """Returns a ScaledArray if one scale without axes holds for all elements, else a plain
        array."""
        one_scale = self.scale is None or not self.scale.ndim
        if not one_scale or isinstance(self.data, EncodedArray):
            return self.value().reshape(*shape)
        return dataclasses.replace(self, data=self.data.reshape(*shape))

    def with_scales_along(self, axis: int) -> ScaledArray:
        """Returns the same array with a scale for each index of an axis.

        ``vmap``, ``lax.map`` and ``scan`` take it apart along this axis, where JAX refuses scales
        that all indices share.

        Example:
            >>> a = ScaledArray(jnp.ones((3, 2), jnp.float16), 4.0)
            >>> jax.vmap(lambda row: row.value().sum())(a.with_scales_along(0)).tolist()
            [8.0, 8.0, 8.0]
        """
        axis = range(self.ndim)[axis] - self.ndim
        blocked, size = (None, 1) if self.block is None else self.block
        if blocked is not None and blocked < axis:  # which would move if the axis were taken away
            return self.with_scales_along(blocked).with_scales_along(axis)
        scale = jnp.ones((), self.wide_dtype) if self.scale is None else self.scale
        scale = _along(scale, axis, self.shape, size if blocked == axis else 1)
        return self._replaced(self.data, scale, None if blocked == axis else self.block)

    def _replaced(self, data: Any, scale: Any, block: tuple[int, int] | None) -> ScaledArray:
        return dataclasses.replace(self, data=data, scale=scale, block=block)

    def __getitem__(self, index: Any) -> ScaledArray | jax.Array:
        """Returns a ScaledArray with the scales of the elements, where each keeps its own.

        A plain array for a slice that cuts blocks, for a mask beside several scales, and for an
        index along the axis in which codes of fewer than 8 bits are packed.
        """
        scale = self.scale
        one_scale = scale is None or not scale.ndim
        if one_scale and not isinstance(self.data, EncodedArray):
            return dataclasses.replace(self, data=self.data[index])
        shape = (1,) * self.ndim if scale is None or one_scale else scale.shape
        found = indexed(self.shape, self.block, shape, index)
        if found is not None:
            of_data, of_scale, block = found
            data, own = _taken(self.data, of_data), _taken(scale, () if one_scale else of_scale)
            if data is not None and (own is None) == (scale is None):
                return self._replaced(data, own, block)
        return self.value()[index]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a ScaledArray without axes")
        return self.shape[0]

    def __iter__(self) -> Iterator[ScaledArray | jax.Array]:
        return (self[i] for i in range(len(self)))

    def __neg__(self) -> ScaledArray | jax.Array:
        if isinstance(self.data, EncodedArray):
            return -self.value()
        return dataclasses.replace(self, data=-self.data)

    def __mul__(self, other: ArrayLike | ScaledArray) -> ScaledArray | jax.Array:
        """Multiplies a scale that is a wide float by a number, else the plain array."""
        number = isinstance(other, int | float) or np.shape(other) == ()
        scale = self.scale
        if number and isinstance(scale, jax.Array) and scale.dtype in (np.float32, np.float64):
            return dataclasses.replace(self, scale=scale * other)
        return self.value() * other

    __rmul__ = __mul__

    # All other operators compute on the plain array and return one.
    __add__ = __radd__ = _on_value(operator.add)
    __sub__, __rsub__ = _on_value(operator.sub), _on_value(lambda x, y: y - x)
    __truediv__, __rtruediv__ = _on_value(operator.truediv), _on_value(lambda x, y: y / x)
    __floordiv__, __rfloordiv__ = _on_value(operator.floordiv), _on_value(lambda x, y: y // x)
    __mod__, __rmod__ = _on_value(operator.mod), _on_value(lambda x, y: y % x)
    __pow__, __rpow__ = _on_value(operator.pow), _on_value(lambda x, y: y**x)
    __matmul__, __rmatmul__ = _on_value(operator.matmul), _on_value(lambda x, y: y @ x)
    __lt__, __le__ = _on_value(operator.lt), _on_value(operator.le)
    __gt__, __ge__ = _on_value(operator.gt), _on_value(operator.ge)
    __eq__, __ne__ = _on_value(operator.eq), _on_value(operator.ne)  # pyright: ignore
    __abs__ = _on_value(lambda x: abs(x))
    __hash__ = None  # pyright: ignore[reportAssignmentType]  (as arrays)

    def __float__(self) -> float:
        return float(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __repr__(self) -> str:
        fields = {name: getattr(self, name) for name in ("scale", "block")}
        if self.dtype != self.wide_dtype:
            fields["value_dtype"] = self.value_dtype
        given = "".join(f", {name}={x!r}" for name, x in fields.items() if x is not None)
        return f"ScaledArray({self.data!r}{given})"


@checked
def rebalance(a: ScaledArray, factor: ArrayLike) -> ScaledArray:
    """Returns the same value with a factor moved from the data to the scale.

    The result is ``(data / factor, scale * factor)``.

    Args:
        a: any ScaledArray that isn't stored in codes.
        factor: a finite number other than 0, or an array of them that broadcasts to the data.

    Returns:
        A ScaledArray whose data is of the same dtype; a scale of fewer than 32 bits becomes a wide
        one, so that it isn't rounded. Where the factor is a power of two, the value is the same to
        the bit unless data leaves its range.

    Raises:
        ValueError: data or scale in codes, an invalid factor, or one whose shape doesn't fit.

    Example:
        >>> a = ScaledArray(jnp.float16([6, 8]), 1024)
        >>> b = rebalance(a, 4)
        >>> b.data.tolist(), float(b.scale), b.value().tolist() == a.value().tolist()
        ([1.5, 2.0], 4096.0, True)
    """
    if isinstance(a.data, EncodedArray) or isinstance(a.scale, EncodedArray):
        raise ValueError("rebalance: data or scale is stored in codes; quantize the value again")
    wide = a.data.astype(a.wide_dtype)
    factor = _movable(a, factor)
    data = (wide / factor).astype(a.data.dtype)
    if isinstance(a.scale, ScaledArray):  # of two levels, the upper one is multiplied
        upper = a.tensor_scale
        assert upper is not None
        scale = dataclasses.replace(a.scale, scale=upper * factor.astype(upper.dtype))
    elif a.scale is None:
        scale = factor
    else:
        scale = a.scale.astype(a.wide_dtype) * factor
    return dataclasses.replace(a, data=data, scale=scale)


def _float_dtype(given: Any) -> np.dtype:
    with contextlib.suppress(TypeError, ValueError):
        if jnp.issubdtype(np.dtype(given), jnp.floating):
            return np.dtype(given)
    raise TypeError(f"ScaledArray: value_dtype is {shown(given)}; expected a float dtype")


def _is_known(x: object) -> bool:
    """Returns whether a pytree's child is an array, not another object while a tree is mapped."""
    if isinstance(x, EncodedArray):
        return _is_known(x.codes)
    if isinstance(x, ScaledArray):
        return _is_known(x.data)
    return isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _with_axes(x: Any, ndim: int) -> Any:
    """Returns an array, or a stored one, with more axes of length 1 in front, or fewer."""
    if x.ndim == ndim:
        return x
    if isinstance(x, EncodedArray):
        return dataclasses.replace(x, codes=_with_axes(x.codes, ndim))
    if isinstance(x, ScaledArray):
        scale = x.scale if x.scale is None or not x.scale.ndim else _with_axes(x.scale, ndim)
        return dataclasses.replace(x, data=_with_axes(x.data, ndim), scale=scale)
    shape = (*(1,) * (ndim - x.ndim), *x.shape[max(x.ndim - ndim, 0) :])
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, x.dtype)
    if isinstance(x, Tracer) or not isinstance(x, jax.Array):
        return x.reshape(shape)
    with jax.ensure_compile_time_eval():  # a known array stays one, within jit too
        return _reshaped(x, shape)


# compiled, which takes a fifth of an eager reshape's time
_reshaped = jax.jit(lambda x, shape: x.reshape(shape), static_argnums=1)


def _along(x: Any, axis: int, shape: Sequence[int], size: int) -> Any:
    """Returns scales of blocks of a size with the length of their data along an axis."""
    if isinstance(x, EncodedArray) or (isinstance(x, ScaledArray) and x.block is not None):
        x = x.value()
    if isinstance(x, ScaledArray):
        scale = _along(1.0 if x.scale is None else x.scale, axis, shape, size)
        return dataclasses.replace(x, data=_along(x.data, axis, shape, size), scale=scale)
    x = jnp.asarray(x)
    x = x.reshape((1,) * len(shape)) if x.ndim == 0 else x
    if x.shape[axis] == 1:
        size = shape[axis]
    return jax.lax.slice_in_dim(jnp.repeat(x, size, axis), 0, shape[axis], axis=axis)


def _taken(x: Any, index: Index) -> Any:
    """Returns the elements of an array or a stored one; None if an index cuts packed codes."""
    if x is None or not index:
        return x
    if not isinstance(x, EncodedArray):
        return x[index]
    if is_packed(x.format) and not (
        isinstance(index[-1], slice) and index[-1].indices(x.length) == (0, x.length, 1)
    ):
        return None
    codes = (*index[:-1], slice(None)) if is_packed(x.format) else index
    return dataclasses.replace(x, codes=x.codes[codes])


def as_number(name: str, x: Any, dtype: DTypeLike) -> jax.Array:
    """Returns a number, or an array of them: arrays of floats as they are, others in ``dtype``.

    Numbers that the host knows are refused out of the range of ``dtype``. A ``jax.Array`` isn't
    read: that would wait for the device.
    """
    number = isinstance(x, int | float) and not isinstance(x, bool)
    found: Any = x if number or isinstance(x, jax.Array) else _as_array(x)
    if not number and not any(jnp.issubdtype(found.dtype, kind) for kind in REAL[:2]):
        raise TypeError(f"{name} is {x!r}; expected a real number, or an array of them")
    if number or (isinstance(found, np.ndarray) and np.issubdtype(found.dtype, np.floating)):
        size = abs(x) if number else np.abs(found.astype(np.float64))
        limits, of = jnp.finfo(dtype), np.dtype(dtype)
        for refused, why in (
            ((size > float(limits.max)) & (size < np.inf), f"beyond the largest {of}"),
            (
                (size > 0) & (size < float(limits.tiny)),
                f"below the smallest normal {of}, and XLA takes it for 0",
            ),
        ):
            if np.any(refused):
                raise ValueError(f"{name} is {np.extract(refused, found).tolist()[0]!r}, {why}")
    floats = not number and jnp.issubdtype(found.dtype, jnp.floating)
    return jnp.asarray(x) if floats else jnp.asarray(x, dtype)


def _as_array(x: Any) -> np.ndarray:
    try:
        return np.asarray(x)
    except ValueError:  # a list of several shapes
        return np.asarray(None)


def _movable(a: ScaledArray, factor: ArrayLike) -> jax.Array:
    known = None if isinstance(factor, Tracer) else factor
    factor = as_number("rebalance: factor", factor, a.wide_dtype).astype(a.wide_dtype)
    pairs = zip(reversed(factor.shape), reversed(a.shape), strict=False)
    fits = factor.ndim <= a.ndim and all(n in (1, m) for n, m in pairs)
    if not fits or (factor.ndim and a.block is not None):
        expected = "a number beside blocks" if a.block else f"one that broadcasts to {a.shape}"
        raise ValueError(f"rebalance: factor has the shape {factor.shape}; expected {expected}")
    if known is not None:
        numbers = np.asarray(known, np.float64)
        if not np.all(np.isfinite(numbers) & (numbers != 0)):
            raise ValueError(f"rebalance: factor is {known}; expected finite numbers other than 0")
    return jnp.where(jnp.isfinite(factor) & (factor != 0), factor, 1)


@checked
def dequantize(a: ScaledArray) -> jax.Array:
    """Returns the plain array of a quantized one, as :meth:`ScaledArray.value` does.

    Exact wherever ``data * scale`` is a normal number of the result's dtype.

    Example:
        >>> from scalewise.scaled import quantize
        >>> dequantize(quantize(jnp.array([3.0, -0.5]), "mxfp4")).tolist()
        [3.0, -0.5]
    """
    return a.value()


@partial(jax.jit, inline=True, static_argnames="flushes")
def wide_value(a: ScaledArray, flushes: bool = False) -> jax.Array:
    """Returns the numbers in the wide dtype; ``flushes``: a product's, whose subnormals may be 0.

    A device takes twice as long to compute subnormal results as to read the array.
    """
    data, scale = a.data.astype(a.wide_dtype), a.scale
    if scale is None:
        return data
    if not isinstance(scale, jax.Array | np.ndarray):
        scale = scale.__jax_array__()
    if a.block is not None and scale.ndim:
        axis, size = a.block
        scale = jnp.repeat(scale, size, axis=axis)
        scale = jax.lax.slice_in_dim(scale, 0, a.shape[axis], axis=axis)
    if not scale.ndim:
        scale = scale.reshape((1,) * data.ndim)
    if scale.dtype == jnp.float8_e8m0fnu:  # 2^-127 is a float32 subnormal, which XLA flushes
        code = jax.lax.bitcast_convert_type(scale, jnp.uint8)
        exponent = code.astype(jnp.int32) - 127
        flushes |= data.dtype == jnp.float64
        value = (ldexp if flushes else ldexp_subnormal)(data, exponent)
        return jnp.where(code == 255, jnp.asarray(jnp.nan, data.dtype), value)
    return data * scale.astype(data.dtype)
