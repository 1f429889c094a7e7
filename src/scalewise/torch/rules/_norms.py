"""Normalization layers that torch doesn't decompose; see ``_decomposed`` for the others."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax

from .._registry import RULES, rule
from .._torch import aten

A = aten


@rule(A.rms_norm.default)
def rms_norm(x, normalized_shape, weight=None, eps=None):
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    eps = jnp.finfo(x.dtype).eps.item() if eps is None else eps
    mean = jnp.sum(lax.square(x), axes, keepdims=True) / math.prod(normalized_shape)
    y = x * lax.rsqrt(mean + eps)
    return y if weight is None else y * weight.reshape((1,) * (x.ndim - weight.ndim) + weight.shape)


@rule(A._native_batch_norm_legit.default)
def batch_norm(*args):
    """Without the updates of the statistics, which torch writes into its operands."""
    return RULES[A._native_batch_norm_legit_functional.default](*args)[:3]
