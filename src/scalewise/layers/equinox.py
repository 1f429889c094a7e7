"""``LayerNorm`` and ``RMSNorm`` for Equinox, computed in one format's arithmetic."""

from __future__ import annotations

from typing import Any

import jax

from .._extras import imported
from ..formats import FormatLike
from ._apply import normalised

with imported("equinox", "scalewise.layers.equinox"):
    import equinox as eqx


class _InOneFormat(eqx.Module):
    arithmetic: Any = eqx.field(static=True, default=None)

    def __init__(self, *args: Any, arithmetic: FormatLike | None = None, **options: Any):
        super().__init__(*args, **options)
        self.arithmetic = arithmetic

    def __call__(self, x: jax.Array, *state: Any, key: jax.Array | None = None) -> Any:
        layer: Any = self
        if x.shape != layer.shape:
            raise ValueError(
                f"{type(self).__name__}: x has shape {x.shape}; expected {layer.shape}. "
                "Use jax.vmap over other axes"
            )
        weight, bias = (None if p is None else p.reshape(-1) for p in (layer.weight, layer.bias))
        centred = isinstance(self, eqx.nn.LayerNorm)
        y = normalised(
            x.reshape(-1), (weight, bias), centred=centred, eps=layer.eps, axis=0,
            arithmetic=self.arithmetic, dtype=x.dtype,
        ).reshape(x.shape)  # fmt: skip
        return (y, *state) if state else y


class LayerNorm(_InOneFormat, eqx.nn.LayerNorm):
    """``eqx.nn.LayerNorm`` in which every intermediate is a number of one format.

    The error is that of :func:`scalewise.ops.layer_norm`, whatever the size of the input.

    Args:
        shape, eps, use_weight, use_bias, dtype: as for ``eqx.nn.LayerNorm``.
        arithmetic: the format, by default that of the input's dtype.
    """


class RMSNorm(_InOneFormat, eqx.nn.RMSNorm):
    """``eqx.nn.RMSNorm`` in which every intermediate is a number of one format.

    Args:
        shape, eps, use_weight, use_bias, dtype, arithmetic: as for :class:`LayerNorm`.
    """
