"""The largest finite magnitude, the scale that brings it to the top of a format, and sizes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format
from ._power import layout, quotient

# XLA's CPU backend compiles a reduction with a select in it to a scalar loop. Below SMALL elements
# the loop of integers is the fastest; from LARGE on, the same maxima as elementwise operations on
# parts of the array are, which become vector instructions on all cores.
SMALL, LARGE, PARTS = 4096, 1 << 18, 4


def amax(x: jax.Array, axes: Sequence[int], keepdims: bool) -> jax.Array:
    """Returns the largest magnitude of the finite elements over the axes, exact, in one pass.

    NaN and infinities are left out, so that they change no scale; 0 where there is no finite
    element. Subnormal magnitudes may be returned as 0. A constant under differentiation.

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


def is_known(size: object) -> bool:
    """True for a number, False for an expression of symbolic dimensions."""
    return isinstance(size, int | np.integer)


def at_least(size: int, bound: int) -> bool:
    """True if ``size`` is ``bound`` or more, and for a symbolic size, which counts as large."""
    return not is_known(size) or bool(size >= bound)


def predicted_size(shape: Iterable[int]) -> int:
    """The product of a shape's dimensions, at least 1; a symbolic dimension counts as 1."""
    return max(1, math.prod(int(n) for n in shape if is_known(n)))


def to_top(magnitude: jax.Array, fmt: Format, power_of_two: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the scale that brings a magnitude to the top of a format, and its inverse.

    Both are normal numbers. A program executes these operations at each of its contractions, so
    they are few: the exponent field of the magnitude is the power of two below it, and adding to
    that field scales.
    """
    dtype = magnitude.dtype
    signed, mantissa_bits, bias = layout(dtype)
    if not power_of_two:
        largest = dtype.type(float(fmt.max))
        lowest = np.asarray(2.0 ** (2 - bias), dtype)
        usable = jnp.where(jnp.isfinite(magnitude), magnitude, largest)
        scale = jnp.maximum(quotient(usable, largest), lowest)
        return jnp.where(magnitude == 0, jnp.ones_like(scale), scale), 1 / scale
    integer = np.uint64 if signed is np.int64 else np.uint32
    top = top_exponent(fmt)
    one = 1 << mantissa_bits  # the lowest bit of the exponent field
    field = lax.bitcast_convert_type(magnitude, integer)
    field = lax.bitwise_and(field, integer(2 * bias * one + one))
    # scale and inverse are normal numbers: their fields are from 1 to 2 * bias
    lowest, highest = max(1, top + 1), 2 * bias + min(0, top - 1)
    field = lax.clamp(integer(lowest * one), field, integer(highest * one))
    moved = lax.add(field, integer(-top * one % 2 ** np.iinfo(integer).bits))
    scale = lax.bitcast_convert_type(moved, dtype)
    inverse = lax.bitcast_convert_type(lax.sub(integer((2 * bias + top) * one), field), dtype)
    return scale, inverse


def top_exponent(fmt: Format) -> int:
    """Returns the exponent of the binade to which a largest magnitude is brought.

    It is the last but one, but at most 14 in a format that also has numbers below 1.
    """
    top = fmt.max_exponent - 1
    return top if fmt.min_exponent > 0 else min(top, 14)
