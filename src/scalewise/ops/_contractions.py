"""Matrix products with separate dtypes for storage, products and accumulation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._check import Count, checked
from .._resolve import as_format
from .._types import Converted, kept
from ..devices import MatrixUnit
from ..formats import (
    FP32,
    BlockFormat,
    FloatDType,
    Format,
    FormatLike,
    RoundingMode,
    rounding_mode,
)  # fmt: skip
from ..rounding import round_bits, to_float64
from ._matrix_units import unit_matmul
from ._operation import operation


@checked
@dataclasses.dataclass(frozen=True)
class Accumulator:
    """How a machine accumulates products: one after the other in a format, optionally in chunks.

    Attributes:
        fmt: the format of the running sum, of up to 25 significant bits, or a name or dtype of one.
        rounding: of each addition: ``"nearest_even"``, ``"toward_zero"``, ...
        chunk: number of terms after which the running sum is added to a sum in the format ``into``
            and starts anew; None: never.
        into: the format of that sum, rounded to nearest.

    Raises:
        ValueError: an unknown format or rounding, a format too wide or without a zero, or a chunk
            that isn't positive.

    Example:
        >>> import jax.numpy as jnp
        >>> ones = jnp.ones(4096, jnp.float16)
        >>> [float(matmul(ones, ones, accumulator=Accumulator("fp16", chunk=c)))
        ...  for c in (None, 128)]
        [2048.0, 4096.0]
    """

    fmt: Converted[Format, FormatLike] = kept()
    rounding: RoundingMode = "nearest_even"
    chunk: Count | None = None
    into: Converted[Format, FormatLike] = kept(FP32)

    def __post_init__(self):
        for name in ("fmt", "into"):
            fmt = as_format(getattr(self, name), f"Accumulator.{name}")
            object.__setattr__(self, name, fmt)
            if fmt.precision > 25 or not fmt.zero:
                raise ValueError(
                    f"Accumulator: {fmt.name} is refused; expected formats with a zero and up to "
                    "25 significant bits, since sums are carried in float64"
                )
        if rounding_mode(self.rounding, self.fmt).random:
            raise ValueError("Accumulator: rounding is 'stochastic', but there is no key to draw")


Sums: TypeAlias = Accumulator | MatrixUnit
"""How products are added: by a machine with one format of sums, or by a GPU's matrix unit."""


