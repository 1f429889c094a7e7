"""Derivatives by what torch's backward pass reads: mostly the results, as they were rounded.

The formulas, and where they round, are those of torch's ``derivatives.yaml``. Operations that
aren't listed have the derivative of their rule: from the operands, rounded once. So have
``layer_norm`` and ``glu``, of which CUDA's kernels, unlike those for a CPU, keep float32 inside.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._operation import HELD, FromResult, one_step, operation
from .._registry import SAVED
from .._torch import aten
from ._elementwise import pow_scalar
from ._promotion import axes_of, ranked

A = aten


def in_one_kernel(name: str, function: Callable) -> Callable:
    """Returns a derivative that torch computes in one kernel: ``function(y, t)`` is linear in t."""
    linear = FromResult(function, (0,))
    return lambda t, y, *args, **options: operation(f"{name}_jvp", linear, [y.dtype], y, t)[0]


def by_slope(slope: Callable) -> Callable:
    """Returns a derivative that torch computes as a product with ``slope(y, *operands)``."""

    def product(t, y, *operands, **options):
        t, factor = ranked(t, slope(y, *operands))
        return t * factor

    return product


@dataclasses.dataclass(frozen=True)
class Times:
    number: float

    def __call__(self, x):
        return x * self.number


@dataclasses.dataclass(frozen=True)
class Power:
    exponent: float

    def __call__(self, x):
        return pow_scalar(x, self.exponent)


@dataclasses.dataclass(frozen=True)
class Mean:
    axes: tuple[int, ...]

    def __call__(self, x):
        return jnp.mean(x, self.axes, keepdims=True)


def times(x: Any, number: float) -> Any:
    return x * number if abs(number) in HELD else one_step("mul", Times(float(number)), x)


@functools.cache
def _scaled_by(number: float) -> Callable:
    return in_one_kernel("mul", lambda y, t: t * number)


def power(x: Any, exponent: float) -> Any:
    return one_step("pow", Power(float(exponent)), x)


@functools.cache
def _softmax(dim: int, name: str, function: Callable) -> Callable:
    return in_one_kernel(name, functools.partial(function, dim))


def _of_softmax(dim, y, t):
    product = y * t
    return product - y * jnp.sum(product, axes_of(y, dim), keepdims=True)


def _of_log_softmax(dim, y, t):
    return t - jnp.sum(jnp.exp(y) * t, axes_of(y, dim), keepdims=True)


def _softmax_of(name: str, function: Callable) -> Callable:
    def tangent(t, y, x, dim, *args, **options):
        return _softmax(dim, name, function)(t, y)

    return tangent


def _with_axes(y: Any, x: Any, axes: tuple[int, ...]) -> Any:
    return y if y.ndim == x.ndim else jnp.expand_dims(y, axes)


def _total(x: Any, axes: tuple[int, ...], like: Any) -> Any:
    return jnp.sum(x, axes, keepdims=like.ndim == x.ndim)


def _logsumexp(t, y, x, dims=None, keepdim=False):
    axes = axes_of(x, dims)
    finite = jnp.where(jnp.isinf(y), jnp.zeros_like(y), y)
    return _total(t * jnp.exp(x - _with_axes(finite, x, axes)), axes, y)


def _centred(x, axes):
    return x - one_step("mean", Mean(axes), x)


def _var(t, y, x, dims=None, correction=1, keepdim=False):
    axes = axes_of(x, dims)
    n = math.prod(x.shape[a] for a in axes)
    factor = 2.0 / max(n - correction, 0) if n > correction else math.nan
    return _scaled_by(factor)(_total(t * _centred(x, axes), axes, y), y)


def _nonzero_quotient(x, y):
    zero = y == 0
    return jnp.where(zero, jnp.zeros_like(x), x / jnp.where(zero, jnp.ones_like(y), y))


def _std(t, y, x, *args, **options):
    return _nonzero_quotient(_var(t, y, x, *args, **options), 2 * y)


def _norm(t, y, x, order=2, dims=None, keepdim=False, dtype=None):
    x, axes = x.astype(y.dtype), axes_of(x, dims)
    if order == 2:
        return _total(t * _nonzero_quotient(x, _with_axes(y, x, axes)), axes, y)
    safe = jnp.where(x == 0, jnp.ones_like(x), jnp.abs(x))  # at 0 the derivative is 0
    own = x * power(safe, order - 2) if order > 2 else jnp.sign(x) * power(safe, order - 1)
    return _nonzero_quotient(_total(t * own, axes, y), power(y, order - 1))


def _norms(x, order=2, *args, **options):
    covered = not jnp.iscomplexobj(x) and math.isfinite(order) and order > 1
    return (_norm,) if covered else ()


def _powers(x, exponent):
    number = isinstance(exponent, int | float) and exponent not in (0, 1, 2)
    slope = by_slope(lambda y, x, e: times(power(x, e - 1), e))
    return (slope,) if number else ()


def _exponentials(base, x):
    covered = isinstance(base, int | float) and base > 0
    return (None, by_slope(lambda y, base, x: times(y, math.log(base)))) if covered else ()


ROOT_OF_PI = math.sqrt(math.pi)
UNARY = {
    A.sigmoid.default: in_one_kernel("sigmoid", lambda y, t: t * (1 - y) * y),
    A.tanh.default: in_one_kernel("tanh", lambda y, t: t * (1 - y * y)),
    A.rsqrt.default: by_slope(lambda y, x: -0.5 * power(y, 3)),
    A.sqrt.default: lambda t, y, x: t / (2 * y),
    A.exp2.default: lambda t, y, x: _scaled_by(math.log(2))(t * y, y),
    A.log2.default: lambda t, y, x: t / times(x, math.log(2)),
    A.log10.default: lambda t, y, x: t / times(x, math.log(10)),
    A.reciprocal.default: by_slope(lambda y, x: -(y * y)),
    A.atanh.default: lambda t, y, x: t / (1 - lax.square(x)),
    A.erf.default: by_slope(lambda y, x: times(jnp.exp(-lax.square(x)), 2 / ROOT_OF_PI)),
    A.erfc.default: by_slope(lambda y, x: times(jnp.exp(-lax.square(x)), -2 / ROOT_OF_PI)),
    A.erfinv.default: by_slope(lambda y, x: times(jnp.exp(lax.square(y)), ROOT_OF_PI / 2)),
}
SAVED.update({
    **{operation: (tangent,) for operation, tangent in UNARY.items()},
    A.pow.Tensor_Scalar: _powers,
    A.pow.Scalar: _exponentials,
    A.logsumexp.default: (_logsumexp,),
    A.var.correction: (_var,),
    A.var.dim: (lambda t, y, x, dims, unbiased=True, keepdim=False: (
        _var(t, y, x, dims, int(unbiased), keepdim)),),
    A.std.correction: (_std,),
    A.linalg_vector_norm.default: _norms,
    A.hypot.default: (
        by_slope(lambda z, x, y: x / z), by_slope(lambda z, x, y: y / z)),
    **dict.fromkeys((A.softmax.int, A._softmax.default), (_softmax_of("softmax", _of_softmax),)),
    **dict.fromkeys((A.log_softmax.int, A._log_softmax.default),
                    (_softmax_of("log_softmax", _of_log_softmax),)),
})  # fmt: skip
