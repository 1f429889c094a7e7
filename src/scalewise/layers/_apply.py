"""What the layers of all libraries share: the checks of their settings, and the call of ``ops``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..formats import FormatLike
from ..ops import layer_norm, rms_norm

Parameters = tuple[jax.Array | None, jax.Array | None]  # weight and bias


def normalised(
    x: jax.Array,
    parameters: Parameters,
    *,
    centred: bool,
    eps: float,
    axis: int,
    arithmetic: FormatLike | None,
    dtype: DTypeLike,
) -> jax.Array:
    """Returns a layer norm (centred), or an RMS norm and a bias, in a format's arithmetic."""
    if arithmetic is None and x.dtype != dtype:
        arithmetic = x.dtype
    norm = layer_norm if centred else rms_norm
    return norm(x.astype(dtype), *parameters, eps=eps, axis=axis, arithmetic=arithmetic)


def flax_norm(
    layer: Any,
    x: jax.Array,
    mask: jax.Array | None,
    parameters: Callable[[int], Parameters],
    *,
    centred: bool,
) -> jax.Array:
    """Calls a layer of Flax, whose ``parameters`` are given the number of features."""
    name = type(layer).__name__
    options = {"mask": mask} | {o: getattr(layer, o) for o in ("axis_name", "axis_index_groups")}
    for option, value in options.items():
        if value is not None:
            raise ValueError(f"{name}: {option} is set; expected None, which is all it supports")
    axis = _single_axis(name, layer.reduction_axes, layer.feature_axes, x.ndim)
    own = parameters(x.shape[axis])
    dtype = layer.dtype
    if dtype is None:
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.result_type(x, *[p for p in own if p is not None])
    return normalised(
        x, own, centred=centred, eps=layer.epsilon, axis=axis, arithmetic=layer.arithmetic,
        dtype=dtype,
    )  # fmt: skip


def _single_axis(
    name: str, reduction_axes: int | Sequence[int], feature_axes: int | Sequence[int], ndim: int
) -> int:
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
