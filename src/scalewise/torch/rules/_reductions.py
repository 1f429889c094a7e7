"""Sums, means, extremes, sorting and cumulative operations."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax.numpy as jnp
from jax import lax

from .._convert import jax_dtype
from .._operation import one_step
from .._registry import IN_STEPS, rule, rules
from .._torch import aten, torch
from ._promotion import as_dtype, as_float, axes_of

A = aten


def _summed(x, dtype):
    if dtype is None and not jnp.issubdtype(x.dtype, jnp.inexact):
        return x.astype(jax_dtype(torch.int64))
    return as_dtype(x, dtype)


def _total(function, x, dims=None, keepdim=False, dtype=None):
    x = _summed(x, dtype)
    return function(x, axes_of(x, dims), keepdims=keepdim, dtype=x.dtype)


def _so_far(function, x, dim, dtype=None):
    x = _summed(x, dtype)
    return function(x, dim % x.ndim) if x.ndim else x


sum_dims, prod_dim = partial(_total, jnp.sum), partial(_total, jnp.prod)


@rule(A.mean.dim)
def mean_dims(x, dims, keepdim=False, dtype=None):
    x = as_dtype(x, dtype)
    axes = axes_of(x, dims)
    return jnp.sum(x, axes, keepdims=keepdim) / math.prod(x.shape[a] for a in axes)


def _over_axes(function):
    return lambda x, dims=None, keepdim=False: function(x, axes_of(x, dims), keepdims=keepdim)


def _position(function, x, dim=None, keepdim=False):
    return function(x, dim, keepdims=keepdim) if x.ndim else jnp.zeros((), jnp.int32)


amax, amin = _over_axes(jnp.max), _over_axes(jnp.min)
argmax, argmin = partial(_position, jnp.argmax), partial(_position, jnp.argmin)


@rule(A.var.correction)
def var(x, dims=None, correction=1, keepdim=False):
    axes = axes_of(x, dims)
    n = math.prod(x.shape[a] for a in axes)
    centred = x - jnp.sum(x, axes, keepdims=True) / n
    return jnp.sum(lax.square(centred), axes, keepdims=keepdim) / max(n - correction, 0)


@dataclasses.dataclass(frozen=True)
class Sum:
    axes: tuple[int, ...]
    keepdims: bool

    def __call__(self, x):
        return jnp.sum(x, self.axes, keepdims=self.keepdims)


IN_STEPS.add(A.logsumexp.default)


@rule(A.logsumexp.default)
def logsumexp(x, dims, keepdim=False):
    x, axes = as_float(x), axes_of(x, dims)
    largest = lax.stop_gradient(jnp.max(x, axes, keepdims=True))
    largest = jnp.where(jnp.isfinite(largest), largest, jnp.zeros_like(largest))
    total = jnp.log(one_step("sum", Sum(axes, keepdim), jnp.exp(x - largest)))
    return total + (largest if keepdim else jnp.squeeze(largest, axes))


def _root(x, order):
    """The derivative at 0 is 0, as torch has it for norms and standard deviations."""
    zero = x == 0
    safe = jnp.where(zero, jnp.ones_like(x), x)
    root = lax.sqrt(safe) if order == 2 else jnp.power(safe, 1 / order)
    return jnp.where(zero, jnp.zeros_like(x), root)


@rule(A.linalg_vector_norm.default)
def vector_norm(x, order=2, dims=None, keepdim=False, dtype=None):
    x = as_dtype(x, dtype)
    axes, size = axes_of(x, dims), jnp.abs(x)
    if math.isinf(order):
        return (jnp.max if order > 0 else jnp.min)(size, axes, keepdims=keepdim)
    if order == 0:
        return jnp.sum((x != 0).astype(x.dtype), axes, keepdims=keepdim)
    if order == 1:
        return jnp.sum(size, axes, keepdims=keepdim)
    if order == 2:
        return _root(jnp.sum(lax.square(size), axes, keepdims=keepdim), 2)
    powers = _root(size, 1 / order) if 0 < order < 1 else jnp.power(size, float(order))
    return _root(jnp.sum(powers, axes, keepdims=keepdim), order)


@rule(A.histc.default)
def histc(x, bins=100, min=0, max=0):
    """Counts in bins of equal width; between the extremes of x if min and max are equal."""
    low, high = (jnp.min(x), jnp.max(x)) if min == max else (min, max)
    at = jnp.floor((x - low) * bins / (high - low))
    counted = ((x >= low) & (x <= high)).astype(x.dtype)
    at = jnp.clip(at, 0, bins - 1).astype(jnp.int32).reshape(-1)
    return jnp.zeros(bins, x.dtype).at[at].add(counted.reshape(-1))


@rule(A.sort.default)
def sort(x, dim=-1, descending=False):
    order = jnp.argsort(x, dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, dim), order


def _with_places(*overloads):
    """Registers a rule along one axis that also returns positions; a 0-d array has one, 0."""

    def register(function):
        def rule_(x, *args, **options):
            return function(x, *args, **options) if x.ndim else (x, jnp.zeros((), jnp.int32))

        rule(*overloads)(rule_)
        return function

    return register


def _squeezed(both, dim, keepdim):
    return tuple(y if keepdim else jnp.squeeze(y, dim) for y in both)


def _extreme(position):
    """Returns the rule of a maximum or minimum along an axis; of equal numbers, one gets the
    gradient."""

    def extreme(x, dim, keepdim=False):
        at = position(x, dim, True)
        return _squeezed((jnp.take_along_axis(x, at, dim), at), dim, keepdim)

    return extreme


_with_places(A.max.dim)(_extreme(argmax))
_with_places(A.min.dim)(_extreme(argmin))


@_with_places(A.topk.default)
def topk(x, k, dim=-1, largest=True, sorted=True):
    return tuple(lax.slice_in_dim(y, 0, k, axis=dim) for y in sort(x, dim, largest))


@_with_places(A.kthvalue.default)
def kthvalue(x, k, dim=-1, keepdim=False):
    both = (lax.slice_in_dim(y, k - 1, k, axis=dim) for y in sort(x, dim))
    return _squeezed(both, dim, keepdim)


@_with_places(A.median.dim)
def median_dim(x, dim, keepdim=False):
    """Returns the lower of two middle numbers; NaN where there is one, as torch does."""
    at = kthvalue(x, (x.shape[dim] + 1) // 2, dim, True)[1]
    nan = jnp.isnan(x)
    first = jnp.argmax(nan, dim, keepdims=True).astype(at.dtype)
    at = jnp.where(jnp.any(nan, dim, keepdims=True), first, at)
    return _squeezed((jnp.take_along_axis(x, at, dim), at), dim, keepdim)


@_with_places(A.nanmedian.dim)
def nanmedian_dim(x, dim, keepdim=False):
    """Returns the lower of two middle numbers, of those that aren't NaN."""
    values, order = sort(x, dim)  # NaN last
    middle = jnp.maximum(jnp.sum(~jnp.isnan(x), dim, keepdims=True) - 1, 0) // 2
    return _squeezed((jnp.take_along_axis(y, middle, dim) for y in (values, order)), dim, keepdim)


