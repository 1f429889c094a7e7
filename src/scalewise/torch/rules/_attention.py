"""Attention, as torch's fused kernels compute it in 16 bits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from .._operation import operation
from .._registry import STAGED
from .._torch import aten
from ._creation import dropped, kept, random_rule

A = aten


@dataclasses.dataclass(frozen=True)
class Scores:
    """Products of queries and keys times ``scale``, and -inf where a query may not look."""

    scale: float
    is_causal: bool

    def __call__(self, query: Any, key: Any, *masks: Any) -> Any:
        scores = jnp.matmul(query, jnp.swapaxes(key, -1, -2)) * self.scale
        if self.is_causal:
            masks = (jnp.tril(jnp.ones(scores.shape[-2:], jnp.bool_)),)
        for mask in masks:
            mask = jnp.broadcast_to(mask, scores.shape)
            if mask.dtype == jnp.bool_:
                scores = jnp.where(mask, scores, jnp.full_like(scores, -jnp.inf))
            else:
                scores = scores + mask.astype(scores.dtype)
        return scores


def _exponentials(scores: Any) -> Any:
    """Returns exp(scores - their maximum); 0 for a query that may look nowhere."""
    largest = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
    return jnp.exp(scores - jnp.where(jnp.isfinite(largest), largest, jnp.zeros_like(largest)))


@dataclasses.dataclass(frozen=True)
class Weights:
    dropout: float
    position: int

    def __call__(self, scores: Any) -> Any:
        weights = _exponentials(scores)
        if self.dropout:
            some = kept(self.position, 1 - self.dropout, weights.shape)
            weights = dropped(weights, some, self.dropout)
        return weights


def averages(weights: Any, scores: Any, value: Any) -> Any:
    total = jnp.sum(_exponentials(scores), -1, keepdims=True)
    return jnp.matmul(weights, value) / jnp.where(total == 0, jnp.ones_like(total), total)


def _has_dropout(query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
    return dropout_p > 0


@random_rule(A.scaled_dot_product_attention.default, draws=_has_dropout)
def attention(
    position, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
    enable_gqa=False,
):  # fmt: skip
    """Scores are float32; what multiplies the values is rounded to the operands' dtype."""
    if enable_gqa:
        key, value = (jnp.repeat(v, query.shape[-3] // v.shape[-3], -3) for v in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    low = query.dtype
    wide = low if low == jnp.float64 else jnp.dtype(jnp.float32)
    masks = () if attn_mask is None else (attn_mask,)
    (scores,) = operation("attention_scores", Scores(scale, is_causal), [wide], query, key, *masks)
    (weights,) = operation("attention_weights", Weights(dropout_p, position), [low], scores)
    (out,) = operation("attention", averages, [low], weights, scores, value)
    return out


STAGED.add(A.scaled_dot_product_attention.default)
