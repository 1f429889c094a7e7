"""Pooling and resizing."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._registry import rule, rules
from .._torch import torch

A = torch.ops.aten


def _sizes(n: int, value: Any, default: Any = None) -> Any:
    value = default if value is None or value == () else value
    value = value if isinstance(value, tuple | list) else (value,)
    return tuple(value) * n if len(value) == 1 else tuple(value)


def _pads(sizes, ceil_mode, *others):
    """Returns the padding of each axis; with ``ceil_mode`` the last window may reach further."""
    pads = []
    for size, kernel, stride, padding, dilation in zip(sizes, *others, strict=True):
        reach = dilation * (kernel - 1) + 1
        span = size + 2 * padding - reach
        count = (-(-span // stride) if ceil_mode else span // stride) + 1
        if ceil_mode and (count - 1) * stride >= size + padding:
            count -= 1
        pads.append((padding, max((count - 1) * stride + reach - size - padding, 0)))
    return pads


def _window(x, operation, initial, n, kernel, stride, padding, dilation, ceil_mode):
    lead = x.ndim - n
    ones = (1,) * lead
    pads = _pads(x.shape[lead:], ceil_mode, kernel, stride, padding, dilation)
    # a Python number as the initial value: JAX then knows the maximum and the sum
    return lax.reduce_window(
        x, initial, operation, ones + kernel, ones + stride, [(0, 0)] * lead + pads,
        window_dilation=ones + dilation,
    )  # fmt: skip


def _max_pool(n, x, kernel, stride=None, padding=0, dilation=1, ceil_mode=False):
    kernel = _sizes(n, kernel)
    sizes = kernel, _sizes(n, stride, kernel), _sizes(n, padding), _sizes(n, dilation)
    return _window(x, lax.max, -np.inf, n, *sizes, ceil_mode)


def _avg_pool(
    n, x, kernel, stride=None, padding=0, ceil_mode=False, count_include_pad=True,
    divisor_override=None,
):  # fmt: skip
    kernel = _sizes(n, kernel)
    sizes = kernel, _sizes(n, stride, kernel), _sizes(n, padding), (1,) * n
    total = _window(x, lax.add, 0.0, n, *sizes, ceil_mode)
    if divisor_override:
        return total / divisor_override
    ones, pads = np.ones(x.shape[-n:], np.float32), sizes[2]
    if count_include_pad:
        ones, pads = np.pad(ones, [(p, p) for p in pads], constant_values=1), (0,) * n
    if count_include_pad and not ceil_mode:
        return total / float(np.prod(kernel))
    count = _counts(ones.shape, kernel, sizes[1], pads, total.shape[-n:])
    return total / jnp.asarray(count, total.dtype).reshape((1,) * (x.ndim - n) + count.shape)


def _counts(shape, kernel, stride, padding, windows):
    counts = [
        [min(i * s - p + k, size) - max(i * s - p, 0) for i in range(w)]
        for size, k, s, p, w in zip(shape, kernel, stride, padding, windows, strict=True)
    ]
    return np.prod(np.meshgrid(*counts, indexing="ij"), axis=0).astype(np.float32)


def _adaptive(n, x, output_size):
    out = _sizes(n, output_size)
    for axis, (size, windows) in enumerate(zip(x.shape[-n:], out, strict=True), x.ndim - n):
        windows = size if windows is None else windows
        x = _pooled_axis(x, axis, size, windows)
    return x


def _pooled_axis(x: jax.Array, axis: int, size: int, windows: int) -> jax.Array:
    """Returns means over windows of an axis: i size / windows to (i + 1) size / windows, up."""
    if size % windows == 0:
        shape = (*x.shape[:axis], windows, size // windows, *x.shape[axis + 1 :])
        return jnp.sum(x.reshape(shape), axis + 1) / (size // windows)
    ends = [(i * size // windows, -(-(i + 1) * size // windows)) for i in range(windows)]
    means = [jnp.sum(lax.slice_in_dim(x, a, b, axis=axis), axis, keepdims=True) / (b - a)
             for a, b in ends]  # fmt: skip
    return lax.concatenate(means, axis)


def _lengths(x, output_size, factors):
    if output_size is not None:
        return tuple(output_size)
    return tuple(int(s * f) for s, f in zip(x.shape[2:], factors, strict=True))


@rule(A.upsample_nearest2d.vec)
def upsample_nearest(x, output_size, factors):
    for axis, length in enumerate(_lengths(x, output_size, factors), 2):
        size = x.shape[axis]
        ratio = size / length if factors is None else 1 / factors[axis - 2]
        at = np.minimum((np.arange(length) * np.float32(ratio)).astype(np.int32), size - 1)
        x = jnp.take(x, at, axis=axis)
    return x


@rule(A.upsample_bilinear2d.vec)
def upsample_bilinear(x, output_size, align_corners, factors):
    for axis, length in enumerate(_lengths(x, output_size, factors), 2):
        size = x.shape[axis]
        if align_corners:
            ratio = (size - 1) / (length - 1) if length > 1 else 0.0
            at = np.arange(length) * ratio
        else:
            ratio = size / length if factors is None else 1 / factors[axis - 2]
            at = np.maximum((np.arange(length) + 0.5) * ratio - 0.5, 0)
        low = np.minimum(np.floor(at).astype(np.int32), size - 1)
        high = np.minimum(low + 1, size - 1)
        shape = [length if i == axis else 1 for i in range(x.ndim)]
        part = jnp.asarray((at - low).astype(np.float32).reshape(shape), x.dtype)
        x = jnp.take(x, low, axis=axis) * (1 - part) + jnp.take(x, high, axis=axis) * part
    return x


def _max_pool_with_indices(n, x, kernel, stride=None, padding=0, dilation=1, ceil_mode=False):
    kernel = _sizes(n, kernel)
    options = kernel, _sizes(n, stride, kernel), _sizes(n, padding), _sizes(n, dilation)
    pads, windows = _pads(x.shape[-n:], ceil_mode, *options), []
    for size, (low, high), k, s, _, d in zip(x.shape[-n:], pads, *options, strict=True):
        first = np.arange(-low, size + high - d * (k - 1), s)
        windows.append(first[:, None] + d * np.arange(k))
    return _maxima(x, windows)


def _adaptive_max(n, x, output_size):
    windows = []
    for size, count in zip(x.shape[-n:], output_size, strict=True):
        first = np.arange(count) * size // count
        last = -(-np.arange(1, count + 1) * size // count)
        at = first[:, None] + np.arange((last - first).max())
        windows.append(np.where(at < last[:, None], at, -1))
    return _maxima(x, windows)


def _maxima(x, windows):
    """Returns the maximum of each window, and its place in the image; ``windows`` has the places of
    each along each axis, of which those outside of the image aren't read."""
    n, lead, places, inside = len(windows), x.shape[: -len(windows)], 0, True
    for i, (at, size) in enumerate(zip(windows, x.shape[-n:], strict=True)):
        at = np.expand_dims(at, [j for j in range(2 * n) if j not in (i, n + i)])
        places, inside = places * size + at, inside & (at >= 0) & (at < size)
    shape = (*(len(w) for w in windows), -1)
    places, inside = np.where(inside, places, 0).reshape(shape), np.asarray(inside).reshape(shape)
    found = jnp.where(inside, x.reshape(*lead, -1)[..., places], jnp.asarray(-jnp.inf, x.dtype))
    places = jnp.broadcast_to(jnp.asarray(places, jnp.int32), found.shape)
    best = jnp.argmax(found, -1, keepdims=True)
    return jnp.max(found, -1), jnp.take_along_axis(places, best, -1)[..., 0]


