"""Pytrees of arrays as pytrees of ScaledArrays and back, and data brought to unit size."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._check import checked, is_array
from .._types import PyTree
from ..formats import FP16, FloatDType, Format, FormatLike
from ..formats import format as format_
from ..rounding import EncodedArray
from . import scaled_tree
from ._amax import is_known, top_exponent
from ._array import ScaledArray, as_number, rebalance
from ._power import HIGHEST, LOWEST, ZERO_EXPONENT, exponent_of, power_of_two, split_power
from ._rules import stored
from .scaled_tree import is_scaled

Measure = Literal["max", "l2"]


@checked
def as_scaled(
    tree: PyTree, scale: ArrayLike | Measure | None = None, *, dtype: FormatLike | None = None
) -> PyTree:
    """Returns a pytree with each float array as a ScaledArray of the same value.

    Args:
        tree: of arrays and numbers. ScaledArrays, integers, booleans and objects that aren't arrays
            stay as they are.
        scale: of every array: a number, or how to find each array's own, a power of two, from its
            data: ``"l2"`` (root mean square) or ``"max"``. None: 1 for arrays; numbers without axes
            get their power of two, so that data are from 1 to 2.
        dtype: of the data, or a format, by default the array's own; data are rounded to it once,
            after they are divided by the scale. Found scales bring them into its range; numbers
            still beyond its largest number become the largest.

    Raises:
        ValueError: an unknown measure, or a scale out of the normal range.

    Example:
        >>> a = as_scaled(jnp.array([3e6, -1e6]), "l2", dtype=jnp.float16)
        >>> a.data.tolist(), float(a.scale)
        ([1.4306640625, -0.476806640625], 2097152.0)
        >>> as_scaled({"lr": 0.75, "step": 3})["lr"].data
        Array(1.5, dtype=float32)
    """
    return scaled_tree.map(lambda x: _as_scaled(x, scale, dtype), tree)


def _as_scaled(x: PyTree, scale: ArrayLike | Measure | None, dtype: FormatLike | None) -> PyTree:
    number = isinstance(x, float)
    known = isinstance(x, jax.Array | np.ndarray | np.generic) and is_array(x)
    if is_scaled(x) or not (number or known):
        return x
    x = jnp.asarray(x, jnp.float32 if number else None)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    wide = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    if isinstance(scale, str):  # a scale that is found from the data
        fmt = _format(dtype, x)
        data, power = _found(wide, scale, fmt)
        return ScaledArray(stored(data, dtype or x.dtype, saturate="finite"), power)
    elif scale is None and not x.ndim:
        data, power = split_power(wide)
    else:
        power = as_number("as_scaled: scale", 1.0 if scale is None else scale, wide.dtype)
        power = power.astype(wide.dtype)
        data = jnp.where(power == 0, 0, wide / jnp.where(power == 0, 1, power))
    return ScaledArray(stored(data, x.dtype if dtype is None else dtype), power)


def _format(dtype: FormatLike | None, x: jax.Array) -> Format:
    fmt = format_(x.dtype if dtype is None else dtype)
    return fmt if dtype is not None or fmt.bits < 32 else FP16


def _found(wide: jax.Array, measure: str, fmt: Format) -> tuple[jax.Array, jax.Array]:
    data, exponent = scaled_down(wide, measure, fmt)
    power = power_of_two(jnp.where(exponent == ZERO_EXPONENT, 0, exponent), wide.dtype)
    return data, power


@checked
def asarray(tree: PyTree, dtype: FloatDType | None = None) -> PyTree:
    """Returns a pytree with each ScaledArray as the plain array of its value.

    Args:
        tree: of ScaledArrays and other leaves, which stay as they are.
        dtype: of the arrays; by default each ScaledArray's own.
    """

    def plain(x: PyTree) -> PyTree:
        if not is_scaled(x):
            return x
        return x.value() if dtype is None else x.astype(dtype)

    return scaled_tree.map(plain, tree)


@checked
def dynamic_rescale(
    tree: PyTree, measure: Measure = "l2", *, dtype: FormatLike | None = None
) -> PyTree:
    """Returns a pytree with each ScaledArray rebalanced so that its data are of unit size.

    A power of two is found from the data, by which :func:`scalewise.rebalance` divides them and
    multiplies the scale: the value doesn't change except for data that become subnormal.

    Args:
        tree: of ScaledArrays with one scale each, and other leaves, which stay as they are.
        measure: ``"l2"`` brings the root mean square to unit size, ``"max"`` the largest magnitude
            to the format's last but one binade, or to 2^14.
        dtype: of the data, or a format, to which they are rounded once; numbers beyond its largest
            become that. By default they keep theirs; float32 data are then scaled for FP16.

    Raises:
        ValueError: an unknown measure.

    Example:
        >>> a = ScaledArray(jnp.float16([1024, 3072]), 2.0)
        >>> b = dynamic_rescale(a)
        >>> b.data.tolist(), float(b.scale), b.value().tolist() == a.value().tolist()
        ([0.5, 1.5], 4096.0, True)
    """

    def rescaled(x: PyTree) -> PyTree:
        if not isinstance(x, ScaledArray):
            return x
        if isinstance(x.data, EncodedArray):
            raise ValueError("dynamic_rescale: data in codes; use sw.quantize(x, fmt) again")
        wide = x.data.astype(x.wide_dtype)
        _, power = _found(wide, measure, _format(dtype, x.data))
        y = rebalance(dataclasses.replace(x, data=wide), power)
        target = x.data.dtype if dtype is None else dtype
        data = stored(y.data.astype(y.wide_dtype), target, saturate="finite")
        return dataclasses.replace(y, data=data)

    return scaled_tree.map(rescaled, tree)


def scaled_down(data: jax.Array, measure: str, fmt: Format) -> tuple[jax.Array, jax.Array]:
    """Returns ``data / 2**exponent``, exact, and the exponent that brings data well into a format.

    ``"max"`` brings the largest magnitude to the format's last but one binade, but at most to 2^14
    to 2^15, which is FP16's; ``"l2"`` (the root mean square) brings the data to unit size. NaN and
    infinities don't count. The int32 exponent is from -126 to 126, of zeros :data:`ZERO_EXPONENT`.
    XLA doesn't repeat a division in each of the kernels that read its result, as it repeats a
    product: that made an optimizer step compile three times as long.
    """
    if data.dtype == jnp.float64:  # divided by the largest magnitude's power of two first
        size = jnp.where(jnp.isfinite(data), jnp.abs(data), 0)
        moved = exponent_of(jnp.maximum(jnp.max(size, initial=0.0), 2.0**-1000))
        moved = lax.clamp(np.int32(-1000), moved.astype(jnp.int32), np.int32(1000))
        narrower = (data * power_of_two(-moved, jnp.float64)).astype(jnp.float32)
        data, exponent = scaled_down(narrower, measure, fmt)
        return data, jnp.where(exponent == ZERO_EXPONENT, exponent, exponent + moved)
    exponent, zero = _exponent(data, measure, fmt)
    exponent = lax.clamp(LOWEST, exponent, HIGHEST)
    return data / power_of_two(exponent), lax.select(zero, np.int32(ZERO_EXPONENT), exponent)


def _exponent(data: jax.Array, measure: str, fmt: Format) -> tuple[jax.Array, jax.Array]:
    size = lax.abs(data)
    size = lax.select(size < np.float32(np.inf), size, lax.full_like(size, 0))
    top = jnp.max(size, initial=0.0)
    if measure == "max":
        return _log2(top) - np.int32(top_exponent(fmt)), top == 0
    if is_known(size.size) and not size.size:
        return jnp.int32(0), jnp.bool_(True)
    exponent = lax.clamp(LOWEST, _log2(top), HIGHEST)  # squares neither overflow nor flush
    unit = size * power_of_two(-exponent)
    return exponent + (_log2(jnp.mean(lax.square(unit))) >> 1), top == 0


def _log2(x: jax.Array) -> jax.Array:
    return (lax.bitcast_convert_type(x, jnp.int32) >> 23) - np.int32(127)
