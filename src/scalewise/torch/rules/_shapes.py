"""Operations that move, repeat or pad elements."""

from __future__ import annotations

import itertools
import math
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._registry import rule, rules
from .._torch import aten
from ._promotion import as_array, axes_of, result_dtype

A = aten


def _strided(size, stride, offset):
    """Returns the places of a view in a contiguous array."""
    at = sum(
        (np.arange(n) * s).reshape((-1,) + (1,) * (len(size) - 1 - i))
        for i, (n, s) in enumerate(zip(size, stride, strict=True))
    )
    return np.broadcast_to(at, size) + (offset or 0)


@rule(A.as_strided.default)
def as_strided(x, size, stride, storage_offset=0):
    return x.reshape(-1)[_strided(size, stride, storage_offset)]


@rule(A.as_strided_scatter.default)
def as_strided_scatter(x, y, size, stride, storage_offset=0):
    places = _strided(size, stride, storage_offset)
    return x.reshape(-1).at[places].set(y.astype(x.dtype)).reshape(x.shape)


@rule(A.diagonal_scatter.default)
def diagonal_scatter(x, y, offset=0, dim1=0, dim2=1):
    at = np.arange(y.shape[-1])
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    moved = moved.at[..., at + max(-offset, 0), at + max(offset, 0)].set(y.astype(x.dtype))
    return jnp.moveaxis(moved, (-2, -1), (dim1, dim2))


@rule(A.view.dtype)
def view_dtype(x, dtype):
    raise NotImplementedError(
        "view(dtype) reinterprets bits, which an emulated format doesn't have"
    )


@rule(A.squeeze.dims)
def squeeze(x, dims):
    return lax.squeeze(x, [d for d in axes_of(x, dims) if x.shape[d] == 1])


@rule(A.expand.default)
def expand(x, shape, implicit=False):
    new = len(shape) - x.ndim
    return jnp.broadcast_to(x, [x.shape[i - new] if s == -1 else s for i, s in enumerate(shape)])


@rule(A.cat.default)
def cat(arrays, dim=0):
    dtype = result_dtype(*arrays)
    kept = [x for x in arrays if x.shape != (0,)] or list(arrays[:1])
    return lax.concatenate([x.astype(dtype) for x in kept], dim % kept[0].ndim)


@rule(A.split_with_sizes.default)
def split_with_sizes(x, sizes, dim=0):
    bounds = [0, *itertools.accumulate(sizes)]
    return tuple(lax.slice_in_dim(x, a, b, axis=dim) for a, b in itertools.pairwise(bounds))


@rule(A.select.int)
def select(x, dim, index):
    return lax.dynamic_index_in_dim(x, index, dim, keepdims=False)  # of a number in the graph


@rule(A.slice.Tensor)
def slice_tensor(x, dim=0, start=None, end=None, step=1):
    start, end, _ = slice(start, end, step).indices(x.shape[dim])
    return lax.slice_in_dim(x, start, max(start, end), step, dim)


# torch's ways to pad, and NumPy's names of them
MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def _pad(mode, x, padding, value=0):
    """torch lists the padding of the last axis first; negative ones cut."""
    pairs = [(0, 0)] * x.ndim
    for i in range(len(padding) // 2):
        pairs[-1 - i] = (padding[2 * i], padding[2 * i + 1])
    if mode == "constant":
        return lax.pad(x, as_array(value, x), [(a, b, 0) for a, b in pairs])
    cut = [slice(max(-a, 0), n - max(-b, 0)) for n, (a, b) in zip(x.shape, pairs, strict=True)]
    return jnp.pad(x[tuple(cut)], [(max(a, 0), max(b, 0)) for a, b in pairs], mode=mode)


rules({
    (A.view.default, A.reshape.default, A._unsafe_view.default, A._reshape_copy.default): (
        lambda x, shape: x.reshape(shape)),
    A.sym_size.int: lambda x, dim: x.shape[dim],
    A.sym_numel.default: lambda x: x.size,
    A.sym_stride.int: lambda x, dim: math.prod(x.shape[dim % x.ndim + 1 :]),
    A.sym_storage_offset.default: lambda x: 0,
    A.sym_is_contiguous.default: lambda x, memory_format=None: True,
    A._local_scalar_dense.default: lambda x: x.reshape(()),
    A.permute.default: lambda x, dims: lax.transpose(x, axes_of(x, dims)) if x.ndim else x,
    A.transpose.int: lambda x, dim0, dim1: jnp.swapaxes(x, dim0, dim1) if x.ndim else x,
    (A.t.default, A.numpy_T.default): lambda x: x.T,
    A.unsqueeze.default: lambda x, dim: jnp.expand_dims(x, dim),
    A.flip.default: lambda x, dims: lax.rev(x, [d % x.ndim for d in dims]),
    A.diagonal.default: lambda x, offset=0, dim1=0, dim2=1: jnp.diagonal(x, offset, dim1, dim2),
    A.constant_pad_nd.default: partial(_pad, "constant"),
    A.pad.default: lambda x, padding, mode="constant", value=None: (
        _pad(MODES[mode], x, padding, value or 0)),
})  # fmt: skip
