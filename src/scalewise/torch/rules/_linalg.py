"""Products and convolutions of matrices, factorizations, solutions of equations, determinants."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .._registry import RULES, rule, rules
from .._torch import aten

A = aten


def _info(x):
    """Returns torch's error codes: no factorization fails under export."""
    return jnp.zeros(x.shape[:-2], jnp.int32)


def _in_float32(x):
    return x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


@rule(A.linalg_cholesky_ex.default)
def cholesky(x, upper=False, check_errors=False):
    factor = jnp.linalg.cholesky(x)
    return (factor.mT if upper else factor), _info(x)


@rule(A.linalg_qr.default)
def qr(x, mode="reduced"):
    if mode == "r":
        return jnp.zeros((0,), x.dtype), jnp.linalg.qr(x, mode="r")
    return tuple(jnp.linalg.qr(x, mode=mode))


@rule(A._linalg_svd.default)
def svd(x, full_matrices=False, compute_uv=True, driver=None):
    if compute_uv:
        return tuple(jnp.linalg.svd(x, full_matrices=full_matrices))
    empty = jnp.zeros((0,), x.dtype)
    return empty, jnp.linalg.svd(x, compute_uv=False), empty


@rule(A.linalg_pinv.atol_rtol_tensor, A.linalg_pinv.atol_rtol_float)
def pseudoinverse(x, *, atol=None, rtol=None, hermitian=False):
    left, sizes, right = jnp.linalg.svd(x, full_matrices=False)
    if rtol is None:
        rtol = 0.0 if atol is not None else max(x.shape[-2:]) * jnp.finfo(x.dtype).eps
    limit = jnp.max(sizes, -1, keepdims=True, initial=0) * jnp.asarray(rtol, x.dtype)[..., None]
    limit = jnp.maximum(limit, jnp.asarray(0.0 if atol is None else atol, x.dtype)[..., None])
    kept = sizes > limit
    inverse = jnp.where(kept, 1 / jnp.where(kept, sizes, jnp.ones_like(sizes)), 0)
    return (right.mT * inverse[..., None, :]) @ left.mT


@rule(A._linalg_solve_ex.default)
def solve(a, b, left=True, check_errors=False):
    vector = b.ndim == a.ndim - 1 and b.shape == a.shape[:-1]
    columns = b[..., None] if vector else b
    found = jnp.linalg.solve(a, columns) if left else jnp.linalg.solve(a.mT, columns.mT).mT
    pivots = jnp.zeros(a.shape[:-1], jnp.int32)
    return (found[..., 0] if vector else found), a, pivots, _info(a)


@rule(A.linalg_solve_triangular.default)
def solve_triangular(a, b, upper, left=True, unitriangular=False):
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))
    if not left:
        return solve_triangular(a.mT, b.mT, not upper, unitriangular=unitriangular).mT
    return jax.lax.linalg.triangular_solve(
        a, b, left_side=True, lower=not upper, unit_diagonal=unitriangular
    )


@rule(A.cholesky_solve.default)
def cholesky_solve(b, factor, upper=False):
    lower = factor.mT if upper else factor
    return solve_triangular(lower.mT, solve_triangular(lower, b, False), True)


@rule(A.linalg_lu_factor_ex.default)
def lu_factor(x, pivot=True, check_errors=False):
    factors, pivots = jax.scipy.linalg.lu_factor(x)
    return factors, pivots + 1, _info(x)  # torch counts from 1


@rule(A.linalg_lu_solve.default)
def lu_solve(factors, pivots, b, left=True, adjoint=False):
    if not left:
        return lu_solve(factors, pivots, b.mT, adjoint=not adjoint).mT
    return jax.scipy.linalg.lu_solve((factors, pivots - 1), b, trans=2 if adjoint else 0)


@rule(A.linear.default)
def linear(x, weight, bias=None):
    y = lax.dot_general(x, weight, (((x.ndim - 1,), (weight.ndim - 1,)), ((), ())))
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


