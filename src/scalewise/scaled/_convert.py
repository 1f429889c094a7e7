"""Pytrees of arrays as pytrees of ScaledArrays and back, and dynamic rescaling."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._check import checked, is_array
from .._types import FloatDType, FormatLike, PyTree
from ..formats import FP16
from ..rounding import EncodedArray
from . import scaled_tree
from ._array import ScaledArray, rebalance
from ._measures import MEASURES, ZERO_EXPONENT, scaled_down, split_power
from ._operand import stored
from ._power import power_of_two
from .scaled_tree import is_scaled

Measure = Literal["max", "l1", "l2", "least_squares"]


@checked
def as_scaled(
    tree: PyTree, scale: ArrayLike | Measure | None = None, *, dtype: FormatLike | None = None
) -> PyTree:
    """Returns a pytree with each float array as a ScaledArray of the same value.

    Args:
        tree: of arrays and numbers. ScaledArrays, integers, booleans and objects that aren't arrays
            stay as they are.
        scale: of every array: a number, or how to find each array's own, a power of two, from its
            data: ``"l2"`` (root mean square), ``"l1"`` (mean magnitude), ``"max"``,
            ``"least_squares"``. None: 1 for arrays; numbers without axes get their power of two, so
            that data are from 1 to 2.
        dtype: of the data, by default the array's own; data are rounded to it once, after they are
            divided by the scale.

    Raises:
        ValueError: an unknown measure.

    Example:
        >>> a = as_scaled(jnp.array([3e6, -1e6]), "l2", dtype=jnp.float16)
        >>> a.data.tolist(), float(a.scale)
        ([1.4306640625, -0.476806640625], 2097152.0)
        >>> as_scaled({"lr": 0.75, "step": 3})["lr"].data
        Array(1.5, dtype=float32)
    """
    _check(scale)
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
    if isinstance(scale, str):
        data, power = _found(wide, scale)
    elif scale is None and not x.ndim:
        data, power = split_power(wide)
    else:
        power = jnp.asarray(1 if scale is None else scale, wide.dtype)
        data = jnp.where(power == 0, 0, wide / jnp.where(power == 0, 1, power))
    return ScaledArray(stored(data, dtype, x.dtype), power)


def _found(wide: jax.Array, measure: str) -> tuple[jax.Array, jax.Array]:
    data, exponent = scaled_down(wide, measure, FP16)
    power = power_of_two(jnp.where(exponent == ZERO_EXPONENT, 0, exponent), wide.dtype)
    return data, power


@checked
def asarray(tree: PyTree, dtype: FloatDType | None = None) -> PyTree:
    """Returns a pytree with each ScaledArray as the plain array of its value.

    Args:
        tree: of ScaledArrays and other leaves, which stay as they are.
        dtype: of the arrays; by default float32, float64 for float64 data.
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
    multiplies the scale: the value doesn't change but for data that become subnormal.

    Args:
        tree: of ScaledArrays with one scale each, and other leaves, which stay as they are.
        measure: what becomes of unit size: ``"l2"`` the root mean square, ``"l1"`` the mean
            magnitude; ``"max"`` brings the largest magnitude to FP16's last but one binade;
            ``"least_squares"`` minimises the squared error of a cast to FP16.
        dtype: of the data, which are cast to it afterwards; by default they keep theirs.

    Raises:
        ValueError: an unknown measure.

    Example:
        >>> a = ScaledArray(jnp.float16([1024, 3072]), 2.0)
        >>> b = dynamic_rescale(a)
        >>> b.data.tolist(), float(b.scale), b.value().tolist() == a.value().tolist()
        ([0.5, 1.5], 4096.0, True)
    """
    _check(measure)

    def rescaled(x: PyTree) -> PyTree:
        if not isinstance(x, ScaledArray):
            return x
        if isinstance(x.data, EncodedArray):
            raise ValueError("dynamic_rescale: data in codes; use sw.quantize(x, fmt) again")
        _, power = _found(x.data.astype(x.dtype), measure)
        if x.exponent is not None:
            y = rebalance(x, jnp.log2(power).astype(jnp.int32))
        else:
            y = rebalance(x, power)
        if dtype is None:
            return y
        return dataclasses.replace(y, data=stored(y.data.astype(y.dtype), dtype, y.dtype))

    return scaled_tree.map(rescaled, tree)


def _check(measure: object) -> None:
    if isinstance(measure, str) and measure not in MEASURES:
        names = ", ".join(repr(m) for m in MEASURES)
        raise ValueError(f"measure is {measure!r}; expected one of {names}")
