"""Complex numbers: their parts, polar form and Fourier transforms."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from .._registry import rule
from .._torch import torch
from ._promotion import common
from ._transforms import _normalized

A = torch.ops.aten


@rule(A.complex.default)
def complex_(real, imaginary):
    real, imaginary = common(real, imaginary)
    wide = jnp.float64 if real.dtype == jnp.float64 else jnp.float32
    return lax.complex(real.astype(wide), imaginary.astype(wide))


rule(A.real.default)(jnp.real)
rule(A.imag.default)(jnp.imag)
rule(A.angle.default)(jnp.angle)
rule(A._conj.default, A.conj_physical.default, A._conj_physical.default)(jnp.conj)
rule(A.resolve_conj.default, A.resolve_neg.default)(lambda x: x)
rule(A.polar.default)(lambda size, angle: complex_(size * jnp.cos(angle), size * jnp.sin(angle)))


@rule(A.view_as_complex.default, A.view_as_complex_copy.default)
def view_as_complex(x):
    return complex_(x[..., 0], x[..., 1])


@rule(A.view_as_real.default, A.view_as_real_copy.default)
def view_as_real(x):
    return jnp.stack([jnp.real(x), jnp.imag(x)], -1)


@rule(A._fft_c2c.default)
def fft_of_complex(x, dims, normalization, forward):
    sizes, axes = [x.shape[d] for d in dims], tuple(dims)
    if forward:
        return _normalized(jnp.fft.fftn(x, axes=axes), sizes, normalization)
    return _normalized(jnp.fft.ifftn(x, axes=axes, norm="forward"), sizes, normalization)
