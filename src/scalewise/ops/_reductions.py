"""Reductions and softmax on narrow types: read narrow, computed wide, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._check import Natural, checked, checked_axes
from ..formats import FloatDType, FormatLike
from ..formats import format as format_
from ..rounding import float_array, round_to
from ._arithmetic import Axis, as_rows
from ._contractions import Accumulator, matmul
from ._one_format import (
    in_one_format,
    log_softmax_along,
    logsumexp_along,
    mean_along,
    softmax_along,
    sum_along,
    var_along,
)
from .functions import COMPUTE


@checked
def sum(
    x: ArrayLike,
    *,
    axis: Axis = None,
    keepdims: bool = False,
    compute: FloatDType | None = None,
    arithmetic: FormatLike | None = None,
    accumulator: Accumulator | None = None,
) -> jax.Array:
    """Returns the sum in x's dtype: infinity if it overflows, 0 for no elements.

    Args:
        x: float array.
        axis: over which axes; None for all.
        keepdims: whether they stay, with length 1.
        compute: dtype to add in. Default: ``functions.COMPUTE`` of x's.
        arithmetic: a signed format of up to 25 significant bits, or the name or dtype of one, in
            which everything is computed instead, as a machine does that has no other: every
            intermediate is a number of it. Sums are ``l2_norm``'s, in digits. An infinity enters
            as what the format makes of it: NaN, where there is none.
        accumulator: adds one term after the other as a machine would, instead of ``compute``.

    Raises:
        TypeError: x isn't a float array.
        ValueError: more than one of compute, arithmetic and accumulator, or no such format.

    Example:
        >>> import jax.numpy as jnp
        >>> float(sum(jnp.ones(1000, jnp.bfloat16)))
        1000.0
    """
    x, wide = _widened(x, compute, "sum", axis, arithmetic, accumulator)
    if arithmetic is not None:
        return _along(sum_along, sum, x, axis, keepdims, arithmetic)
    if accumulator is None:
        return _stored(jnp.sum(wide, axis=axis, keepdims=keepdims), x.dtype)
    rows, axes = as_rows(x, axis, "sum")
    y = matmul(rows, jnp.ones(rows.shape[-1], x.dtype), accumulator=accumulator)
    return jnp.expand_dims(y, axes) if keepdims else y


@checked
def mean(
    x: ArrayLike,
    *,
    axis: Axis = None,
    keepdims: bool = False,
    compute: FloatDType | None = None,
    arithmetic: FormatLike | None = None,
) -> jax.Array:
    """Returns the mean in x's dtype without overflow on the way: in FP16, 65504 for 65504s.

    Of nothing: NaN. Arguments and errors as of :func:`sum`.
    """
    x, wide = _widened(x, compute, "mean", axis, arithmetic)
    if arithmetic is not None:
        return _along(mean_along, mean, x, axis, keepdims, arithmetic)
    return _stored(jnp.mean(wide, axis=axis, keepdims=keepdims), x.dtype)


@checked
def var(
    x: ArrayLike,
    *,
    axis: Axis = None,
    keepdims: bool = False,
    ddof: Natural = 0,
    compute: FloatDType | None = None,
    arithmetic: FormatLike | None = None,
) -> jax.Array:
    """Returns the variance in x's dtype, in two passes, so that a large mean cancels nothing.

    Of nothing (or of ``ddof`` numbers): NaN. Arguments and errors as of :func:`sum`.
    """
    x, wide = _widened(x, compute, "var", axis, arithmetic)
    if arithmetic is not None:
        return _along(var_along, var, x, axis, keepdims, arithmetic, ddof=ddof)
    return _stored(jnp.var(wide, axis=axis, keepdims=keepdims, ddof=ddof), x.dtype)


@checked
def softmax(
    x: ArrayLike,
    *,
    axis: int | tuple[int, ...] = -1,
    compute: FloatDType | None = None,
    arithmetic: FormatLike | None = None,
) -> jax.Array:
    """Returns ``exp(x) / sum(exp(x))`` in x's dtype, computed wide and rounded once.

    A row of minus infinities (all is masked) gives zeros, with a gradient of zero; NaN or an
    infinity among the others gives NaN in its row. Large masks like ``finfo.min`` do no harm: they
    are subtracted in the wider type.

    Args:
        x: float array.
        axis: that sum up to one.
        compute: dtype to compute in. Default: ``functions.COMPUTE`` of x's.
        arithmetic: a format to compute in instead, as of :func:`sum`; exp and log are the format's
            own, correctly rounded for 16 bits and less. Differences from the largest keep what
            their rounding loses.

    Raises:
        TypeError: x isn't a float array.
        ValueError: both compute and arithmetic, or a format there can't be.

    Example:
        >>> import jax.numpy as jnp
        >>> softmax(jnp.asarray([0.0, 0.0, -65504.0, -jnp.inf], jnp.float16)).tolist()
        [0.5, 0.5, 0.0, 0.0]
    """
    x, wide = _widened(x, compute, "softmax", axis, arithmetic)
    if arithmetic is not None:
        return _along(softmax_along, softmax, x, axis, None, arithmetic)
    powers = jnp.exp(wide - _shift(wide, axis))
    total = jnp.sum(powers, axis=axis, keepdims=True)
    return _stored(powers / jnp.where(total == 0, jnp.ones_like(total), total), x.dtype)


@checked
def log_softmax(
    x: ArrayLike,
    *,
    axis: int | tuple[int, ...] = -1,
    compute: FloatDType | None = None,
    arithmetic: FormatLike | None = None,
) -> jax.Array:
    """Returns ``x - logsumexp(x)`` in x's dtype; minus infinity for a row of minus infinities.

    Arguments and errors as of :func:`softmax`.
    """
    x, wide = _widened(x, compute, "log_softmax", axis, arithmetic)
    if arithmetic is not None:
        return _along(log_softmax_along, log_softmax, x, axis, None, arithmetic)
    shifted = wide - _shift(wide, axis)
    total = jnp.sum(jnp.exp(shifted), axis=axis, keepdims=True)
    logarithm = jnp.log(jnp.where(total == 0, jnp.ones_like(total), total))
    return _stored(shifted - logarithm, x.dtype)


@checked
def logsumexp(
    x: ArrayLike,
    *,
    axis: Axis = -1,
    keepdims: bool = False,
    compute: FloatDType | None = None,
    arithmetic: FormatLike | None = None,
) -> jax.Array:
    """Returns ``log(sum(exp(x)))`` in x's dtype; minus infinity for none or minus infinities.

    Arguments and errors as of :func:`softmax`.
    """
    x, wide = _widened(x, compute, "logsumexp", axis, arithmetic)
    if arithmetic is not None:
        return _along(logsumexp_along, logsumexp, x, axis, keepdims, arithmetic)
    return _stored(jax.nn.logsumexp(wide, axis=axis, keepdims=keepdims), x.dtype)


@checked
def cross_entropy(
    logits: ArrayLike, labels: ArrayLike, *, axis: int = -1, compute: FloatDType | None = None
) -> jax.Array:
    """Returns ``logsumexp(logits) - logits[label]``, in the dtype of the computation.

    Args:
        logits: float array.
        labels: integers of the logits' shape without ``axis``. One out of range gives NaN.
        axis: of the classes.
        compute: dtype to compute in, and of the result. Default: ``functions.COMPUTE``.

    Raises:
        TypeError: logits aren't floats or labels aren't integers.
        ValueError: labels of another shape.
    """
    logits, wide = _widened(logits, compute, "cross_entropy", axis)
    labels = jnp.asarray(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"cross_entropy takes integer labels, not {labels.dtype}")
    expected = tuple(np.delete(logits.shape, axis).tolist())
    if labels.shape != expected:
        raise ValueError(
            f"cross_entropy: labels have shape {labels.shape}; expected {expected}, that of the "
            "logits without the classes"
        )
    classes = wide.shape[axis]
    shifted = wide - _shift(wide, axis)
    inside = (labels >= 0) & (labels < classes)
    index = jnp.expand_dims(jnp.where(inside, labels, 0), axis)
    chosen = jnp.squeeze(jnp.take_along_axis(shifted, index, axis=axis), axis)
    loss = jnp.log(jnp.sum(jnp.exp(shifted), axis=axis)) - chosen
    return jnp.where(inside, loss, np.asarray(np.nan, wide.dtype))


def _widened(
    x: ArrayLike, compute: FloatDType | None, name: str, axis: Axis, *others: object
) -> tuple[jax.Array, jax.Array]:
    x = float_array(x, name)
    checked_axes(name, axis, x.ndim)
    if len([way for way in (compute, *others) if way is not None]) > 1:
        raise ValueError(
            f"{name}: compute, arithmetic and accumulator exclude each other; give one"
        )
    return x, x.astype(COMPUTE[x.dtype] if compute is None else compute)


def _along(
    along: Callable[..., jax.Array],
    exact: Callable[..., jax.Array],
    x: jax.Array,
    axis: Axis,
    keepdims: bool | None,
    fmt: FormatLike,
    **options: Hashable,
) -> jax.Array:
    """Computes a function in one format along axes; ``keepdims=None``: it keeps the shape."""
    rows, axes = as_rows(x, axis, exact.__name__)
    y = in_one_format(along, exact, fmt, rows, **options)
    if keepdims is None:
        kept = tuple(a for a in range(x.ndim) if a not in axes)
        moved = y.reshape([x.shape[a] for a in (*kept, *axes)])
        return jnp.moveaxis(moved, range(-len(axes), 0), axes)
    return jnp.expand_dims(y, axes) if keepdims else y


def _stored(y: jax.Array, dtype: DTypeLike) -> jax.Array:
    if y.dtype == dtype or y.dtype.itemsize < 4:
        return y.astype(dtype)
    return round_to(y, format_(dtype)).astype(dtype)


def _shift(x: jax.Array, axis: Axis) -> jax.Array:
    """Returns the largest element along the axis, 0 if it isn't finite; not differentiated."""
    largest = jnp.max(x, axis=axis, keepdims=True, initial=-np.inf)
    return jax.lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, jnp.zeros_like(largest)))
