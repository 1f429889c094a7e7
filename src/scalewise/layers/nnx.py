"""``LayerNorm`` and ``RMSNorm`` for Flax NNX, computed in one format's arithmetic."""

from __future__ import annotations

from typing import Any

import jax

from .._extras import imported
from ..formats import FormatLike
from ._apply import flax_norm

with imported("flax", "scalewise.layers.nnx"):
    from flax import nnx


class _InOneFormat:
    def __init__(self, num_features: int, *, arithmetic: FormatLike | None = None, **options: Any):
        super().__init__(num_features, **options)  # pyright: ignore[reportCallIssue]
        self.arithmetic = arithmetic

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        layer: Any = self
        scale, bias = layer.scale, getattr(layer, "bias", None)
        own = (None if scale is None else scale[...], None if bias is None else bias[...])
        centred = isinstance(self, nnx.LayerNorm)
        return flax_norm(self, x, mask, lambda _: own, centred=centred)


class LayerNorm(_InOneFormat, nnx.LayerNorm):
    """``nnx.LayerNorm`` in which every intermediate is a number of one format.

    The error is that of :func:`scalewise.ops.layer_norm`, whatever the size of the input.

    Args:
        num_features: as for ``nnx.LayerNorm``.
        arithmetic: the format, by default that of the input's dtype.
        options: of ``nnx.LayerNorm``. ``axis_name`` and several reduction axes aren't supported;
            ``use_fast_variance`` has no effect.
    """


class RMSNorm(_InOneFormat, nnx.RMSNorm):
    """``nnx.RMSNorm`` in which every intermediate is a number of one format.

    Args:
        num_features, arithmetic, options: as for :class:`LayerNorm`.
    """
