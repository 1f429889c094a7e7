"""``amax``: the largest finite magnitude, from which scales are chosen."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._sizes import is_known

# XLA's CPU backend compiles a reduction with a select in it to a scalar loop. Below SMALL elements
# the loop of integers is the fastest; from LARGE on, the same maxima as elementwise operations on
# parts of the array are, which become vector instructions on all cores.
SMALL, LARGE, PARTS = 4096, 1 << 18, 4


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
        largest = lax.bitcast_convert_type(lax.reduce_max(_finite_bits(x), axes), x.dtype)
    elif x.size < LARGE:
        largest = _by_select(x, axes)
    else:
        largest = lax.platform_dependent(
            x, cpu=lambda x: _by_parts(x, axes), default=lambda x: amax_by_keys(x, axes)
        )
    return lax.expand_dims(largest, axes) if keepdims else largest


def _by_select(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    magnitude = lax.abs(x)
    finite = lax.lt(magnitude, np.asarray(np.inf, x.dtype))  # False for NaN
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


def amax_by_keys(x: jax.Array | Sequence[jax.Array], axes: Sequence[int]) -> jax.Array:
    """The maximum of magnitudes' bits, moved so that those of infinities and NaN are negative.

    One maximum of integers, which devices also find among themselves, of a chain of single
    operations: of a select XLA's GPU backend writes the operand out first. 0 for no elements.
    Of several arrays of one shape, the maximum of all.
    """
    arrays = [x] if isinstance(x, jax.Array) else x
    dtype = arrays[0].dtype
    integer = np.int64 if dtype == jnp.float64 else np.int32
    zero = integer(np.iinfo(integer).min) - np.asarray(np.inf, dtype).view(integer)

    def key(x: jax.Array) -> jax.Array:
        bits = lax.bitcast_convert_type(x, integer)
        return lax.add(lax.bitwise_and(bits, integer(np.iinfo(integer).max)), zero)

    keys = functools.reduce(lax.max, map(key, arrays))
    largest = lax.max(lax.reduce_max(keys, axes), zero)
    return lax.bitcast_convert_type(lax.sub(largest, zero), dtype)


def _finite_bits(x: jax.Array) -> jax.Array:
    """The bits of magnitudes, which are in the order of the numbers; 0 for NaN and infinities.

    By functions of ``lax``: tracing the operators of ``jax.numpy`` takes ten times as long.
    """
    integer = np.int64 if x.dtype == jnp.float64 else np.int32
    infinity = np.asarray(np.inf, x.dtype).view(integer)
    bits = lax.bitwise_and(lax.bitcast_convert_type(x, integer), integer(np.iinfo(integer).max))
    return lax.select(lax.lt(bits, infinity), bits, lax.full_like(bits, 0))