@_with_places(A.mode.default)
def mode(x, dim=-1, keepdim=False):
    """Returns the smallest of the most frequent numbers, and where it stands last."""
    values, order = sort(x, dim)
    along = jnp.moveaxis(values, dim, -1)
    counts = jnp.sum(along[..., None] == along[..., None, :], -1, dtype=jnp.int32)
    first = jnp.moveaxis(jnp.argmax(counts, -1, keepdims=True), -1, dim)
    last = first + jnp.moveaxis(jnp.max(counts, -1, keepdims=True), -1, dim) - 1
    return _squeezed((jnp.take_along_axis(y, last, dim) for y in (values, order)), dim, keepdim)


def _extreme_so_far(compare):
    """Returns the rule of the extremes of all numbers up to each one, and where they last stand."""

    def later(a, b):
        chosen = compare(b[0], a[0]) | (b[0] != b[0])  # NaN stays
        return jnp.where(chosen, b[0], a[0]), jnp.where(chosen, b[1], a[1])

    def cumulative(x, dim):
        axis = dim % x.ndim
        at = lax.broadcasted_iota(jnp.int32, x.shape, axis)
        return lax.associative_scan(later, (x, at), axis=axis)

    return cumulative


_with_places(A.cummax.default)(_extreme_so_far(lax.ge))
_with_places(A.cummin.default)(_extreme_so_far(lax.le))


rules({
    A.std.correction: lambda x, *args, **options: _root(var(x, *args, **options), 2),
    A.sum.dim_IntList: sum_dims,
    A.prod.dim_int: prod_dim,
    A.prod.default: lambda x, dtype=None: prod_dim(x, dtype=dtype),
    A.cumsum.default: partial(_so_far, lax.cumsum),
    A.cumprod.default: partial(_so_far, lax.cumprod),
    A.mean.default: lambda x, dtype=None: mean_dims(x, None, dtype=dtype),
    (A.any.default, A.any.dim, A.any.dims): _over_axes(jnp.any),
    (A.all.default, A.all.dim, A.all.dims): _over_axes(jnp.all),
    (A.amax.default, A.max.default): amax,
    (A.amin.default, A.min.default): amin,
    A.argmax.default: argmax,
    A.argmin.default: argmin,
    A.var_mean.correction: lambda x, dims=None, correction=1, keepdim=False: (
        (var(x, dims, correction, keepdim), mean_dims(x, dims, keepdim))),
    A.sort.stable: lambda x, stable=False, dim=-1, descending=False: sort(x, dim, descending),
    A.median.default: lambda x: median_dim(x.reshape(-1), 0)[0],
    A.nanmedian.default: lambda x: nanmedian_dim(x.reshape(-1), 0)[0],
    A.logcumsumexp.default: lambda x, dim: lax.cumlogsumexp(x, dim % x.ndim),
})  # fmt: skip
