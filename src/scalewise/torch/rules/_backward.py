"""Gradients that torch computes by operations of their own."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from .._registry import RULES, rule, rules
from .._torch import torch
from ._promotion import ranked

A = torch.ops.aten


def _pulled(function, gradient, *arrays):
    y, pull = jax.vjp(function, *arrays)
    return pull(gradient.astype(y.dtype))


def _masked(gradients, mask):
    return tuple(g if wanted else None for g, wanted in zip(gradients, mask, strict=True))


@rule(A.max_pool2d_with_indices_backward.default)
def max_pool2d_backward(gradient, x, kernel, stride, padding, dilation, ceil_mode, indices):
    """Each gradient is added at its maximum, which ``indices`` give as positions in the image."""
    lead, size = x.shape[:-2], math.prod(x.shape[-2:])
    images = math.prod(lead)
    out = jnp.zeros((images, size), x.dtype)
    at = np.arange(images)[:, None], indices.reshape(images, -1)
    return out.at[at].add(gradient.astype(x.dtype).reshape(images, -1)).reshape(x.shape)


@rule(A.convolution_backward.default)
def convolution_backward(
    gradient, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
    mask,
):  # fmt: skip
    convolution = RULES[A.convolution.default]
    options = stride, padding, dilation, transposed, output_padding, groups

    def function(x, weight):
        return convolution(x, weight, None, *options)

    bias = jnp.sum(gradient, (0, *range(2, gradient.ndim)))
    return _masked((*_pulled(function, gradient, x, weight), bias), mask)


@rule(A.embedding_dense_backward.default)
def embedding_dense_backward(gradient, index, rows, padding_idx, scale_grad_by_freq):
    index = index.reshape(-1)
    gradient = gradient.reshape(index.size, -1)
    kept = (index != padding_idx).astype(gradient.dtype)
    gradient = gradient * kept[:, None]
    if scale_grad_by_freq:
        counts = jnp.zeros(rows, gradient.dtype).at[index].add(1)
        gradient = gradient / counts[index][:, None]
    return jnp.zeros((rows, gradient.shape[-1]), gradient.dtype).at[index].add(gradient)


def _norm_backward(gradient, standard, rstd, axes):
    """Returns the gradient of x, of which ``standard`` has mean 0 and variance 1 over axes."""
    n = math.prod(standard.shape[a] for a in axes)
    mean = jnp.sum(gradient, axes, keepdims=True) / n
    along = jnp.sum(gradient * standard, axes, keepdims=True) / n
    return (gradient - mean - standard * along) * rstd


@rule(A.native_layer_norm_backward.default)
def native_layer_norm_backward(gradient, x, normalized_shape, mean, rstd, weight, bias, mask):
    first = x.ndim - len(normalized_shape)
    standard = (x - mean) * rstd
    inner = gradient if weight is None else gradient * ranked(weight, x)[0]
    moved = _norm_backward(inner, standard, rstd, tuple(range(first, x.ndim)))
    lead = tuple(range(first))
    return _masked((moved, jnp.sum(gradient * standard, lead), jnp.sum(gradient, lead)), mask)


@rule(A.native_group_norm_backward.default)
def native_group_norm_backward(
    gradient, x, mean, rstd, weight, batch, channels, size, groups, mask
):
    shape = batch, groups, channels // groups, size
    mean, rstd = mean.reshape(batch, groups, 1, 1), rstd.reshape(batch, groups, 1, 1)
    standard = (x.reshape(shape) - mean) * rstd
    given = gradient.reshape(shape)
    inner = given if weight is None else given * weight.reshape(1, groups, -1, 1)
    moved = _norm_backward(inner, standard, rstd, (2, 3)).reshape(x.shape)
    weights = jnp.sum(given * standard, (0, 3)).reshape(channels)
    return _masked((moved, weights, jnp.sum(given, (0, 3)).reshape(channels)), mask)


rules({
    A._adaptive_avg_pool2d_backward.default: lambda gradient, x: _pulled(
        lambda x: RULES[A._adaptive_avg_pool2d.default](x, gradient.shape[-2:]), gradient, x)[0],
    A.avg_pool2d_backward.default: lambda gradient, x, *options: _pulled(
        lambda x: RULES[A.avg_pool2d.default](x, *options), gradient, x)[0],
})  # fmt: skip
