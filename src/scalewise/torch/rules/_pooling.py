"""Pooling, resizing and sampling."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._registry import rule, rules
from .._torch import aten

A = aten
BILINEAR, NEAREST = 0, 1  # torch's interpolations of grid_sampler
PADDINGS = "constant", "nearest"  # JAX's names of its paddings by zeros and the border


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


def _avg_pool(
    n, x, kernel, stride=None, padding=0, ceil_mode=False, count_include_pad=True,
    divisor_override=None,
):  # fmt: skip
    kernel, lead = _sizes(n, kernel), (1,) * (x.ndim - n)
    stride, padding = _sizes(n, stride, kernel), _sizes(n, padding)
    pads = _pads(x.shape[-n:], ceil_mode, kernel, stride, padding, (1,) * n)
    # a Python number as the initial value: JAX then knows the sum
    total = lax.reduce_window(
        x, 0.0, lax.add, lead + kernel, lead + stride, [(0, 0)] * len(lead) + pads
    )
    if divisor_override or (count_include_pad and not ceil_mode):
        return total / (divisor_override or math.prod(kernel))
    own = [(p if count_include_pad else 0,) * 2 for p in padding]
    ones = np.pad(np.ones(x.shape[-n:], x.dtype), own, constant_values=1)
    pads = [(a - p, b - q) for (a, b), (p, q) in zip(pads, own, strict=True)]
    return total / lax.reduce_window(ones, 0.0, lax.add, kernel, stride, pads).reshape(
        lead + total.shape[-n:]
    )


def _adaptive(x, output_size):
    for axis, windows in zip(range(-3, 0), output_size, strict=True):
        axis += x.ndim
        x = _pooled_axis(x, axis, x.shape[axis], windows or x.shape[axis])
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
    return tuple(jnp.take_along_axis(y, best, -1)[..., 0] for y in (found, places))


def _resized(method, x, output_size, align_corners, *scales):
    """With antialiasing, of which kernels of torch and JAX are the same."""
    out, factors = tuple(output_size), []
    for size, length, scale in zip(x.shape[2:], out, scales or (None, None), strict=True):
        step = size / length if scale is None else 1 / scale
        if align_corners:
            step = (size - 1) / (length - 1) if length > 1 else 0.0
        factors.append(1 / max(step, 1e-9))
    where = (2, 3), jnp.asarray(factors), jnp.zeros(2)
    shape = (*x.shape[:2], *out)
    return jax.image.scale_and_translate(x, shape, *where, method, True, lax.Precision.HIGHEST)


@rule(A.grid_sampler_2d.default, A.grid_sampler_3d.default)
def grid_sampler(x, grid, interpolation, padding, align_corners):
    if interpolation not in (BILINEAR, NEAREST):
        raise NotImplementedError("grid_sample(mode='bicubic') has no rule: use mode='bilinear'")
    at = [(grid[..., -1 - i] + 1) / 2 * (n - align_corners) for i, n in enumerate(x.shape[2:])]
    at = at if align_corners else [a - 0.5 for a in at]
    if interpolation == NEAREST:
        at = [lax.round(a, lax.RoundingMethod.TO_NEAREST_EVEN) for a in at]
    mode = PADDINGS[padding] if padding < 2 else "mirror" if align_corners else "reflect"
    order = 0 if interpolation == NEAREST else 1
    pixels = partial(jax.scipy.ndimage.map_coordinates, order=order, mode=mode)
    return jax.vmap(jax.vmap(pixels, (0, None)))(x, at)


rules({
    A.avg_pool2d.default: partial(_avg_pool, 2),
    A.avg_pool3d.default: partial(_avg_pool, 3),
    A._adaptive_avg_pool3d.default: _adaptive,
    A.max_pool2d_with_indices.default: partial(_max_pool_with_indices, 2),
    A.max_pool3d_with_indices.default: partial(_max_pool_with_indices, 3),
    A.adaptive_max_pool2d.default: partial(_adaptive_max, 2),
    A.adaptive_max_pool3d.default: partial(_adaptive_max, 3),
    A._upsample_bilinear2d_aa.default: partial(_resized, "linear"),
    A._upsample_bicubic2d_aa.default: partial(_resized, "cubic"),
})  # fmt: skip
