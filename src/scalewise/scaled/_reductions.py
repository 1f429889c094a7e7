"""Reductions, running sums and softmax of ScaledArrays; see ``_operations.py`` for their scales."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from .._check import checked, checked_axes
from ._array import ScaledArray
from ._operand import ScaledOperand, applied, operands, scaled_result
from ._operations import Operand
from ._rules import FACTORS, RULES, static_scale

Axis = int | Sequence[int] | None


def _static(name: str, a: Operand, axis: Axis) -> float:
    shape = jnp.shape(a.data if isinstance(a, ScaledArray) else a)  # pyright: ignore
    return static_scale(math.prod(shape[i] for i in checked_axes(name, axis, len(shape))))


@checked
def sum(a: Operand, axis: Axis = None, *, keepdims: bool = False) -> ScaledArray:
    """Returns the sum over axes with the scale ``sA s``: s is sqrt(n), rounded to a power of two,
    for n terms, the size of a sum of n independent numbers of unit size.
    """
    s = _static("sum", a, axis)
    return applied("sum", lambda x: _over(jnp.sum, x, axis, keepdims) / s, a, static=(s,))


@checked
def cumsum(a: Operand, axis: int = -1) -> ScaledArray:
    """Returns running sums along an axis with the scale ``sA s``, s as for :func:`sum`: that of the
    last of them.
    """
    s = _static("cumsum", a, axis)
    return applied("cumsum", lambda x: jnp.cumsum(x, axis=axis) / s, a, static=(s,))


@checked
def mean(a: Operand, axis: Axis = None, *, keepdims: bool = False) -> ScaledArray:
    """Returns the mean over axes with the scale ``sA / s``, s as for :func:`sum`."""
    s = _static("mean", a, axis)
    return applied("mean", lambda x: _over(jnp.mean, x, axis, keepdims) * s, a, static=(s,))


@checked
def max(a: Operand, axis: Axis = None, *, keepdims: bool = False) -> ScaledArray:
    """Returns the largest element over axes with the scale ``sA``."""
    _static("max", a, axis)
    return applied("max", lambda x: _over(jnp.max, x, axis, keepdims), a)


@checked
def min(a: Operand, axis: Axis = None, *, keepdims: bool = False) -> ScaledArray:
    """Returns the smallest element over axes with the scale ``sA``."""
    _static("min", a, axis)
    return applied("min", lambda x: _over(jnp.min, x, axis, keepdims), a)


def _over(reduce: Callable, data: jax.Array, axis: Axis, keepdims: bool) -> jax.Array:
    axis = tuple(axis) if isinstance(axis, Sequence) else axis
    return reduce(data, axis=axis, keepdims=keepdims)


@checked
def softmax(a: Operand, axis: int = -1) -> ScaledArray:
    """Returns the softmax along an axis with the scale ``1 / sum(data)``, one for each row.

    The data are ``exp((data - max) sA)``, from 0 to 1.
    """
    x, below = _below_largest("softmax", a, axis)
    data = jnp.exp(below.value())
    scale = RULES["softmax"].scale(FACTORS, jnp.sum(data, axis=axis, keepdims=True))
    return scaled_result(data, scale, FACTORS, x.dtype)


@checked
def log_softmax(a: Operand, axis: int = -1) -> ScaledArray:
    """Returns the logarithm of the softmax along an axis, with the scale ``max(sA, 1)``.

    It is ``value - max - log(sum(exp(value - max)))``; its first part is of the size of the
    operand, its second at most the logarithm of the number of terms.
    """
    x, below = _below_largest("log_softmax", a, axis)
    total = jnp.log(jnp.sum(jnp.exp(below.value()), axis=axis, keepdims=True))
    scale = RULES["log_softmax"].scale(x.algebra, x.scale)
    total = ScaledOperand(total, x.algebra.one, x.algebra, x.dtype)
    return scaled_result(below.at(scale) - total.at(scale), scale, x.algebra, x.dtype)


def _below_largest(name: str, a: Operand, axis: int) -> tuple[ScaledOperand, ScaledOperand]:
    (x,) = operands(name, a)
    checked_axes(name, axis, x.data.ndim)
    top = jnp.max(x.data, axis=axis, keepdims=True)
    return x, dataclasses.replace(x, data=x.data - top)
