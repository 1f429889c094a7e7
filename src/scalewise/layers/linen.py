"""``LayerNorm`` and ``RMSNorm`` for Flax Linen, computed in one format's arithmetic."""

from __future__ import annotations

import flax.linen as nn
import jax

from ..formats import FormatLike
from ._apply import normalised, refuse, result_dtype, single_axis


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` in which every intermediate is a number of one format.

    The error is that of :func:`scalewise.ops.layer_norm`, whatever the size of the input.

    Attributes:
        arithmetic: the format, by default that of the input's dtype. All others are those of
            ``nn.LayerNorm``; ``axis_name`` and several reduction axes aren't supported;
            ``use_fast_variance`` and ``force_float32_reductions`` have no effect.
    """

    arithmetic: FormatLike | None = None

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        return _call(self, x, mask, centred=True)


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` in which every intermediate is a number of one format.

    Attributes:
        arithmetic: as for :class:`LayerNorm`.
    """

    arithmetic: FormatLike | None = None

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        return _call(self, x, mask, centred=False)


def _call(
    layer: LayerNorm | RMSNorm, x: jax.Array, mask: jax.Array | None, *, centred: bool
) -> jax.Array:
    name = type(layer).__name__
    refuse(name, mask=mask, axis_name=layer.axis_name, axis_index_groups=layer.axis_index_groups)
    axis = single_axis(name, layer.reduction_axes, layer.feature_axes, x.ndim)
    shape = (x.shape[axis],)
    weight = bias = None
    if layer.use_scale:
        weight = layer.param("scale", layer.scale_init, shape, layer.param_dtype)
    if centred and layer.use_bias:
        bias = layer.param("bias", layer.bias_init, shape, layer.param_dtype)
    return normalised(
        x,
        weight,
        bias,
        centred=centred,
        eps=layer.epsilon,
        axis=axis,
        arithmetic=layer.arithmetic,
        dtype=result_dtype(x, weight, bias, dtype=layer.dtype),
    )