@checked
def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    accumulator: Sums | Format | str | None = None,
    out: FloatDType | None = None,
    scales: tuple[ArrayLike, ArrayLike] | None = None,
) -> jax.Array:
    """Returns ``a @ b`` with exact products, summed in an accumulator and rounded once to ``out``.

    Args:
        a, b: float arrays of one dtype, with shapes as for ``jnp.matmul``.
        accumulator: how products are added; a format means in that format, one after the other; a
            :class:`scalewise.devices.MatrixUnit` as that instruction adds them. Default: XLA's own
            product in float32 (float64 for float64).
        scales: of block formats, for a matrix unit that multiplies them: the scales of a's blocks,
            ``[..., M, K / size]``, and of b's, ``[..., K / size, N]``; ``a`` and ``b`` are then
            their elements.
        out: dtype of the result. Default: that of a.

    Returns:
        With a matrix unit the bits that the unit returns, for operands rounded to its formats. With
        another accumulator, a sum can differ from the machine's only by double rounding through
        float64, where a term lies 2^-29 below the sum or more. The gradient is that of the
        exact product, computed in float32. Over no terms: zero.

    Raises:
        TypeError: operands that aren't float arrays of one dtype.
        ValueError: shapes that don't match, an unsupported accumulator, or ``scales`` without a
            unit for block formats, or such a unit without scales.

    Example:
        >>> import jax.numpy as jnp
        >>> from scalewise.devices import matrix_unit
        >>> a, b = jnp.full((1, 4096), 0.1), jnp.full((4096, 1), 1.0)
        >>> fast, promoted = (matrix_unit("h100", "e4m3fn", promote=p) for p in (None, 128))
        >>> [float(matmul(a, b, accumulator=u)[0, 0]) for u in (fast, promoted)]  # exactly: 416
        [394.0, 416.0]
    """
    a, b = jnp.asarray(a), jnp.asarray(b)
    if a.dtype != b.dtype or not jnp.issubdtype(a.dtype, jnp.floating):
        raise TypeError(f"matmul takes float arrays of one dtype, not {a.dtype} and {b.dtype}")
    if a.ndim == 0 or b.ndim == 0 or a.shape[-1] != b.shape[max(b.ndim - 2, 0)]:
        raise ValueError(f"matmul: shapes {a.shape} and {b.shape} don't match")
    if isinstance(accumulator, (Format, str)):
        accumulator = Accumulator(as_format(accumulator, "matmul"))
    left = a[None] if a.ndim == 1 else a
    right = b[:, None] if b.ndim == 1 else b
    batch = jnp.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    left = jnp.broadcast_to(left, batch + left.shape[-2:])
    right = jnp.broadcast_to(right, batch + right.shape[-2:])
    blocks = isinstance(accumulator, MatrixUnit) and isinstance(accumulator.left, BlockFormat)
    if blocks != (scales is not None):
        raise ValueError(
            f"matmul: scales are {'missing' if blocks else 'given'}; expected scales with a matrix "
            f"unit for block formats alone, not with accumulator {accumulator}"
        )
    out = np.dtype(a.dtype if out is None else out)
    if isinstance(accumulator, MatrixUnit) and scales is not None:
        own, other = accumulator.left, accumulator.right
        assert isinstance(own, BlockFormat)
        assert isinstance(other, BlockFormat)
        (*_, m, k), (*_, depth, n) = left.shape, right.shape
        wanted = (m, -(-k // own.size)), (-(-depth // other.size), n)
        given = tuple(jnp.shape(s)[-2:] for s in scales)
        if given != wanted:
            raise ValueError(
                f"matmul: scales of shapes {given[0]} and {given[1]}; expected {wanted[0]} and "
                f"{wanted[1]}, one for each block of {own.size} numbers along K"
            )
    factors = [jnp.broadcast_to(s, batch + jnp.shape(s)[-2:]) for s in scales or ()]
    y = _matmul(accumulator, out, left, right, *factors)
    return jnp.squeeze(y, (-2,) * (a.ndim == 1) + (-1,) * (b.ndim == 1))


def dot_general(
    a: ArrayLike,
    b: ArrayLike,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    accumulator: Sums | Format | str | None = None,
    out: FloatDType | None = None,
) -> jax.Array:
    """Returns the contraction that :func:`jax.lax.dot_general` names, as :func:`matmul` adds it.

    Several contracted axes are added in the order in which ``dimension_numbers`` lists them, the
    last one fastest.
    """
    a, b = jnp.asarray(a), jnp.asarray(b)
    (contracted_a, contracted_b), (batch_a, batch_b) = dimension_numbers
    free = [
        [i for i in range(x.ndim) if i not in (*contracted, *batch)]
        for x, contracted, batch in ((a, contracted_a, batch_a), (b, contracted_b, batch_b))
    ]
    batch = [a.shape[i] for i in batch_a]
    rows, columns = ([x.shape[i] for i in axes] for x, axes in zip((a, b), free, strict=True))
    terms = math.prod(a.shape[i] for i in contracted_a)
    left = a.transpose(*batch_a, *free[0], *contracted_a)
    right = b.transpose(*batch_b, *contracted_b, *free[1])
    y = matmul(
        left.reshape(*batch, math.prod(rows), terms),
        right.reshape(*batch, terms, math.prod(columns)),
        accumulator=accumulator,
        out=out,
    )
    return y.reshape(*batch, *rows, *columns)


def conv_general_dilated(
    x: ArrayLike,
    kernel: ArrayLike,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    *,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: lax.ConvDimensionNumbers,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    accumulator: Sums | Format | str | None = None,
    out: FloatDType | None = None,
) -> jax.Array:
    """Returns the convolution that :func:`jax.lax.conv_general_dilated` names, as a product.

    Each window of ``x`` is a row of a matrix, whose product with the kernel :func:`matmul` adds up:
    over features first, then over the window's axes, the last one fastest.

    Args:
        padding: pairs of numbers, one for each spatial axis.
        dimension_numbers: of class ``jax.lax.ConvDimensionNumbers``.
    """
    lhs, rhs, result = dimension_numbers
    x, kernel = jnp.asarray(x).transpose(lhs), jnp.asarray(kernel).transpose(rhs)
    n = x.ndim - 2
    ones = (1,) * n
    holes = [d - 1 for d in lhs_dilation or ones]
    edges = [(*pair, hole) for pair, hole in zip(padding, holes, strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *edges])
    for axis in range(n):  # of x: [batch, features, axes before and their windows, ..., axis, ...]
        size, dilation = kernel.shape[2 + axis], (rhs_dilation or ones)[axis]
        reach = x.shape[2 + 2 * axis] - (size - 1) * dilation
        starts = np.arange(0, max(reach, 0), window_strides[axis])
        index = starts[:, None] + dilation * np.arange(size)
        x = jnp.take(x, index, axis=2 + 2 * axis)
    windows = range(3, 3 + 2 * n, 2)
    groups = feature_group_count * batch_group_count
    parts_x = jnp.split(x, groups, axis=1 if batch_group_count == 1 else 0)
    parts_k = jnp.split(kernel, groups, axis=0)
    products = [
        dot_general(
            part, weights, (((1, *windows), range(1, n + 2)), ((), ())),
            accumulator=accumulator, out=out,
        )
        for part, weights in zip(parts_x, parts_k, strict=True)
    ]  # fmt: skip
    y = jnp.moveaxis(jnp.concatenate(products, axis=-1), -1, 1)
    return y.transpose(np.argsort(result))


Pairs = tuple[jax.Array, jax.Array]  # the factors of products


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _matmul(
    accumulator: Sums | None, out: np.dtype, a: jax.Array, b: jax.Array, *scales: jax.Array
) -> jax.Array:
    if accumulator is None:
        return _plain(a, b).astype(out)
    if isinstance(accumulator, MatrixUnit):
        return unit_matmul(accumulator, out, a, b, *scales)
    return operation("matmul", _accumulated, a, b, acc=accumulator, out=out)


@_matmul.defjvp
def _(accumulator, out, primals, tangents):
    y = _matmul(accumulator, out, *primals)
    factors, moved = jax.jvp(partial(_factors, accumulator), primals, tangents)
    (a, b), (da, db) = factors, moved
    return y, (_plain(da, b) + _plain(a, db)).astype(out)


def _factors(
    accumulator: Sums | None, a: jax.Array, b: jax.Array, *scales: jax.Array
) -> tuple[jax.Array, jax.Array]:
    if not scales:
        return a, b
    assert isinstance(accumulator, MatrixUnit)
    found = []
    for x, s, fmt, axis in zip((a, b), scales, (accumulator.left, accumulator.right), (-1, -2),
                               strict=True):  # fmt: skip
        assert isinstance(fmt, BlockFormat)
        whole = jnp.repeat(jnp.abs(s), fmt.size, axis).astype(jnp.float32)
        whole = lax.slice_in_dim(whole, 0, x.shape[axis], axis=axis % x.ndim)
        found.append(x.astype(jnp.float32) * whole)
    return found[0], found[1]


def _plain(a: jax.Array, b: jax.Array) -> jax.Array:
    wide = jnp.float64 if a.dtype == jnp.float64 else jnp.float32
    return jnp.matmul(a.astype(wide), b.astype(wide), precision=lax.Precision.HIGHEST)


def _accumulated(a: jax.Array, b: jax.Array, *, acc: Accumulator) -> jax.Array:
    with jax.enable_x64(True):
        # terms first: (K, ..., M, 1) and (K, ..., 1, N)
        left = jnp.moveaxis(to_float64(a), -1, 0)[..., None]
        right = jnp.moveaxis(to_float64(b), -2, 0)[..., None, :]
        terms = left.shape[0]
        shape = jnp.broadcast_shapes(left.shape[1:], right.shape[1:])
        zero = jnp.zeros(shape, jnp.float64)
        if terms == 0:
            return zero

        def add(total: jax.Array, pair: Pairs) -> tuple[jax.Array, None]:
            return round_bits(total + pair[0] * pair[1], acc.fmt, rounding=acc.rounding), None

        def run(pairs: Pairs) -> jax.Array:
            return lax.scan(add, zero, pairs)[0]

        if acc.chunk is None:
            total = run((left, right))
        else:

            def promote(total: jax.Array, pairs: Pairs) -> tuple[jax.Array, None]:
                return round_bits(total + run(pairs), acc.into), None

            fill = -terms % acc.chunk
            first, second = (
                jnp.pad(t, [(0, fill)] + [(0, 0)] * (t.ndim - 1)).reshape(
                    -1, acc.chunk, *t.shape[1:]
                )
                for t in (left, right)
            )
            total = lax.scan(promote, zero, (first, second))[0]
        return total
