"""``LayerNorm`` and ``RMSNorm`` for Flax Linen, computed in one format's arithmetic."""

from __future__ import annotations

from functools import partial

import jax

from .._extras import imported
from ..formats import FormatLike
from ._apply import Parameters, flax_norm

with imported("flax", "scalewise.layers.linen"):
    import flax.linen as nn


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
        return flax_norm(self, x, mask, partial(_parameters, self), centred=True)


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` in which every intermediate is a number of one format.

    Attributes:
        arithmetic: as for :class:`LayerNorm`.
    """

    arithmetic: FormatLike | None = None

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        return flax_norm(self, x, mask, partial(_parameters, self), centred=False)


def _parameters(layer: LayerNorm | RMSNorm, n: int) -> Parameters:
    weight = bias = None
    if layer.use_scale:
        weight = layer.param("scale", layer.scale_init, (n,), layer.param_dtype)
    if isinstance(layer, LayerNorm) and layer.use_bias:
        bias = layer.param("bias", layer.bias_init, (n,), layer.param_dtype)
    return weight, bias
