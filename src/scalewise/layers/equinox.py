"""``LayerNorm`` and ``RMSNorm`` for Equinox, computed in one format's arithmetic."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax

from ..formats import FormatLike
from ._apply import normalised


class LayerNorm(eqx.nn.LayerNorm):
    """``eqx.nn.LayerNorm`` in which every intermediate is a number of one format.

    The error is that of :func:`scalewise.ops.layer_norm`, whatever the size of the input.

    Args:
        shape, eps, use_weight, use_bias, dtype: as for ``eqx.nn.LayerNorm``.
        arithmetic: the format, by default that of the input's dtype.
    """

    arithmetic: Any = eqx.field(static=True, default=None)

    def __init__(self, *args: Any, arithmetic: FormatLike | None = None, **options: Any):
        super().__init__(*args, **options)
        self.arithmetic = arithmetic

    def __call__(self, x: jax.Array, *state: Any, key: jax.Array | None = None) -> Any:
        return _call(self, x, state, centred=True)


class RMSNorm(eqx.nn.RMSNorm):
    """``eqx.nn.RMSNorm`` in which every intermediate is a number of one format.

    Args:
        shape, eps, use_weight, use_bias, dtype, arithmetic: as for :class:`LayerNorm`.
    """

    arithmetic: Any = eqx.field(static=True, default=None)

    def __init__(self, *args: Any, arithmetic: FormatLike | None = None, **options: Any):
        super().__init__(*args, **options)
        self.arithmetic = arithmetic

    def __call__(self, x: jax.Array, *state: Any, key: jax.Array | None = None) -> Any:
        return _call(self, x, state, centred=False)


def _call(layer: Any, x: jax.Array, state: tuple[Any, ...], *, centred: bool) -> Any:
    if x.shape != layer.shape:
        raise ValueError(
            f"{type(layer).__name__}: x has shape {x.shape}; expected {layer.shape}. "
            "Use jax.vmap over other axes"
        )
    weight, bias = (None if p is None else p.reshape(-1) for p in (layer.weight, layer.bias))
    y = normalised(
        x.reshape(-1),
        weight,
        bias,
        centred=centred,
        eps=layer.eps,
        axis=0,
        arithmetic=layer.arithmetic,
        dtype=x.dtype,
    ).reshape(x.shape)
    return (y, *state) if state else y
