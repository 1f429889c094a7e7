"""Matrix products, convolutions and attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .._registry import rule, rules
from .._torch import aten

A = aten


@rule(A.linear.default)
def linear(x, weight, bias=None):
    y = lax.dot_general(x, weight, (((x.ndim - 1,), (weight.ndim - 1,)), ((), ())))
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


def _added(x, y, beta, alpha):
    """Returns beta x + alpha y; x isn't read if beta is 0."""
    y = y if alpha == 1 else y * alpha
    if beta == 0:
        return y
    x = x.reshape((1,) * (y.ndim - x.ndim) + x.shape)
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


@rule(A.convolution_backward.default)
def convolution_backward(gradient, x, weight, bias_sizes, *options):
    *options, mask = options
    _, pull = jax.vjp(lambda x, weight: convolution(x, weight, None, *options), x, weight)
    found = *pull(gradient), jnp.sum(gradient, (0, *range(2, gradient.ndim)))
    return tuple(g if wanted else None for g, wanted in zip(found, mask, strict=True))


def _transposed(x, weight, stride, padding, dilation, output_padding, groups):
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


@rule(A._trilinear.default)
def trilinear(x, y, z, expand_x, expand_y, expand_z, sum_dims, unroll_dim=1):
    pairs = (x, expand_x), (y, expand_y), (z, expand_z)
    x, y, z = (jnp.expand_dims(v, tuple(new)) for v, new in pairs)
    return jnp.sum(x * y * z, tuple(sum_dims))


@rule(A._grouped_mm.default)
def grouped_mm(x, weight, offs=None, bias=None, out_dtype=None):
    """Products of consecutive rows of x with one matrix each; ``offs`` are the groups' ends."""
    if offs is None or x.ndim != 2 or weight.ndim != 3:
        raise NotImplementedError("grouped_mm of other operands than rows and stacked matrices")
    sizes = jnp.diff(offs.astype(jnp.int32), prepend=jnp.zeros(1, jnp.int32))
    y = lax.ragged_dot(x, weight, sizes)
    assert isinstance(y, jax.Array)
    return y


rules({
    (A.mm.default, A.mv.default, A.dot.default, A.bmm.default, A.matmul.default): (
        lambda x, y: jnp.matmul(x, y)),
    (A.mm.dtype, A.bmm.dtype): lambda x, y, dtype: jnp.matmul(x, y),
    (A.addmm.default, A.addmv.default): lambda x, a, b, beta=1, alpha=1: (
        _added(x, jnp.matmul(a, b), beta, alpha)),
    A.addr.default: lambda x, a, b, beta=1, alpha=1: _added(x, a[:, None] * b[None], beta, alpha),
    A.baddbmm.default: lambda x, a, b, beta=1, alpha=1: _added(x, jnp.matmul(a, b), beta, alpha),
    A.addbmm.default: lambda x, a, b, beta=1, alpha=1: (
        _added(x, lax.dot_general(a, b, (((0, 2), (0, 1)), ((), ()))), beta, alpha)),
})  # fmt: skip
