"""What the layers of all libraries share: the checks of their settings, and the call of ``ops``."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..formats import FormatLike
from ..ops import layer_norm, rms_norm

Axes = int | Sequence[int]


def normalised(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    *,
    centred: bool,
    eps: float,
    axis: int,
    arithmetic: FormatLike | None,
    dtype: DTypeLike,
) -> jax.Array:
    """Returns a layer norm, or an RMS norm and a bias, in a format's arithmetic.

    Args:
        x, weight, bias, eps, axis: as for :func:`scalewise.ops.layer_norm`.
        centred: whether the mean is subtracted.
        arithmetic: of every intermediate; None for x's own format.
        dtype: of the result.
    """
    arithmetic = x.dtype if arithmetic is None else arithmetic
    x = x.astype(dtype)
    if centred:
        return layer_norm(x, weight, bias, eps=eps, axis=axis, arithmetic=arithmetic)
    return rms_norm(x, weight, bias, eps=eps, axis=axis, arithmetic=arithmetic)


def single_axis(name: str, reduction_axes: Axes, feature_axes: Axes, ndim: int) -> int:
    """Returns the one axis that a Flax layer reduces, which has to be that of its features.

    Raises:
        ValueError: several axes, or another axis of features.
    """
    axes = [
        {a % ndim for a in ((axis,) if isinstance(axis, int) else axis)}
        for axis in (reduction_axes, feature_axes)
    ]
    if len(axes[0]) != 1 or axes[0] != axes[1]:
        raise ValueError(
            f"{name}: reduction_axes={reduction_axes!r} and feature_axes={feature_axes!r}; "
            "expected one axis, the same for both"
        )
    return axes[0].pop()


def refuse(name: str, **options: object) -> None:
    """Raises ValueError if an option that the arithmetic of one format has no part for is set."""
    for option, value in options.items():
        if value is not None:
            raise ValueError(f"{name}: {option} is set; expected None, which is all it supports")


def result_dtype(
    x: jax.Array, *parameters: jax.Array | None, dtype: DTypeLike | None = None
) -> DTypeLike:
    """Returns the dtype that Flax gives a result: ``dtype``, else that of x and the parameters."""
    if dtype is not None:
        return dtype
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(x, *[p for p in parameters if p is not None])
