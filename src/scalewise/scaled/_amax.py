"""``amax``: the largest finite magnitude, from which scales are chosen."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._sizes import is_known

# XLA's CPU backend compiles a reduction with a select in it to a scalar loop. Below SMALL elements
# the loop of integers is the fastest; from LARGE on, the same maxima as elementwise operations on
# parts of the array are, which become vector instructions on all cores.
SMALL, LARGE, PARTS = 4096, 1 << 18, 16


def amax(x: jax.Array, axes: Sequence[int], keepdims: bool) -> jax.Array:
    """Returns the largest magnitude of the finite elements over the axes, in one pass.

    NaN and infinities are left out, so that they change no scale. A constant under differentiation.

    Args:
        x: float32 or float64, any shape.
        axes: axes to reduce.
        keepdims: whether the reduced axes stay, with length 1.

    Returns:
        An array of x's dtype, exact; 0 where there is no finite element. Subnormal magnitudes may
        be returned as 0.

    Example:
        >>> import jax.numpy as jnp
        >>> float(amax(jnp.array([1.5, -2.0, jnp.inf, jnp.nan]), (0,), False))
        2.0
    """
    axes = [a % x.ndim for a in axes]
    x = lax.stop_gradient(x)
    if not is_known(x.size):
        largest = _by_select(x, axes)
    elif not x.size:
        largest = jnp.zeros([n for i, n in enumerate(x.shape) if i not in axes], x.dtype)
    elif x.size < SMALL:
        largest = _by_bits(x, axes)
    elif x.size < LARGE:
        largest = _by_select(x, axes)
    else:
        largest = lax.platform_dependent(
            x, cpu=lambda x: _by_parts(x, axes), default=lambda x: _by_keys(x, axes)
        )
    return lax.expand_dims(largest, axes) if keepdims else largest


def _by_bits(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    return lax.bitcast_convert_type(lax.reduce_max(_finite_bits(x), axes), x.dtype)


def _by_select(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    magnitude = lax.abs(x)
    finite = magnitude < np.asarray(np.inf, x.dtype)  # False for NaN
    return lax.reduce_max(lax.select(finite, magnitude, lax.full_like(magnitude, 0)), axes)


def _by_parts(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The maximum of parts along the longest axis, which may overlap, and then of the rest.

    A plain maximum of all, tested for infinities afterwards, does not do: beside a NaN, XLA's CPU
    libraries return the maximum of an arbitrary part of the array.
    """
    axis = max(axes, key=lambda a: x.shape[a])
    length = x.shape[axis]
    size = -(-length // PARTS)
    starts = [min(i * size, length - size) for i in range(min(PARTS, length))]
    parts = [_finite_bits(lax.slice_in_dim(x, i, i + size, axis=axis)) for i in starts]
    bits = lax.optimization_barrier(functools.reduce(lax.max, parts))
    return lax.reduce_max(lax.bitcast_convert_type(bits, x.dtype), axes)


def _by_keys(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    key, flag, zero = _largest_key(x, axes)
    return lax.bitcast_convert_type((key & ~flag) - zero, x.dtype)


def all_finite(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Whether all elements over the axes are finite: found in the pass that finds :func:`amax`."""
    key, flag, _ = _largest_key(x, axes)
    return key < flag


def _largest_key(x: jax.Array, axes: Sequence[int]) -> tuple[jax.Array, Any, Any]:
    """The largest finite magnitude and whether there are others, as one unsigned integer.

    An element's key is the bits of its magnitude, moved up so far that those of infinities and NaN
    reach the highest bit: the flag. What they leave below it is less than the key of zero. So one
    reduction finds both: a maximum below the flag, beside a flag that stays. It reads each element
    once, by a chain of single operations; of two reductions, or of a select, XLA's GPU backend
    would write the operand out first, transposed if a product reads it transposed.

    Returns:
        The key of the largest, the flag, and the key of zero.
    """
    integer = np.uint64 if x.dtype == jnp.float64 else np.uint32
    flag = integer(np.iinfo(integer).max // 2 + 1)
    zero = flag - np.asarray(np.inf, x.dtype).view(integer)
    keys = (lax.bitcast_convert_type(x, integer) & ~flag) + zero

    def larger(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.max(a & ~flag, b & ~flag) | ((a | b) & flag)

    return lax.reduce(keys, zero, larger, tuple(axes)), flag, zero


def _finite_bits(x: jax.Array) -> jax.Array:
    """The bits of magnitudes, which are in the order of the numbers; 0 for NaN and infinities."""
    integer = np.int64 if x.dtype == jnp.float64 else np.int32
    infinity = np.asarray(np.inf, x.dtype).view(integer)
    bits = lax.bitcast_convert_type(x, integer) & integer(np.iinfo(integer).max)
    return lax.select(bits < infinity, bits, lax.full_like(bits, 0))
