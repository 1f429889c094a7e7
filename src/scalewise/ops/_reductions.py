"""Reductions and softmax on narrow types: read narrow, computed wide, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._check import Natural, checked, checked_axes
from .._resolve import as_format
from ..formats import FloatDType, FormatLike
from ..rounding import float_array
from ._arithmetic import Arithmetic, Axis, as_rows
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
from ._operation import operation
from .functions import COMPUTE, rounded_once


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
    if accumulator is None:
        return _operation(
            "sum", sum_along, jnp.sum, x, axis, compute, arithmetic, keepdims=keepdims
        )
    x, axis = _checked(x, "sum", axis, compute, arithmetic, accumulator)
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
    return _operation("mean", mean_along, jnp.mean, x, axis, compute, arithmetic, keepdims=keepdims)


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
    options = {"keepdims": keepdims, "ddof": ddof}
    return _operation("var", var_along, _var, x, axis, compute, arithmetic, **options)


def _var(x: jax.Array, *, axis: Axis, ddof: int, keepdims: bool = False) -> jax.Array:
    return jnp.var(x, axis=axis, keepdims=keepdims, correction=float(ddof))


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
        axis: the axis along which the results sum to one.
        compute: dtype to compute in. Default: ``functions.COMPUTE`` of x's.
        arithmetic: a format to compute in instead, as of :func:`sum`; exp and log are the format's
            own, correctly rounded for 16 bits and less. Differences from the largest keep what
            their rounding loses.

    Raises:
        TypeError: x isn't a float array.
        ValueError: both compute and arithmetic, or an unsupported format.

    Example:
        >>> import jax.numpy as jnp
        >>> softmax(jnp.asarray([0.0, 0.0, -65504.0, -jnp.inf], jnp.float16)).tolist()
        [0.5, 0.5, 0.0, 0.0]
    """
    return _operation("softmax", softmax_along, _softmax, x, axis, compute, arithmetic)


def _softmax(wide: jax.Array, *, axis: Axis) -> jax.Array:
    powers = jnp.exp(wide - _shift(wide, axis))
    total = jnp.sum(powers, axis=axis, keepdims=True)
    return powers / jnp.where(total == 0, jnp.ones_like(total), total)


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
    return _operation("log_softmax", log_softmax_along, _log_softmax, x, axis, compute, arithmetic)


def _log_softmax(wide: jax.Array, *, axis: Axis) -> jax.Array:
    shifted = wide - _shift(wide, axis)
    total = jnp.sum(jnp.exp(shifted), axis=axis, keepdims=True)
    logarithm = jnp.log(jnp.where(total == 0, jnp.ones_like(total), total))
    return shifted - logarithm


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
    options = {"keepdims": keepdims}
    return _operation(
        "logsumexp", logsumexp_along, jax.nn.logsumexp, x, axis, compute, arithmetic, **options
    )


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
    logits, (axis,) = _checked(logits, "cross_entropy", axis)
    labels = jnp.asarray(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"cross_entropy takes integer labels, not {labels.dtype}")
    expected = tuple(np.delete(logits.shape, axis).tolist())
    if labels.shape != expected:
        raise ValueError(
            f"cross_entropy: labels have shape {labels.shape}; expected {expected}, that of the "
            "logits without the classes"
        )
    own = None if compute is None else np.dtype(compute)
    return operation(
        "cross_entropy", _cross_entropy, logits, labels, axis=axis, compute=own,
        out=own or COMPUTE[logits.dtype],
    )  # fmt: skip


def _cross_entropy(
    logits: jax.Array, labels: jax.Array, *, axis: int, compute: np.dtype | None
) -> jax.Array:
    wide = logits.astype(COMPUTE[logits.dtype] if compute is None else compute)
    classes = wide.shape[axis]
    shifted = wide - _shift(wide, axis)
    inside = (labels >= 0) & (labels < classes)
    index = jnp.expand_dims(jnp.where(inside, labels, 0), axis)
    chosen = jnp.squeeze(jnp.take_along_axis(shifted, index, axis=axis), axis)
    loss = jnp.log(jnp.sum(jnp.exp(shifted), axis=axis)) - chosen
    return jnp.where(inside, loss, np.asarray(np.nan, wide.dtype))


def _operation(
    name: str,
    along: Callable[..., jax.Array],
    wide: Callable[..., jax.Array],
    x: ArrayLike,
    axis: Axis,
    compute: FloatDType | None,
    arithmetic: FormatLike | None,
    **options: Any,
) -> jax.Array:
    """Computes a function in one format along axes, or in a wide dtype."""
    x, axis = _checked(x, name, axis, compute, arithmetic)
    if arithmetic is None:
        own = None if compute is None else np.dtype(compute)
        return operation(name, rounded_once, x, of=wide, axis=axis, compute=own, **options)
    fmt = as_format(arithmetic, name)
    if not fmt.signed or not fmt.zero:
        raise ValueError(f"{name}: {fmt.name} has no sign or no zero; expected a signed format")
    Arithmetic(fmt)  # refuses what it can't compute in
    return operation(
        name, in_one_format, x, along=along, exact=wide, arithmetic=fmt, axis=axis, **options
    )


def _checked(
    x: ArrayLike, name: str, axis: Axis, *ways: object
) -> tuple[jax.Array, tuple[int, ...]]:
    x = float_array(x, name)
    axes = checked_axes(name, axis, x.ndim)
    if len([way for way in ways if way is not None]) > 1:
        raise ValueError(
            f"{name}: compute, arithmetic and accumulator exclude each other; give one"
        )
    return x, axes


def _shift(x: jax.Array, axis: Axis) -> jax.Array:
    """Returns the largest element along the axis, 0 if it isn't finite; not differentiated."""
    largest = jnp.max(x, axis=axis, keepdims=True, initial=-np.inf)
    return jax.lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, jnp.zeros_like(largest)))
