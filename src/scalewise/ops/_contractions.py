"""Dots and matrix products with separate dtypes for storage, products and accumulation."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._check import CONVERTED, Count, checked
from .._resolve import as_format
from .._types import FloatDType, RoundingMode
from ..formats import FP32, Format, rounding_mode
from ..formats import format as format_
from ..rounding import from_float64, round_bits, to_float64


@checked
@dataclasses.dataclass(frozen=True)
class Accumulator:
    """How a machine accumulates products: one after the other in a format, optionally in chunks.

    Attributes:
        fmt: the format of the running sum, of up to 25 significant bits, or a name or dtype of one.
        rounding: of each addition: ``"nearest_even"``, ``"toward_zero"``, ...
        chunk: after so many terms the running sum is added to one in ``into`` and starts anew;
            None: never.
        into: the format of that sum, rounded to nearest.

    Raises:
        ValueError: an unknown format or rounding, a format too wide or without a zero, or a chunk
            that isn't positive.

    Example:
        >>> import jax.numpy as jnp
        >>> ones = jnp.ones(4096, jnp.float16)
        >>> [float(dot(ones, ones, accumulator=Accumulator("fp16", chunk=c)))
        ...  for c in (None, 128)]
        [2048.0, 4096.0]
    """

    fmt: Annotated[Format, CONVERTED]
    rounding: RoundingMode = "nearest_even"
    chunk: Count | None = None
    into: Annotated[Format, CONVERTED] = FP32

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


# FP8 tensor cores of the H100 as DeepSeek-V3 found them (arXiv 2412.19437, 3.3.2): about 14 bits,
# truncated, and the same with a promotion to float32 after every 128 terms.
FP8_CORE = Accumulator(Format("e8m13", 8, 13), "toward_zero")
FP8_CORE_PROMOTED = dataclasses.replace(FP8_CORE, chunk=128)


@checked
def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    accumulator: Accumulator | Format | str | None = None,
    out: FloatDType | None = None,
) -> jax.Array:
    """Returns ``a @ b`` with exact products, summed in an accumulator and rounded once to ``out``.

    Args:
        a, b: float arrays of one dtype, with shapes as for ``jnp.matmul``.
        accumulator: how products are added; a format means in that format, one after the other.
            Default: XLA's own product in float32 (float64 for float64).
        out: dtype of the result. Default: that of a.

    Returns:
        A product's double rounding through float64 is the only thing in which a sum can differ from
        the machine's, where a term lies 2^-29 below the sum or more. The gradient is that of the
        exact product, computed in float32. Over no terms: zero.

    Raises:
        TypeError: operands that aren't float arrays of one dtype.
        ValueError: shapes that don't match, or an accumulator there can't be.
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
    y = _matmul(accumulator, np.dtype(a.dtype if out is None else out), left, right)
    y = y[..., 0] if b.ndim == 1 else y
    if a.ndim == 1:
        y = y[0] if b.ndim == 1 and not batch else y[..., 0, :] if b.ndim > 1 else y[..., 0]
    return y


@checked
def dot(
    a: ArrayLike,
    b: ArrayLike,
    *,
    accumulator: Accumulator | Format | str | None = None,
    out: FloatDType | None = None,
) -> jax.Array:
    """Returns the dot product of two vectors, computed as :func:`matmul` does.

    Raises:
        ValueError: something not a vector.
    """
    if jnp.ndim(a) != 1 or jnp.ndim(b) != 1:
        raise ValueError(f"dot takes vectors, not shapes {jnp.shape(a)} and {jnp.shape(b)}")
    return matmul(a, b, accumulator=accumulator, out=out)


Pairs = tuple[jax.Array, jax.Array]  # the factors of products


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _matmul(
    accumulator: Accumulator | None, out: np.dtype, a: jax.Array, b: jax.Array
) -> jax.Array:
    if accumulator is None:
        return _plain(a, b).astype(out)
    return _accumulated(accumulator, out, a, b)


@_matmul.defjvp
def _(accumulator, out, primals, tangents):
    (a, b), (da, db) = primals, tangents
    y = _matmul(accumulator, out, a, b)
    return y, (_plain(da, b) + _plain(a, db)).astype(out)


def _plain(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiplies in float32 at least: widening operands is exact and runs on every backend."""
    wide = jnp.float64 if a.dtype == jnp.float64 else jnp.float32
    return jnp.matmul(a.astype(wide), b.astype(wide), precision=lax.Precision.HIGHEST)


@partial(jax.jit, static_argnums=(0, 1))
def _accumulated(acc: Accumulator, out: np.dtype, a: jax.Array, b: jax.Array) -> jax.Array:
    with jax.enable_x64(True):
        # terms first: (K, ..., M, 1) and (K, ..., 1, N)
        left = jnp.moveaxis(to_float64(a), -1, 0)[..., None]
        right = jnp.moveaxis(to_float64(b), -2, 0)[..., None, :]
        terms = left.shape[0]
        shape = jnp.broadcast_shapes(left.shape[1:], right.shape[1:])
        zero = jnp.zeros(shape, jnp.float64)
        if terms == 0:
            return zero.astype(out)

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
        return from_float64(_to_dtype(total, out), out)


def _to_dtype(x: jax.Array, out: np.dtype) -> jax.Array:
    """Rounds to the dtype's format first if a conversion would round twice."""
    fmt = format_(out)
    return x if fmt.bits >= 32 else round_bits(x, fmt)