def _resampling(size, out, scale, cubic, align_corners):
    if align_corners:
        step = (size - 1) / (out - 1) if out > 1 else 0.0
    else:
        step = 1 / scale if scale else size / out
    support = (2 if cubic else 1) * max(step, 1.0)
    weights = np.zeros((out, size))
    for i in range(out):
        centre = step * (i + 0.5)
        first, last = int(max(centre - support + 0.5, 0)), int(min(centre + support + 0.5, size))
        at = np.abs((np.arange(first, last) - centre + 0.5) / max(step, 1.0))
        near = ((1.5 * at - 2.5) * at * at + 1) if cubic else 1 - at
        far = ((-0.5 * at + 2.5) * at - 4) * at + 2 if cubic else 0 * at
        share = np.where(at < 1, near, np.where(at < (2 if cubic else 1), far, 0))
        weights[i, first:last] = share / share.sum()
    return weights


def _antialiased(cubic, x, output_size, align_corners, height=None, width=None):
    for axis, scale in ((-2, height), (-1, width)):
        out = output_size[axis]
        weights = _resampling(x.shape[axis], out, scale, cubic, align_corners)
        x = jnp.moveaxis(jnp.moveaxis(x, axis, -1) @ jnp.asarray(weights.T, x.dtype), -1, axis)
    return x


rules({
    A.max_pool1d.default: partial(_max_pool, 1),
    A.max_pool2d.default: partial(_max_pool, 2),
    A.max_pool3d.default: partial(_max_pool, 3),
    A.avg_pool1d.default: partial(_avg_pool, 1),
    A.avg_pool2d.default: partial(_avg_pool, 2),
    A.avg_pool3d.default: partial(_avg_pool, 3),
    A.adaptive_avg_pool1d.default: partial(_adaptive, 1),
    (A._adaptive_avg_pool2d.default, A.adaptive_avg_pool2d.default): partial(_adaptive, 2),
    A._adaptive_avg_pool3d.default: partial(_adaptive, 3),
    A.max_pool2d_with_indices.default: partial(_max_pool_with_indices, 2),
    A.max_pool3d_with_indices.default: partial(_max_pool_with_indices, 3),
    A.adaptive_max_pool2d.default: partial(_adaptive_max, 2),
    A.adaptive_max_pool3d.default: partial(_adaptive_max, 3),
    A._adaptive_avg_pool2d_backward.default: lambda gradient, x: (
        jax.vjp(lambda x: _adaptive(2, x, gradient.shape[-2:]), x)[1](gradient)[0]),
    A.avg_pool2d_backward.default: lambda gradient, x, *options: (
        jax.vjp(lambda x: _avg_pool(2, x, *options), x)[1](gradient)[0]),
    A._upsample_bilinear2d_aa.default: partial(_antialiased, False),
    A._upsample_bicubic2d_aa.default: partial(_antialiased, True),
})  # fmt: skip
