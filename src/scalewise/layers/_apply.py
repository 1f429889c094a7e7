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
    """Returns a layer norm (centred), or an RMS norm and a bias, in a format's arithmetic."""
    arithmetic = x.dtype if arithmetic is None else arithmetic
    x = x.astype(dtype)
    if centred:
        return layer_norm(x, weight, bias, eps=eps, axis=axis, arithmetic=arithmetic)
    return rms_norm(x, weight, bias, eps=eps, axis=axis, arithmetic=arithmetic)


def single_axis(name: str, reduction_axes: Axes, feature_axes: Axes, ndim: int) -> int:
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