@rule(A.convolution.default)
def convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    n = weight.ndim - 2
    stride, padding, dilation, output_padding = (
        tuple(v) * n if len(v) == 1 else tuple(v)
        for v in (stride, padding, dilation, output_padding)
    )
    if transposed:
        y = _transposed(x, weight, stride, padding, dilation, output_padding, groups)
    else:
        y = lax.conv_general_dilated(
            x, weight, stride, [(p, p) for p in padding], rhs_dilation=dilation,
            feature_group_count=groups,
        )  # fmt: skip
    return y if bias is None else y + bias.reshape((1, -1) + (1,) * n)


@rule(A.convolution_backward.default)
def convolution_backward(gradient, x, weight, bias_sizes, *options):
    *options, mask = options
    _, pull = jax.vjp(lambda x, weight: convolution(x, weight, None, *options), x, weight)
    found = *pull(gradient), jnp.sum(gradient, (0, *range(2, gradient.ndim)))
    return tuple(g if wanted else None for g, wanted in zip(found, mask, strict=True))


def _transposed(x, weight, stride, padding, dilation, output_padding, groups):
    n = weight.ndim - 2
    inputs, outputs, *kernel = weight.shape
    weight = weight.reshape(groups, inputs // groups, outputs, *kernel)
    weight = jnp.swapaxes(weight, 1, 2).reshape(groups * outputs, inputs // groups, *kernel)
    weight = lax.rev(weight, tuple(range(2, 2 + n)))
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    pads = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)]
    return lax.conv_general_dilated(
        x, weight, (1,) * n, pads, lhs_dilation=stride, rhs_dilation=dilation,
        feature_group_count=groups,
    )  # fmt: skip


@rule(A._trilinear.default)
def trilinear(x, y, z, expand_x, expand_y, expand_z, sum_dims, unroll_dim=1):
    pairs = (x, expand_x), (y, expand_y), (z, expand_z)
    x, y, z = (jnp.expand_dims(v, tuple(new)) for v, new in pairs)
    return jnp.sum(x * y * z, tuple(sum_dims))


@rule(A._grouped_mm.default)
def grouped_mm(x, weight, offs=None, bias=None, out_dtype=None):
    """Products of consecutive rows of x with one matrix each; ``offs`` are the groups' ends."""
    if offs is None or x.ndim != 2 or weight.ndim != 3:
        raise NotImplementedError("grouped_mm of other operands than rows and stacked matrices")
    sizes = jnp.diff(offs.astype(jnp.int32), prepend=jnp.zeros(1, jnp.int32))
    y = lax.ragged_dot(x, weight, sizes)
    assert isinstance(y, jax.Array)
    return y


rules({
    A.linalg_eig.default: lambda x: tuple(jnp.linalg.eig(_in_float32(x))),
    A.linalg_matrix_exp.default: lambda x: jax.scipy.linalg.expm(_in_float32(x)),
    A._linalg_slogdet.default: lambda x: (
        *jnp.linalg.slogdet(x), x, jnp.zeros(x.shape[:-1], jnp.int32)),
    A.triangular_solve.default: lambda b, a, upper=True, transpose=False, unitriangular=False: (
        solve_triangular(a.mT if transpose else a, b, upper != transpose,
                         unitriangular=unitriangular), a),
    A._linalg_eigh.default: lambda x, lower="L", compute_v=True: (
        tuple(jnp.linalg.eigh(x, UPLO=lower))),
    A.linalg_inv_ex.default: lambda x, check_errors=False: (jnp.linalg.inv(x), _info(x)),
    A.cholesky.default: lambda x, upper=False: cholesky(x, upper)[0],
    A.cholesky_inverse.default: lambda factor, upper=False: (
        cholesky_solve(jnp.broadcast_to(jnp.eye(factor.shape[-1]), factor.shape), factor, upper)),
    A._linalg_det.default: lambda x: (jnp.linalg.det(x), x, jnp.zeros(x.shape[:-1], jnp.int32)),
    (A.mm.default, A.bmm.default, A.matmul.default): lambda x, y: jnp.matmul(x, y),
    (A.mm.dtype, A.bmm.dtype): lambda x, y, dtype: jnp.matmul(x, y),
    A.addbmm.default: lambda x, a, b, **factors: RULES[A.addmm.default](
        x, jnp.swapaxes(a, 0, 1).reshape(a.shape[1], -1), b.reshape(-1, b.shape[2]), **factors),
})  # fmt: skip
