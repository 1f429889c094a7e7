"""Gathers, scatters, embeddings and bags of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._convert import jax_dtype
from .._registry import rule, rules
from .._torch import aten, torch
from ._reductions import vector_norm

A = aten
SUM, MEAN, MAX = 0, 1, 2  # torch's modes of embedding_bag


@rule(A.searchsorted.Tensor)
def search_sorted(sorted_sequence, x, out_int32=False, right=False, side=None, sorter=None):
    if sorter is not None:
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, -1)
    side = "right" if right or side == "right" else "left"
    find = functools.partial(jnp.searchsorted, side=side)
    if sorted_sequence.ndim == 1:
        return find(sorted_sequence, x)
    rows = sorted_sequence.reshape(-1, sorted_sequence.shape[-1])
    return jax.vmap(find)(rows, x.reshape(len(rows), x.shape[-1])).reshape(x.shape)


@rule(A.nonzero_static.default)
def nonzero(x, *, size, fill_value=-1):
    found = jnp.nonzero(x, size=size, fill_value=fill_value)
    return jnp.stack(found, -1) if found else jnp.zeros((size, 0), jnp.int32)


def _indices(indices):
    """Returns NumPy-style indices; torch leaves out the last ones, or has None for a whole axis."""
    return tuple(slice(None) if i is None else i for i in indices)


def _check_static(indices, x):
    if any(i is not None and i.dtype == jnp.bool_ for i in indices):
        raise NotImplementedError(
            "a boolean index has a result whose size depends on numbers; use torch.where"
        )


@rule(A.index.Tensor)
def index(x, indices):
    _check_static(indices, x)
    return x[_indices(indices)]


@rule(A.index_put.default)
def index_put(x, indices, values, accumulate=False):
    masks = [i for i in indices if i is not None and i.dtype == jnp.bool_]
    if masks and len(indices) == 1 and values.size == 1 and not accumulate:
        mask = masks[0].reshape(masks[0].shape + (1,) * (x.ndim - masks[0].ndim))
        return jnp.where(mask, values.reshape((1,) * x.ndim).astype(x.dtype), x)
    _check_static(indices, x)
    at, values = x.at[_indices(indices)], values.astype(x.dtype)
    return at.add(values) if accumulate else at.set(values)


def _row(x, dim, index):
    return (slice(None),) * (dim % x.ndim) + (index,)


def _along(index, dim):
    """Returns for each axis the indices of a gather along ``dim``, shaped like ``index``."""
    grid = list(jnp.meshgrid(*map(np.arange, index.shape), indexing="ij"))
    grid[dim] = index
    return tuple(grid)


def _source(index, source):
    return source[tuple(slice(0, n) for n in index.shape)] if np.ndim(source) else source


def _scatter(x, dim, index, source, reduce="set"):  # or "add", or "multiply"
    source = jnp.asarray(_source(index, source), x.dtype)
    return getattr(x.at[_along(index, dim % x.ndim)], reduce)(source)


@jax.custom_jvp
def _product_at(x, source, at):
    return x.at[at].multiply(source)


@_product_at.defjvp
def _product_at_jvp(operands, tangents):
    """Of a place with one zero, only that zero has a derivative; of one with several, none has."""
    x, source, at = operands
    zero, one = source == 0, jnp.ones_like(source)
    safe = jnp.where(zero, one, source)
    zeros = jnp.zeros(x.shape, jnp.int32).at[at].add(zero.astype(jnp.int32))
    others = _product_at(x, safe, at)[at] / safe
    others = jnp.where(zeros[at] == zero.astype(jnp.int32), others, jnp.zeros_like(others))
    own = tangents[0] * _product_at(jnp.ones_like(x), source, at)
    return _product_at(x, source, at), own.at[at].add(tangents[1] * others)


def _neutral(reduce, dtype):
    if reduce in ("amax", "amin"):
        low, high = -jnp.inf, jnp.inf
        if jnp.issubdtype(dtype, jnp.integer):
            low, high = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
        return low if reduce == "amax" else high
    return int(reduce == "prod")


def _reduced_at(x, at, source, reduce, include_self):
    if not include_self:
        x = x.at[at].set(jnp.asarray(_neutral(reduce, x.dtype), x.dtype))
    if reduce == "mean":
        count = jnp.full_like(x, include_self).at[at].add(jnp.ones_like(source))
        total, count = x.at[at].add(source), jnp.maximum(count, jnp.ones_like(count))
        return total / count if jnp.issubdtype(x.dtype, jnp.inexact) else total // count
    if reduce == "prod":
        return _product_at(x, source, at)
    return getattr(x.at[at], {"sum": "add", "amax": "max", "amin": "min"}[reduce])(source)


def _row_places(x, dim, index, source):
    """Returns the places of whole rows, as :func:`_along` does."""
    dim %= x.ndim
    index = jnp.expand_dims(index.reshape(-1), [a for a in range(x.ndim) if a != dim])
    return _along(jnp.broadcast_to(index, source.shape), dim)


@rule(A.put.default)
def put(x, index, source, accumulate=False):
    at = x.reshape(-1).at[index.reshape(-1)]
    source = source.reshape(-1).astype(x.dtype)
    return (at.add(source) if accumulate else at.set(source)).reshape(x.shape)


_with_slope = jax.custom_jvp(lambda x, slope: x)
_with_slope.defjvps(lambda t, y, x, slope: jnp.where(slope, t * slope, jnp.zeros_like(t)), None)
_with_value = jax.custom_jvp(lambda x, value: value)
_with_value.defjvps(lambda t, *others: t, None)


@rule(A.embedding_renorm.default)
def embedding_renorm(weight, index, max_norm, norm_type):
    """torch writes it into the weight without a derivative: the weight's gradient stays its own."""
    own = lax.stop_gradient(weight)
    sizes = vector_norm(own, norm_type, 1, True)
    used = jnp.zeros((len(weight), 1), jnp.bool_).at[index.reshape(-1)].set(True)
    return _with_value(
        weight, jnp.where(used & (sizes > max_norm), own * (max_norm / (sizes + 1e-7)), own)
    )


