"""``ScaledArray``: data times one scale per tensor, channel or block."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._check import checked, checked_names, shown
from .._jax import ShapedArray, Tracer
from ..rounding import EncodedArray, StoredArray
from ._power import exponent_of, ldexp, power_of_two

REAL = np.floating, np.integer, np.bool_


def _on_value(operate: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def compute(self: ScaledArray, *other: ArrayLike) -> jax.Array:
        """Computes with the plain array, and returns one."""
        return operate(self.value(), *other)

    return compute


@checked_names
@dataclasses.dataclass(frozen=True, eq=False)
class ScaledArray(StoredArray):
    """An array stored as ``data * scale``, or as ``data * 2**exponent``.

    Attributes:
        data: the stored numbers, of any float dtype or an
            :class:`scalewise.rounding.EncodedArray`, any shape.
        scale: what the data are multiplied by: a number of either sign, an array (E8M0 and other
            floats are kept as they are, integers become floats), or a ScaledArray (two levels of
            scales, as in NVFP4); None for no scale. 0 makes every element zero. Its shape
            broadcasts to that of data, except along the blocked axis, where it has one entry per
            block.
        block: None, or (axis, size): one scale per ``size`` consecutive elements along ``axis``;
            the last block may be shorter.
        exponent: in place of a scale, int32 exponents of two, which may leave the range of every
            float dtype; their shape is subject to the same rule. See :meth:`from_exponent`.

    Raises:
        TypeError: data that aren't an array of real numbers, a scale that isn't of real numbers, or
            an exponent that isn't of integers.
        ValueError: both a scale and an exponent, one that doesn't broadcast, a Python number out of
            the range of :attr:`dtype`, or an invalid block.

    Example:
        >>> import jax.numpy as jnp
        >>> x = ScaledArray(jnp.array([1.0, 1.5], jnp.float8_e4m3fn), 2.0**20)
        >>> x.value().tolist(), x.dtype.name, x.shape
        ([1048576.0, 1572864.0], 'float32', (2,))
    """

    STATIC: ClassVar = ("block",)

    data: jax.Array | EncodedArray
    scale: jax.Array | EncodedArray | ScaledArray | None = None
    block: tuple[int, int] | None = None
    exponent: jax.Array | None = None

    def __post_init__(self):
        super().__post_init__()
        dtype = getattr(self.data, "dtype", None)
        if dtype is None or not any(jnp.issubdtype(dtype, kind) for kind in REAL):
            raise TypeError(
                f"ScaledArray: data is {shown(self.data)}; expected an array of real numbers, or "
                "an EncodedArray"
            )
        stored = isinstance(self.scale, EncodedArray | ScaledArray | jax.ShapeDtypeStruct)
        if self.scale is not None and not stored:
            object.__setattr__(
                self, "scale", as_number("ScaledArray: scale", self.scale, self.dtype)
            )
        if self.exponent is not None:
            if self.scale is not None:
                raise ValueError("ScaledArray: expected a scale or an exponent, not both")
            given = self.exponent
            exponent = given if hasattr(given, "dtype") else np.asarray(given)
            if not jnp.issubdtype(exponent.dtype, jnp.integer):
                raise TypeError(f"ScaledArray: exponent is {exponent.dtype}; expected integers")
            object.__setattr__(self, "exponent", jnp.asarray(exponent, jnp.int32))
        self._check_shapes()

    @classmethod
    def from_exponent(
        cls,
        data: jax.Array | EncodedArray,
        exponent: ArrayLike,
        block: tuple[int, int] | None = None,
    ) -> ScaledArray:
        """Returns ``data * 2**exponent``.

        Under :func:`scalewise.autoscale` the scalar exponent of an argument follows it to the
        outputs, without bound.

        Args:
            data: as in :class:`ScaledArray`.
            exponent: an integer, or int32 exponents that broadcast as a scale does.
            block: as in :class:`ScaledArray`.

        Example:
            >>> x = ScaledArray.from_exponent(jnp.float32(1.5), -200)
            >>> y = ScaledArray.from_exponent(x.data, x.exponent + 199)
            >>> float(y.value())
            0.75
        """
        return cls(data, None, block, jnp.asarray(exponent))

    def _check_shapes(self) -> None:
        shape = np.shape(self.data)
        name = "scale" if self.exponent is None else "exponent"
        scale = np.shape(self._factor) if self._factor is not None else ()
        if self.block is not None:
            pair: Any = self.block if isinstance(self.block, tuple | list) else ()
            whole = len(pair) == 2 and all(isinstance(n, int | np.integer) for n in pair)
            axis, size = pair if whole else (0, 0)
            if not -len(shape) <= axis < len(shape) or size < 1:
                raise ValueError(
                    f"ScaledArray: block is {self.block!r}; expected (axis, size) with an axis of "
                    f"data of shape {shape} and a positive size"
                )
            axis %= len(shape)
            blocks = -(-shape[axis] // size)
            shape = (*shape[:axis], blocks, *shape[axis + 1 :])
        pairs = zip(reversed(scale), reversed(shape), strict=False)
        if len(scale) > len(shape) or not all(s in (1, n) for s, n in pairs):
            raise ValueError(
                f"ScaledArray: {name} of shape {scale} doesn't broadcast over {shape}"
                + (f", the blocks of data of shape {np.shape(self.data)}" if self.block else "")
            )

    @property
    def _factor(self) -> jax.Array | EncodedArray | ScaledArray | None:
        return self.scale if self.exponent is None else self.exponent

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
    def aval(self) -> ShapedArray:
        """The abstract value of the data, as the Scalify design has it: their shape and dtype."""
        return ShapedArray(self.data.shape, self.data.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of data and scale together."""
        return self.data.nbytes + (0 if self._factor is None else self._factor.nbytes)

    @property
    def tensor_scale(self) -> jax.Array | None:
        """The upper of two levels of scales (NVFP4); None if there is one level."""
        upper = self.scale.scale if isinstance(self.scale, ScaledArray) else None
        assert upper is None or isinstance(upper, jax.Array)
        return upper

    def value(self) -> jax.Array:
        """Returns the plain array.

        An exponent is applied in two exact steps, so that no intermediate result overflows.
        """
        return _value(self)

    @property
    def T(self) -> ScaledArray | jax.Array:
        """The transposed array: a ScaledArray, or a plain one if data or scales are in codes."""
        factor = self._factor
        if isinstance(self.data, EncodedArray) or not isinstance(factor, jax.Array):
            return self._map_data(lambda x: x.T)
        factor = factor.reshape(*(1,) * (self.ndim - factor.ndim), *factor.shape).T if (
            factor.ndim) else factor  # fmt: skip
        block = self.block and (self.ndim - 1 - self.block[0] % self.ndim, self.block[1])
        fields = {"scale" if self.exponent is None else "exponent": factor}
        return dataclasses.replace(self, data=self.data.T, block=block, **fields)

    def reshape(self, *shape: int | Sequence[int]) -> ScaledArray | jax.Array:
        """Returns a ScaledArray if one scale holds for all elements, else a plain array."""
        return self._map_data(lambda x: x.reshape(*shape))

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """Returns the plain array in a dtype."""
        return self.value().astype(dtype)

    def _map_data(self, f: Callable[[jax.Array], jax.Array]) -> ScaledArray | jax.Array:
        """Applies ``f``, which moves elements, to data with one scale, else to the plain array."""
        one_scale = self.block is None and not (self._factor is not None and self._factor.ndim)
        if not one_scale or isinstance(self.data, EncodedArray):
            return f(self.value())
        return dataclasses.replace(self, data=f(self.data))

    def __getitem__(self, index: object) -> ScaledArray | jax.Array:
        """Returns a ScaledArray if one scale holds for all elements, else a plain array."""
        return self._map_data(lambda x: x[index])

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
        fields = {name: getattr(self, name) for name in ("scale", "block", "exponent")}
        given = "".join(f", {name}={x!r}" for name, x in fields.items() if x is not None)
        return f"ScaledArray({self.data!r}{given})"


