"""Complex numbers and Fourier transforms."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jax import lax

from .._registry import rule, rules
from .._torch import aten
from ._promotion import common

A = aten


def _transform(function, x, dims, normalization, sizes=None):
    """Returns a Fourier transform of an axis each, divided by nothing, sqrt(n) or n."""
    sizes = sizes or [x.shape[d] for d in dims]
    n = math.prod(sizes) if normalization else 1
    return function(x, sizes, tuple(dims)) / (math.sqrt(n) if normalization == 1 else n)


_inverse = functools.partial(jnp.fft.ifftn, norm="forward")
_inverse_of_real = functools.partial(jnp.fft.irfftn, norm="forward")


def _angle_of_real(x):
    return jnp.where(x < 0, jnp.full_like(x, math.pi), jnp.where(x == x, jnp.zeros_like(x), x))


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
    A.angle.default: lambda x: (jnp.angle if jnp.iscomplexobj(x) else _angle_of_real)(x),
    (A._conj.default, A.conj_physical.default, A._conj_physical.default): jnp.conj,
    (A.resolve_conj.default, A.resolve_neg.default): lambda x: x,
    A.polar.default: lambda size, angle: complex_(size * jnp.cos(angle), size * jnp.sin(angle)),
    (A.view_as_complex.default, A.view_as_complex_copy.default): lambda x: (
        complex_(x[..., 0], x[..., 1])),
    (A.view_as_real.default, A.view_as_real_copy.default): lambda x: (
        jnp.stack([jnp.real(x), jnp.imag(x)], -1)),
})  # fmt: skip
