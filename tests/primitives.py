"""One small program for each primitive of ``jax.extend.core.primitives``: how a user meets it."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core.primitives as published
import jax.numpy as jnp
import jax.scipy.special as special
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.random import threefry_2x32

from arrays import normal

X = np.asarray(normal(0, (4, 4)))
P = np.abs(X) + np.float32(0.5)  # positive
U = np.tanh(X) * np.float32(0.9)  # within (-1, 1)
S = X @ X.T + 4 * np.eye(4, dtype=np.float32)  # positive definite
I = np.arange(16, dtype=np.int32).reshape(4, 4)  # noqa: E741
B = I % 2 == 0
KEY = np.asarray([0, 42], np.uint32)
IMAGE = np.asarray(normal(1, (1, 6, 6, 2)))
KERNEL = np.asarray(normal(2, (3, 3, 2, 3)))


def _window(f, initial):
    return lambda x: lax.reduce_window(x, initial, f, (2, 2), (1, 1), "VALID")


def _pool_gradient(x):
    pool = lambda y: lax.reduce_window(y, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID")  # noqa: E731
    return jax.vjp(pool, x)[1](jnp.ones((2, 2), x.dtype))[0]


def _pool_tangent(x):
    pool = lambda y: lax.reduce_window(y, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID")  # noqa: E731
    return jax.jvp(pool, (x,), (jnp.ones_like(x),))[1]


def _halved(x):
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(lambda p, t: (f(*p), t[0] / 2))
    return f(x)


def _remembered(x):
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),), optimize_remat=True)
    return jax.grad(lambda x: jnp.sum(f(x) * x))(x)


def _clipped(x):
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (f(x), x), lambda x, g: (g,))
    return f(x)


def _solve(a, b):
    return lax.custom_linear_solve(
        lambda x: a @ x, b, lambda mv, b: jnp.linalg.inv(a) @ b, symmetric=True
    )


def _scatter(kind: str):
    return lambda x: getattr(x.at[jnp.array([0, 2])], kind)(x[:2])


# name: (function, arguments). Functions of arrays that bind the primitive.
FLOATS: dict[str, tuple[Any, tuple]] = {
    "abs": (jnp.abs, (X,)), "acos": (lax.acos, (U,)), "acosh": (lax.acosh, (P + 1,)),
    "add": (lax.add, (X, U)), "approx_top_k": (lambda x: lax.approx_max_k(x, 2), (X,)),
    "add_any": (jax.grad(lambda x: jnp.sum(x * jnp.sin(x))), (X,)),
    "argmax": (lambda x: lax.argmax(x, 1, jnp.int32), (X,)),
    "argmin": (lambda x: lax.argmin(x, 1, jnp.int32), (X,)),
    "asin": (lax.asin, (U,)), "asinh": (lax.asinh, (X,)), "atan": (lax.atan, (X,)),
    "atan2": (lax.atan2, (X, P)), "atanh": (lax.atanh, (U,)),
    "bessel_i0e": (special.i0e, (X,)), "bessel_i1e": (special.i1e, (X,)),
    "bitcast_convert_type": (lambda x: lax.bitcast_convert_type(x, jnp.int32), (X,)),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (2, 4, 4), (1, 2)), (X,)),
    "cbrt": (lax.cbrt, (X,)), "ceil": (lax.ceil, (X,)), "cholesky": (lax.linalg.cholesky, (S,)),
    "clamp": (lambda x: lax.clamp(-0.5, x, 0.5), (X,)),
    "complex": (lambda x: jnp.abs(lax.complex(x, x)), (X,)),
    "concatenate": (lambda x: lax.concatenate([x, 2 * x], 0), (X,)),
    "cond": (lambda p, x: lax.cond(p[0, 0], jnp.sin, jnp.cos, x), (B, X)),
    "conj": (lambda x: jnp.real(jnp.conj(lax.complex(x, x))), (X,)),
    "conv_general_dilated": (
        lambda x, k: lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        (IMAGE, KERNEL),
    ),
    "convert_element_type": (lambda i: i.astype(jnp.float32), (I,)),
    "copy": (jnp.copy, (X,)), "cos": (lax.cos, (X,)), "cosh": (lax.cosh, (X,)),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1), (X,)),
    "cummax": (lambda x: lax.cummax(x, 1), (X,)), "cummin": (lambda x: lax.cummin(x, 1), (X,)),
    "cumprod": (lambda x: lax.cumprod(x, 1), (X,)), "cumsum": (lambda x: lax.cumsum(x, 1), (X,)),
    "custom_jvp_call": (_halved, (X,)), "custom_vjp_call": (_clipped, (X,)),
    "custom_linear_solve": (_solve, (S, X)),
    "device_put": (lambda x: jax.device_put(x, jax.devices()[0]) + 1, (X,)),
    "digamma": (lax.digamma, (P,)), "div": (lax.div, (X, P)), "dot_general": (jnp.matmul, (X, X)),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i[0, 1], 0), (2, 2)), (X, I)),
    "dynamic_update_slice": (lambda x: lax.dynamic_update_slice(x, 2 * x[:2], (1, 0)), (X,)),
    "eigh": (lambda s: lax.linalg.eigh(s)[1], (S,)),
    "eig": (lambda s: jnp.sort(jnp.real(lax.linalg.eig(s)[0])), (S,)),
    "eq": (lax.eq, (X, X)), "erf": (lax.erf, (X,)), "erf_inv": (lax.erf_inv, (U,)),
    "erfc": (lax.erfc, (X,)), "exp": (lax.exp, (X,)), "exp2": (lax.exp2, (X,)),
    "expm1": (lax.expm1, (X,)), "fft": (lambda x: jnp.abs(jnp.fft.fft(x)), (X,)),
    "floor": (lax.floor, (X,)), "gather": (lambda x, i: x[i[0] % 4], (X, I)),
    "ge": (lax.ge, (X, U)), "gt": (lax.gt, (X, U)),
    "hessenberg": (lambda x: lax.linalg.hessenberg(x)[0], (X,)),
    "householder_product": (lambda u: lax.linalg.householder_product(u, u[0]), (U,)),
    "igamma": (lax.igamma, (P, P)), "igamma_grad_a": (lax.igamma_grad_a, (P, P)),
    "igammac": (lax.igammac, (P, P)), "imag": (lambda x: lax.imag(lax.complex(x, 2 * x)), (X,)),
    "integer_pow": (lambda x: x**3, (X,)), "is_finite": (lax.is_finite, (X,)),
    "iota": (lambda x: x + lax.iota(jnp.float32, 4)[None], (X,)),
    "jit": (lambda x: jax.jit(lambda y: jnp.sin(y) * 2)(x), (X,)),
    "le": (lax.le, (X, U)), "lgamma": (lax.lgamma, (P,)), "log": (lax.log, (P,)),
    "log1p": (lax.log1p, (P,)), "logistic": (lax.logistic, (X,)), "lt": (lax.lt, (X, U)),
    "lu": (lambda s: lax.linalg.lu(s)[0], (S,)), "max": (lax.max, (X, U)),
    "min": (lax.min, (X, U)), "mul": (lax.mul, (X, U)), "ne": (lax.ne, (X, U)),
    "name": (lambda x: checkpoint_name(x, "here") + 1, (X,)),
    "neg": (lax.neg, (X,)), "nextafter": (lax.nextafter, (X, P)),
    "pad": (lambda x: lax.pad(x, 0.0, ((1, 1, 0), (0, 0, 1))), (X,)),
    "polygamma": (lambda x: lax.polygamma(jnp.ones_like(x), x), (P,)), "pow": (lax.pow, (P, X)),
    "qr": (lambda x: jnp.abs(jnp.linalg.qr(x)[1]), (X,)),
    "real": (lambda x: lax.real(lax.complex(x, 2 * x)), (X,)),
    "reduce": (lambda x: lax.reduce(x, 0.0, lambda a, b: a + 2 * b, (1,)), (P,)),
    "reduce_max": (lambda x: jnp.max(x, 1), (X,)), "reduce_min": (lambda x: jnp.min(x, 1), (X,)),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 5, 10), (X,)),
    "reduce_prod": (lambda x: jnp.prod(x, 1), (X,)), "reduce_sum": (lambda x: jnp.sum(x, 1), (X,)),
    "reduce_window": (_window(lambda a, b: a + 2 * b, 0.0), (P,)),
    "reduce_window_max": (_window(lax.max, -jnp.inf), (X,)),
    "reduce_window_min": (_window(lax.min, jnp.inf), (X,)),
    "reduce_window_sum": (_window(lax.add, 0.0), (X,)),
    "regularized_incomplete_beta": (lambda x: lax.betainc(x, x + 1, x / 4), (P,)),
    "rem": (lax.rem, (X, P)), "remat2": (jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))), (X,)),
    "reshape": (lambda x: lax.reshape(x, (16,)), (X,)), "rev": (lambda x: lax.rev(x, (0,)), (X,)),
    "round": (lax.round, (X,)), "rsqrt": (lax.rsqrt, (P,)),
    "scan": (lambda x: lax.scan(lambda c, r: (c + r, c * r), jnp.zeros(4), x), (X,)),
    "scatter": (_scatter("set"), (X,)), "scatter-add": (_scatter("add"), (X,)),
    "scatter-max": (_scatter("max"), (X,)), "scatter-min": (_scatter("min"), (X,)),
    "scatter-mul": (_scatter("multiply"), (X,)),
    "schur": (lambda s: jnp.abs(lax.linalg.schur(s)[0]).sum(), (S,)),
    "select_and_gather_add": (_pool_tangent, (X,)),
    "select_and_scatter_add": (_pool_gradient, (X,)),
    "select_n": (lambda b, x: lax.select(b, x, -x), (B, X)), "sign": (lax.sign, (X,)),
    "sin": (lax.sin, (X,)), "sinh": (lax.sinh, (X,)),
    "slice": (lambda x: lax.slice(x, (1, 0), (3, 2)), (X,)),
    "sort": (lambda x: lax.sort(x, 1), (X,)),
    "sqrt": (lax.sqrt, (P,)), "square": (lax.square, (X,)),
    "squeeze": (lambda x: lax.squeeze(x[:, :1], (1,)), (X,)),
    "stop_gradient": (lambda x: lax.stop_gradient(x) * 2, (X,)), "sub": (lax.sub, (X, U)),
    "svd": (lambda x: jnp.linalg.svd(x, compute_uv=False), (X,)), "tan": (lax.tan, (U,)),
    "tanh": (lax.tanh, (X,)), "top_k": (lambda x: lax.top_k(x, 2), (X,)),
    "transpose": (lambda x: lax.transpose(x, (1, 0)), (X,)),
    "triangular_solve": (lambda s, x: lax.linalg.triangular_solve(s, x, lower=True), (S, X)),
    "tridiagonal": (lambda s: jnp.abs(lax.linalg.tridiagonal(s)[1]), (S,)),
    "tridiagonal_solve": (
        lambda d: lax.linalg.tridiagonal_solve(jnp.ones(4), d[0] + 4, jnp.ones(4), d), (P,)
    ),
    "while": (lambda x: lax.while_loop(lambda c: jnp.sum(c) < 99, lambda c: c * 1.5, x), (P,)),
    "zeta": (lambda x: lax.zeta(x + 1, x), (P,)),
}  # fmt: skip

# Not among the published primitives, though public functions bind them.
FLOATS |= {
    "composite": (lax.composite(lambda x: jnp.sin(x) @ x, "test.sin_product"), (X,)),
    "remat_opt": (_remembered, (X,)),
    "scatter-sub": (_scatter("subtract"), (X,)),
    "scatter_apply": (lambda x: x.at[jnp.array([0, 2])].apply(jnp.sin), (X,)),
    "stack": (lambda x: lax.stack([x, 2 * x], 1), (X,)),
    "tile": (lambda x: lax.tile(x, (2, 1)), (X,)),
    "unstack": (lambda x: list(lax.unstack(x, 1)), (X,)),
}

# Primitives of newer releases than the floor's, where they are.
if hasattr(lax, "log2"):
    FLOATS |= {"log2": (lax.log2, (P,))}
if hasattr(lax, "one_minus_square"):
    FLOATS |= {"one_minus_square": (lax.one_minus_square, (U,))}
if hasattr(lax, "polynomial"):
    FLOATS |= {"polynomial": (lambda x: lax.polynomial(x, (1.0, -2.0, 0.5)), (X,))}
if published.closed_call_p.name == "eval_jaxpr":  # since JAX 0.12
    FLOATS |= {"eval_jaxpr": (lambda x: jax.jit(jnp.sin).trace(x)(x), (X,))}

# No float goes in, or none comes out: they run as they are.
OTHERS: dict[str, tuple[Any, tuple]] = {
    "and": (lax.bitwise_and, (I, I)), "or": (lax.bitwise_or, (I, I)),
    "xor": (lax.bitwise_xor, (I, I)), "not": (lax.bitwise_not, (I,)), "clz": (lax.clz, (I,)),
    "population_count": (lax.population_count, (I,)),
    "reduce_and": (lambda b: jnp.all(b, 1), (B,)), "reduce_or": (lambda b: jnp.any(b, 1), (B,)),
    "reduce_xor": (lambda i: lax.reduce_xor(i, (1,)), (I,)),
    "shift_left": (lax.shift_left, (I, I)),
    "shift_right_arithmetic": (lax.shift_right_arithmetic, (I, I)),
    "shift_right_logical": (lax.shift_right_logical, (I, I)),
    "threefry2x32": (lambda k: threefry_2x32(k, jnp.arange(4, dtype=jnp.uint32)), (KEY,)),
    "random_bits": (lambda k: jax.random.uniform(jax.random.key(k[1]), (3,)), (KEY,)),
    "random_fold_in": (
        lambda k: jax.random.uniform(jax.random.fold_in(jax.random.key(k[1]), 3), (3,)), (KEY,)
    ),
    "random_seed": (lambda k: jax.random.uniform(jax.random.key(k[1]), (3,)), (KEY,)),
    "random_split": (
        lambda k: jax.random.uniform(jax.random.split(jax.random.key(k[1]))[0], (3,)), (KEY,)
    ),
    "random_gamma": (lambda k, p: jax.random.gamma(jax.random.key(k[1]), p), (KEY, P)),
    "rng_bit_generator": (
        lambda k: lax.rng_bit_generator(jnp.tile(k, 2), (3,), dtype=jnp.uint32)[1], (KEY,)
    ),
}  # fmt: skip

# Not met in a program of one device that a user writes, and why.
MESH = "needs a mesh: tests/autoscale/test_recipes.py"
ELSEWHERE = {
    "all_gather": MESH, "all_to_all": MESH, "axis_index": MESH, "pmax": MESH, "pmin": MESH,
    "ppermute": MESH, "psum": MESH, "ragged_all_to_all": MESH, "sharding_constraint": MESH,
    "call": "made by JAX's own transformations; inlined",
    "closed_call": "made by JAX's own transformations; inlined",
    "get": "on mutable references, inside Pallas kernels",
    "swap": "on mutable references, inside Pallas kernels",
    "eq_to": "a total order, inside sort's comparator",
    "le_to": "a total order, inside sort's comparator",
    "lt_to": "a total order, inside sort's comparator",
    "after_all": "on tokens of ordered effects",
    "create_token": "on tokens of ordered effects",
    "custom_lin": "exists only while JAX differentiates",
    "empty2": "allocates inside JAX",
    "rng_uniform": "not reproducible; made by no public function",
    "select_and_scatter": "made by no public function with a derivative",
}  # fmt: skip


def arguments(rows: dict) -> dict:
    """Returns the arguments of each row as arrays of JAX."""
    return {name: [jnp.asarray(a) for a in given] for name, (_, given) in rows.items()}


def together(rows: dict, t=lambda f: f):
    """Returns one program of all rows, each behind ``t``: they are compiled at once."""
    return lambda given: {name: t(f)(*given[name]) for name, (f, _) in rows.items()}
