"""Activations and softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._registry import rule, rules
from .._torch import aten, torch
from ._promotion import as_array, as_dtype, axes_of

A = aten


@rule(A.gelu.default)
def gelu(x, approximate="none"):
    if approximate == "tanh":
        inner = np.sqrt(2 / np.pi).item() * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1 + jnp.tanh(inner))
    return 0.5 * x * (1 + lax.erf(x * np.sqrt(0.5).item()))


@rule(A.softplus.default)
def softplus(x, beta=1, threshold=20):
    scaled = x * beta
    smooth = jnp.log1p(jnp.exp(jnp.minimum(scaled, as_array(threshold, x)))) / beta
    return jnp.where(scaled > threshold, x, smooth)


@rule(A.log_sigmoid.default)
def log_sigmoid(x):
    return -jnp.logaddexp(-x, as_array(0, x))


@rule(A.elu.default)
def elu(x, alpha=1, scale=1, input_scale=1):
    negative = jnp.expm1(jnp.minimum(x, as_array(0, x)) * input_scale) * alpha
    return jnp.where(x > 0, x, negative) * scale


@rule(A.hardtanh.default)
def hardtanh(x, low=-1, high=1):
    return jnp.minimum(jnp.maximum(x, as_array(low, x)), as_array(high, x))


def _shifted(x: jax.Array, dim: int) -> jax.Array:
    return x - lax.stop_gradient(jnp.max(x, axes_of(x, dim), keepdims=True))


def softmax_along(x: jax.Array, dim: int) -> jax.Array:
    e = jnp.exp(_shifted(x, dim))
    return e / jnp.sum(e, axes_of(x, dim), keepdims=True)


@rule(A._safe_softmax.default)
def safe_softmax(x, dim, dtype=None):
    x = as_dtype(x, dtype)
    empty = jnp.all(x == -jnp.inf, axes_of(x, dim), keepdims=True)
    return jnp.where(empty, as_array(0, x), softmax_along(jnp.where(empty, as_array(0, x), x), dim))


@rule(A._log_softmax.default)
def log_softmax(x, dim, half_to_float=False):
    x = _shifted(as_dtype(x, torch.float32 if half_to_float else None), dim)
    return x - jnp.log(jnp.sum(jnp.exp(x), axes_of(x, dim), keepdims=True))


rules({
    A.glu.default: lambda x, dim=-1: jax.nn.glu(x, dim),
    A.threshold.default: lambda x, threshold, value: (
        jnp.where(x <= threshold, as_array(value, x), x)),
    A.softshrink.default: lambda x, threshold=0.5: (
        jnp.where(jnp.abs(x) <= threshold, as_array(0, x), x - jnp.sign(x) * threshold)),
    A.relu.default: lambda x: jnp.maximum(x, as_array(0, x)),
    A.silu.default: lambda x: x * lax.logistic(x),
    A.mish.default: lambda x: x * jnp.tanh(jnp.logaddexp(x, as_array(0, x))),
    A.selu.default: lambda x: elu(x, 1.6732632423543772, 1.0507009873554805),
    A.celu.default: lambda x, alpha=1.0: elu(x, alpha, 1, 1 / alpha),
    (A.leaky_relu.default, A._prelu_kernel.default): lambda x, slope=0.01: (
        jnp.where(x > 0, x, x * slope)),
    A.relu6.default: lambda x: hardtanh(x, 0, 6),
    A.hardsigmoid.default: lambda x: hardtanh(x + 3, 0, 6) / 6,
    A.hardswish.default: lambda x: x * (hardtanh(x + 3, 0, 6) / 6),
    A.hardshrink.default: lambda x, threshold=0.5: (
        jnp.where(jnp.abs(x) <= threshold, as_array(0, x), x)),
    A._softmax.default: lambda x, dim, half_to_float=False: (
        softmax_along(as_dtype(x, torch.float32 if half_to_float else None), dim)),
    A.softmax.int: lambda x, dim, dtype=None: softmax_along(as_dtype(x, dtype), dim),
    A.log_softmax.int: lambda x, dim, dtype=None: log_softmax(as_dtype(x, dtype), dim),
})  # fmt: skip
