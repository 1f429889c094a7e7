"""Normalization layers."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax

from .._registry import rule, rules
from .._torch import aten

A = aten


def _standardized(x, axes, eps):
    n = math.prod(x.shape[a] for a in axes)
    mean = jnp.sum(x, axes, keepdims=True) / n
    centred = x - mean
    rstd = lax.rsqrt(jnp.sum(lax.square(centred), axes, keepdims=True) / n + eps)
    return centred * rstd, mean, rstd


def _affine(x, weight, bias, shape):
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


@rule(A.native_layer_norm.default)
def native_layer_norm(x, normalized_shape, weight, bias, eps):
    n = len(normalized_shape)
    y, mean, rstd = _standardized(x, tuple(range(x.ndim - n, x.ndim)), eps)
    return _affine(y, weight, bias, (1,) * (x.ndim - n) + tuple(normalized_shape)), mean, rstd


@rule(A.rms_norm.default)
def rms_norm(x, normalized_shape, weight=None, eps=None):
    n = len(normalized_shape)
    axes = tuple(range(x.ndim - n, x.ndim))
    eps = jnp.finfo(x.dtype).eps.item() if eps is None else eps
    mean = jnp.sum(lax.square(x), axes, keepdims=True) / math.prod(normalized_shape)
    return _affine(x * lax.rsqrt(mean + eps), weight, None, (1,) * (x.ndim - n) + weight.shape
                   if weight is not None else ())  # fmt: skip


@rule(A.native_group_norm.default)
def native_group_norm(x, weight, bias, batch, channels, size, groups, eps):
    y, mean, rstd = _standardized(x.reshape(batch, groups, -1), (2,), eps)
    shape = (1, channels) + (1,) * (x.ndim - 2)
    y = _affine(y.reshape(x.shape), weight, bias, shape)
    return y, mean.reshape(batch, groups), rstd.reshape(batch, groups)


def _batch_norm(x, weight, bias, mean, variance, training, momentum, eps):
    """Without the updates of the statistics, which torch writes into its operands."""
    shape = (1, -1) + (1,) * (x.ndim - 2)
    if training:
        y, mean, rstd = _standardized(x, (0, *range(2, x.ndim)), eps)
        return _affine(y, weight, bias, shape), mean.reshape(-1), rstd.reshape(-1)
    y = (x - mean.reshape(shape)) * lax.rsqrt(variance + eps).reshape(shape)
    return _affine(y, weight, bias, shape), *(jnp.zeros(0, x.dtype) for _ in range(2))


@rule(A._native_batch_norm_legit_functional.default)
def batch_norm_training(x, weight, bias, mean, variance, training, momentum, eps):
    y, own, rstd = _batch_norm(x, weight, bias, mean, variance, True, momentum, eps)
    n = x.size // x.shape[1]
    unbiased = (1 / lax.square(rstd) - eps) * (n / max(n - 1, 1))
    mean = mean * (1 - momentum) + own * momentum
    variance = variance * (1 - momentum) + unbiased * momentum
    return y, own, rstd, mean, variance


rules({
    A.layer_norm.default: lambda x, shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True: (
        native_layer_norm(x, shape, weight, bias, eps)[0]),
    A.group_norm.default: lambda x, groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True: (
        native_group_norm(x, weight, bias, *x.shape[:2], math.prod(x.shape[2:]), groups, eps)[0]),
    A._native_batch_norm_legit.default: _batch_norm,
    A._native_batch_norm_legit_no_training.default: lambda x, weight, bias, mean, variance, *rest: (
        _batch_norm(x, weight, bias, mean, variance, False, *rest)),
    A._native_batch_norm_legit.no_stats: lambda x, weight, bias, training, *rest: (
        _batch_norm(x, weight, bias, None, None, True, *rest)),
})  # fmt: skip