@checked
def rebalance(a: ScaledArray, factor: ArrayLike) -> ScaledArray:
    """Returns the same value with a factor moved from the data to the scale.

    The result is ``(data / factor, scale * factor)``; an exponent is a scale of ``2**exponent``.

    Args:
        a: any ScaledArray that isn't stored in codes.
        factor: a finite number other than 0, or an array of them that broadcasts to the data. For
            an array with an exponent: a positive power of two. Of a traced factor that isn't one,
            the power of two at or below its magnitude is moved.

    Returns:
        A ScaledArray whose data is of the same dtype; a scale of fewer than 32 bits becomes a wide
        one, so that it isn't rounded. Where the factor is a power of two, the value is the same to
        the bit unless data leaves its range.

    Raises:
        ValueError: data or scale in codes, an invalid factor, or one whose shape doesn't fit.

    Example:
        >>> a = ScaledArray.from_exponent(jnp.float16([6, 8]), 10)
        >>> b = rebalance(a, 4)
        >>> b.data.tolist(), int(b.exponent), b.value().tolist() == a.value().tolist()
        ([1.5, 2.0], 12, True)
    """
    if isinstance(a.data, EncodedArray) or isinstance(a.scale, EncodedArray):
        raise ValueError("rebalance: data or scale is stored in codes; quantize the value again")
    wide = a.data.astype(a.dtype)
    factor = _movable(a, factor)
    data = (wide / factor).astype(a.data.dtype)
    if a.exponent is not None:
        return ScaledArray.from_exponent(data, a.exponent + exponent_of(factor), a.block)
    if isinstance(a.scale, ScaledArray):  # of two levels, the upper one is multiplied
        upper = a.tensor_scale
        assert upper is not None
        scale = dataclasses.replace(a.scale, scale=upper * factor.astype(upper.dtype))
    elif a.scale is None:
        scale = factor
    else:
        scale = a.scale.astype(a.dtype) * factor
    return ScaledArray(data, scale, a.block)


