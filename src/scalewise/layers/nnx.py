"""``LayerNorm`` and ``RMSNorm`` for Flax NNX, computed in one format's arithmetic."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from ..formats import FormatLike
from ._apply import normalised, refuse, result_dtype, single_axis


class LayerNorm(nnx.LayerNorm):
    """``nnx.LayerNorm`` in which every intermediate is a number of one format.

    The error is that of :func:`scalewise.ops.layer_norm`, whatever the size of the input.

    Args:
        num_features: as for ``nnx.LayerNorm``.
        arithmetic: the format, by default that of the input's dtype.
        options: of ``nnx.LayerNorm``. ``axis_name`` and several reduction axes aren't supported;
            ``use_fast_variance`` has no effect.
    """

    def __init__(self, num_features: int, *, arithmetic: FormatLike | None = None, **options: Any):
        super().__init__(num_features, **options)
        self.arithmetic = arithmetic

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        return _call(self, x, mask, centred=True)


class RMSNorm(nnx.RMSNorm):
    """``nnx.RMSNorm`` in which every intermediate is a number of one format.

    Args:
        num_features, arithmetic, options: as for :class:`LayerNorm`.
    """

    def __init__(self, num_features: int, *, arithmetic: FormatLike | None = None, **options: Any):
        super().__init__(num_features, **options)
        self.arithmetic = arithmetic

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        return _call(self, x, mask, centred=False)


def _call(
    layer: LayerNorm | RMSNorm, x: jax.Array, mask: jax.Array | None, *, centred: bool
) -> jax.Array:
    name = type(layer).__name__
    refuse(name, mask=mask, axis_name=layer.axis_name, axis_index_groups=layer.axis_index_groups)
    weight = layer.scale[...] if layer.scale is not None else None
    bias = getattr(layer, "bias", None)
    bias = bias[...] if bias is not None else None
    return normalised(
        x,
        weight,
        bias,
        centred=centred,
        eps=layer.epsilon,
        axis=single_axis(name, layer.reduction_axes, layer.feature_axes, x.ndim),
        arithmetic=layer.arithmetic,
        dtype=result_dtype(x, weight, bias, dtype=layer.dtype),
    )
