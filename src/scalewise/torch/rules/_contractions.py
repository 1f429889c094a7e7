"""Matrix products, convolutions and attention."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._registry import rule
from .._torch import torch
from ._activations import safe_softmax

A = torch.ops.aten

rule(A.mm.default, A.mv.default, A.dot.default)(lambda x, y: jnp.matmul(x, y))


@rule(A.bmm.default)
def bmm(x, y):
    return lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,))))


@rule(A.matmul.default)
def matmul(x, y):
    """As torch has it: leading axes are broadcast."""
    if x.ndim > 2 and y.ndim > 2:
        batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        x, y = (jnp.broadcast_to(v, batch + v.shape[-2:]) for v in (x, y))
        axes = tuple(range(len(batch)))
        return lax.dot_general(x, y, (((x.ndim - 1,), (y.ndim - 2,)), (axes, axes)))
    if y.ndim <= 2:
        return lax.dot_general(x, y, (((x.ndim - 1,), (max(y.ndim - 2, 0),)), ((), ())))
    return jnp.matmul(x, y)


@rule(A.linear.default)
def linear(x, weight, bias=None):
    y = lax.dot_general(x, weight, (((x.ndim - 1,), (weight.ndim - 1,)), ((), ())))
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


@rule(A.addmm.default)
def addmm(x, a, b, beta=1, alpha=1):
    y = jnp.matmul(a, b)
    y = y if alpha == 1 else y * alpha
    x = x.reshape((1,) * (2 - x.ndim) + x.shape)
    return y + (x if beta == 1 else x * beta)


@rule(A.baddbmm.default)
def baddbmm(x, a, b, beta=1, alpha=1):
    y = bmm(a, b)
    y = y if alpha == 1 else y * alpha
    if beta == 0:
        return y
    x = x.reshape((1,) * (3 - x.ndim) + x.shape)
    return y + (x if beta == 1 else x * beta)


@rule(A.convolution.default)
def convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    n = weight.ndim - 2
    stride, padding, dilation, output_padding = (
        tuple(v) * n if len(v) == 1 else tuple(v)
        for v in (stride, padding, dilation, output_padding)
    )
    if transposed:
        y = _transposed(x, weight, stride, padding, dilation, output_padding, groups)
    else:
        y = lax.conv_general_dilated(
            x, weight, stride, [(p, p) for p in padding], rhs_dilation=dilation,
            feature_group_count=groups,
        )  # fmt: skip
    return y if bias is None else y + bias.reshape((1, -1) + (1,) * n)


def _transposed(x, weight, stride, padding, dilation, output_padding, groups):
    """Returns a transposed convolution: a convolution of x with zeros between its elements."""
    n = weight.ndim - 2
    inputs, outputs, *kernel = weight.shape
    weight = weight.reshape(groups, inputs // groups, outputs, *kernel)
    weight = jnp.swapaxes(weight, 1, 2).reshape(groups * outputs, inputs // groups, *kernel)
    weight = lax.rev(weight, tuple(range(2, 2 + n)))
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    pads = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)]
    return lax.conv_general_dilated(
        x, weight, (1,) * n, pads, lhs_dilation=stride, rhs_dilation=dilation,
        feature_group_count=groups,
    )  # fmt: skip


@rule(A.scaled_dot_product_attention.default)
def attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    if dropout_p:
        raise NotImplementedError(
            "scaled_dot_product_attention with dropout: call model.eval(), or set the attention's "
            "dropout to 0"
        )
    if enable_gqa:
        key, value = (jnp.repeat(v, query.shape[-3] // v.shape[-3], -3) for v in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = matmul(query, jnp.swapaxes(key, -1, -2)) * scale
    if is_causal:
        rows, columns = scores.shape[-2:]
        attn_mask = jnp.tril(jnp.ones((rows, columns), jnp.bool_))
    if attn_mask is not None:
        attn_mask = jnp.broadcast_to(attn_mask, scores.shape)
        if attn_mask.dtype == jnp.bool_:
            scores = jnp.where(attn_mask, scores, jnp.full_like(scores, -jnp.inf))
        else:
            scores = scores + attn_mask.astype(scores.dtype)
    return matmul(safe_softmax(scores, -1), value)


@rule(A._grouped_mm.default)
def grouped_mm(x, weight, offs=None, bias=None, out_dtype=None):
    """Products of consecutive rows of x with one matrix each; ``offs`` are the groups' ends."""
    if offs is None or x.ndim != 2 or weight.ndim != 3:
        raise NotImplementedError("grouped_mm of other operands than rows and stacked matrices")
    sizes = jnp.diff(offs.astype(jnp.int32), prepend=jnp.zeros(1, jnp.int32))
    y = lax.ragged_dot(x, weight, sizes)
    assert isinstance(y, jax.Array)
    return y