def as_number(name: str, x: Any, dtype: DTypeLike) -> jax.Array:
    """Returns a number, or an array of them: arrays of floats as they are, others in ``dtype``."""
    if isinstance(x, int | float) and float(jnp.finfo(dtype).max) < abs(x) < np.inf:
        raise ValueError(
            f"{name} is {x!r}, beyond the largest {np.dtype(dtype).name}; exponents have no bound: "
            "use ScaledArray.from_exponent"
        )
    if isinstance(x, int | float) and 0 < abs(x) < float(jnp.finfo(dtype).tiny):
        raise ValueError(
            f"{name} is {x!r}, below the smallest normal {np.dtype(dtype).name}, and XLA takes it "
            "for 0; exponents have no bound: use ScaledArray.from_exponent"
        )
    found = x if isinstance(x, jax.Array) else np.asarray(x)
    if isinstance(x, int | float) and not isinstance(x, bool):
        return jnp.asarray(x, dtype)
    if jnp.issubdtype(found.dtype, jnp.floating):
        return jnp.asarray(x)
    if not jnp.issubdtype(found.dtype, jnp.integer):
        raise TypeError(f"{name} is {x!r}; expected a real number, or an array of them")
    return jnp.asarray(x).astype(dtype)


def _movable(a: ScaledArray, factor: ArrayLike) -> jax.Array:
    known = None if isinstance(factor, Tracer) else factor
    factor = as_number("rebalance: factor", factor, a.dtype).astype(a.dtype)
    pairs = zip(reversed(factor.shape), reversed(a.shape), strict=False)
    fits = factor.ndim <= a.ndim and all(n in (1, m) for n, m in pairs)
    if not fits or (factor.ndim and a.block is not None):
        expected = "a number beside blocks" if a.block else f"one that broadcasts to {a.shape}"
        raise ValueError(f"rebalance: factor has the shape {factor.shape}; expected {expected}")
    two = a.exponent is not None
    if known is not None:
        numbers = np.asarray(known, np.float64)
        if not np.all(np.isfinite(numbers) & (numbers != 0)):
            raise ValueError(f"rebalance: factor is {known}; expected finite numbers other than 0")
        if two and not np.all(np.frexp(numbers)[0] == 0.5):
            raise ValueError(
                f"rebalance: factor is {known}; expected a positive power of two, which multiplies "
                "a scale that is an exponent"
            )
    factor = jnp.where(jnp.isfinite(factor) & (factor != 0), factor, 1)
    return power_of_two(exponent_of(jnp.abs(factor)), a.dtype) if two else factor


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


@partial(jax.jit, inline=True)
def _value(a: ScaledArray) -> jax.Array:
    data, scale = a.data.astype(a.dtype), a._factor
    if scale is None:
        return data
    if not isinstance(scale, jax.Array | np.ndarray):
        scale = scale.__jax_array__()
    if a.block is not None:
        axis, size = a.block
        scale = jnp.repeat(scale, size, axis=axis)
        scale = jax.lax.slice_in_dim(scale, 0, a.shape[axis], axis=axis)
    scale = scale.reshape((1,) * (data.ndim - scale.ndim) + scale.shape)
    if a.exponent is not None:
        return ldexp(data, scale)
    if scale.dtype == jnp.float8_e8m0fnu:  # 2^-127 is a float32 subnormal, which XLA flushes
        code = jax.lax.bitcast_convert_type(scale, jnp.uint8)
        value = ldexp(data, code.astype(jnp.int32) - 127)
        return jnp.where(code == 255, jnp.asarray(jnp.nan, a.dtype), value)
    return data * scale.astype(a.dtype)
