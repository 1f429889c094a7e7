"""Complex numbers, Fourier transforms, grids, columns of windows, bags of embeddings."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from .._convert import jax_dtype
from .._registry import rule, rules
from .._torch import aten, torch
from ._indexing import embedding
from ._promotion import common

A = aten
BILINEAR, NEAREST = 0, 1  # torch's interpolations of grid_sampler
PADDINGS = "constant", "nearest"  # JAX's names of its paddings by zeros and the border
SUM, MEAN, MAX = 0, 1, 2  # torch's modes of embedding_bag


def _transform(function, x, dims, normalization, sizes=None):
    """Returns a Fourier transform of an axis each, divided by nothing, sqrt(n) or n."""
    sizes = sizes or [x.shape[d] for d in dims]
    n = math.prod(sizes) if normalization else 1
    return function(x, sizes, tuple(dims)) / (math.sqrt(n) if normalization == 1 else n)


_inverse = functools.partial(jnp.fft.ifftn, norm="forward")
_inverse_of_real = functools.partial(jnp.fft.irfftn, norm="forward")


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
    pixels = functools.partial(jax.scipy.ndimage.map_coordinates, order=order, mode=mode)
    return jax.vmap(jax.vmap(pixels, (0, None)))(x, at)


@rule(A._embedding_bag.default, A._embedding_bag_forward_only.default)
def embedding_bag(
    weight, index, offsets, scale_grad_by_freq=False, mode=SUM, sparse=False,
    per_sample_weights=None, include_last_offset=False, padding_idx=-1,
):  # fmt: skip
    """Sums, means or maxima of consecutive rows; ``offsets`` are where the bags begin."""
    starts = offsets[:-1] if include_last_offset else offsets
    bags, n = starts.shape[0], index.shape[0]
    bag = jnp.searchsorted(starts, jnp.arange(n), side="right").astype(jnp.int32) - 1
    rows, kept = embedding(weight, index), (index != padding_idx)[:, None]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    counts = jnp.zeros(bags, jnp.int32).at[bag].add(kept[:, 0].astype(jnp.int32))
    shape, maxima = (bags, weight.shape[1]), jnp.zeros(bags, jnp.int32)
    if mode == MAX:
        low = jnp.where(kept, rows, jnp.full_like(rows, -jnp.inf))
        out = jnp.full(shape, -jnp.inf, rows.dtype).at[bag].max(low)
        out = jnp.where(counts[:, None] > 0, out, jnp.zeros_like(out))
        maxima = jnp.full(shape, -1, jnp.int32)
        maxima = maxima.at[bag].max(jnp.where(low == out[bag], index[:, None], -1))
    else:
        out = jnp.zeros(shape, rows.dtype).at[bag].add(jnp.where(kept, rows, jnp.zeros_like(rows)))
        if mode == MEAN:
            out = out / jnp.maximum(counts, 1).astype(out.dtype)[:, None]
    integer = jax_dtype(torch.int64)
    return out, bag.astype(integer), counts.astype(integer), maxima.astype(integer)


@rule(A.complex.default)
def complex_(real, imaginary):
    real, imaginary = common(real, imaginary)
    wide = jnp.float64 if real.dtype == jnp.float64 else jnp.float32
    return lax.complex(real.astype(wide), imaginary.astype(wide))


rules({
    A._fft_r2c.default: lambda x, dims, normalization, onesided: (
        _transform(jnp.fft.rfftn if onesided else jnp.fft.fftn, x, dims, normalization)),
    A._fft_c2r.default: lambda x, dims, normalization, size: (
        _transform(_inverse_of_real, x, dims, normalization,
                   [*(x.shape[d] for d in dims[:-1]), size])),
    A._fft_c2c.default: lambda x, dims, normalization, forward: (
        _transform(jnp.fft.fftn if forward else _inverse, x, dims, normalization)),
    A.real.default: jnp.real,
    A.imag.default: jnp.imag,
    A.angle.default: jnp.angle,
    (A._conj.default, A.conj_physical.default, A._conj_physical.default): jnp.conj,
    (A.resolve_conj.default, A.resolve_neg.default): lambda x: x,
    A.polar.default: lambda size, angle: complex_(size * jnp.cos(angle), size * jnp.sin(angle)),
    (A.view_as_complex.default, A.view_as_complex_copy.default): lambda x: (
        complex_(x[..., 0], x[..., 1])),
    (A.view_as_real.default, A.view_as_real_copy.default): lambda x: (
        jnp.stack([jnp.real(x), jnp.imag(x)], -1)),
})  # fmt: skip