@rule(A.embedding.default)
def embedding(weight, index, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    """The row at ``padding_idx`` has no gradient, and ``scale_grad_by_freq`` divides that of each
    other row by how often its index occurs."""
    rows = jnp.take(weight, index, axis=0, mode="clip")
    if scale_grad_by_freq:
        counts = jnp.zeros(len(weight), jnp.int32).at[index].add(1)
        rows = _with_slope(rows, (1 / counts[index][..., None]).astype(rows.dtype))
    if padding_idx >= 0:
        rows = _with_slope(rows, (index != padding_idx)[..., None].astype(rows.dtype))
    return rows


@rule(A._embedding_bag.default, A._embedding_bag_forward_only.default)
def embedding_bag(
    weight, index, offsets, scale_grad_by_freq=False, mode=SUM, sparse=False,
    per_sample_weights=None, include_last_offset=False, padding_idx=-1,
):  # fmt: skip
    """Sums, means or maxima of consecutive rows; ``offsets`` are where the bags begin."""
    starts = offsets[:-1] if include_last_offset else offsets
    bags, n = starts.shape[0], index.shape[0]
    bag = jnp.searchsorted(starts, jnp.arange(n), side="right").astype(jnp.int32) - 1
    kept = (index != padding_idx)[:, None]
    rows = embedding(weight, index, scale_grad_by_freq=scale_grad_by_freq)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    counts = jnp.zeros(bags, jnp.int32).at[bag].add(kept[:, 0].astype(jnp.int32))
    shape, maxima = (bags, weight.shape[1]), jnp.zeros(bags, jnp.int32)
    if mode == MAX:
        low = lax.stop_gradient(jnp.where(kept, rows, jnp.full_like(rows, -jnp.inf)))
        largest = jnp.full(shape, -jnp.inf, rows.dtype).at[bag].max(low)
        place = jnp.where((low == largest[bag]) | jnp.isnan(low), jnp.arange(n)[:, None], n - 1)
        first = jnp.full(shape, n - 1, place.dtype).at[bag].min(place)
        some = counts[:, None] > 0
        out = jnp.take_along_axis(rows, first, 0)
        out = jnp.where(some, out, jnp.zeros_like(out))
        maxima = jnp.where(some, index[first], -1)
    else:
        out = jnp.zeros(shape, rows.dtype).at[bag].add(jnp.where(kept, rows, jnp.zeros_like(rows)))
        if mode == MEAN:
            out = out / jnp.maximum(counts, 1).astype(out.dtype)[:, None]
    integer = jax_dtype(torch.int64)
    return out, bag.astype(integer), counts.astype(integer), maxima.astype(integer)


@rule(A.masked_scatter.default)
def masked_scatter(x, mask, source):
    x = jnp.broadcast_to(x, jnp.broadcast_shapes(x.shape, mask.shape))
    mask = jnp.broadcast_to(mask, x.shape).reshape(-1)
    position = jnp.clip(jnp.cumsum(mask) - 1, 0, source.size - 1)
    picked = source.reshape(-1)[position].astype(x.dtype)
    return jnp.where(mask, picked, x.reshape(-1)).reshape(x.shape)


rules({
    A.gather.default: lambda x, dim, index, sparse_grad=False: (
        x[_along(index, dim % x.ndim)] if x.ndim else jnp.broadcast_to(x, index.shape)),
    (A.scatter.src, A.scatter.value, A.scatter.reduce, A.scatter.value_reduce): _scatter,
    A.scatter_add.default: lambda x, dim, index, source: (
        x.at[_along(index, dim % x.ndim)].add(_source(index, source))),
    A.index_reduce.default: lambda x, dim, index, source, reduce, include_self=True: (
        _reduced_at(x, _row_places(x, dim, index, source), source, reduce, include_self)),
    A.scatter_reduce.two: lambda x, dim, index, source, reduce, include_self=True: (
        _reduced_at(x, _along(index, dim % x.ndim), _source(index, source), reduce, include_self)),
    A.repeat_interleave.Tensor: lambda repeats, output_size=None: (
        jnp.repeat(jnp.arange(repeats.size), repeats, total_repeat_length=output_size)),
})  # fmt: skip
