"""Arguments with which the proofs call the float functions of JAX's numeric modules.

``names()`` lists the public functions of jax.numpy, jax.lax, jax.nn, jax.scipy.special and
jax.random. One that accepts a common argument list is called with the first that gives finite
results; ``EXPLICIT`` has the calls of all others, ``WITHOUT`` the functions that take no floats.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as special
import numpy as np
from jax import lax, nn
from jax import random as jr


def _short(x: Any) -> np.ndarray:
    """Float32 numbers of eight significant bits: formats of more round none of them."""
    return np.asarray(x).astype(jnp.bfloat16).astype(np.float32)


def _normal(seed: int, *shape: int) -> np.ndarray:
    """``jr.normal`` of a seed, which compiles for one length: a number depends on its place."""
    drawn = np.asarray(jr.normal(jr.key(seed), (128,)))
    return _short(drawn[: math.prod(shape)].reshape(shape))


X = _normal(0, 4, 4)
P = _short(np.abs(X) + 0.5)  # positive
U = _short(np.tanh(X) * 0.9)  # within (-1, 1)
V, W = X[0], P[1]
KEY = jr.key(1)
I = jnp.asarray([0, 2])  # noqa: E741
MODULES = {
    "jnp": jnp, "lax": lax, "nn": nn, "special": special, "random": jr,
}  # fmt: skip

# Argument lists that are tried in turn; numbers and tuples are static.
COMMON: list[tuple] = [
    (U,), (P,), (P + 1,), (X, P), (U, U), (P, P), (X, P, P), (P, P, np.abs(U)), (V,), (V, W),
    (X, 0), (X, 1), (X, (0,)), (P, 2), ([X, P],), (X, P, 0),
]  # fmt: skip
RANDOM: list[tuple] = [(KEY, (8,)), (KEY, P), (KEY, P, P), (KEY, X)]

DOT = (((1,), (0,)), ((), ()))
IMAGE = _normal(2, 1, 2, 6, 6)  # NCHW
FILTER = _normal(3, 3, 2, 3, 3)  # OIHW
GROUPS = jnp.asarray([1, 3], jnp.int32)
ROWS = lax.ScatterDimensionNumbers((1,), (0,), (0,))
PICK = lax.GatherDimensionNumbers((1,), (0,), (0,))


def _scatter(f: Callable) -> tuple[Callable, tuple]:
    return (lambda x, u: f(x, I[:, None], u, ROWS)), (X, P[:2])


# name: (function of float arrays, its arguments)
EXPLICIT: dict[str, tuple[Callable, tuple]] = {
    "jnp.apply_along_axis": (lambda x: jnp.apply_along_axis(jnp.sum, 0, x), (X,)),
    "jnp.apply_over_axes": (lambda x: jnp.apply_over_axes(jnp.sum, x, (0,)), (X,)),
    "jnp.argwhere": (lambda x: jnp.argwhere(x > 0, size=4), (X,)),
    "jnp.astype": (lambda x: jnp.astype(x, jnp.float16), (X,)),
    "jnp.broadcast_to": (lambda x: jnp.broadcast_to(x, (2, 4, 4)), (X,)),
    "jnp.choose": (lambda x: jnp.choose(np.array([0, 1, 0, 1]), [x[0], x[1]], mode="clip"), (X,)),
    "jnp.compress": (lambda x: jnp.compress(np.array([True, False, True]), x, 0, size=2), (X[:3],)),
    "jnp.cross": (lambda x, y: jnp.cross(x, y), (X[:3, :3], P[:3, :3])),
    "jnp.dsplit": (lambda x: jnp.dsplit(x, 2), (IMAGE[0],)),
    "jnp.einsum": (lambda x, y: jnp.einsum("ij,kj->ik", x, y), (X, P)),
    "jnp.extract": (lambda x: jnp.extract(x > 0, x, size=4), (X,)),
    "jnp.flatnonzero": (lambda x: jnp.flatnonzero(x > 0, size=4), (X,)),
    "jnp.fill_diagonal": (lambda x: jnp.fill_diagonal(x, 2.0, inplace=False), (X,)),
    "jnp.full_like": (lambda x: jnp.full_like(x, 2.0), (X,)),
    "jnp.histogram": (lambda x: jnp.histogram(x, 4)[1], (V,)),
    "jnp.interp": (lambda x, y: jnp.interp(x, jnp.arange(4.0), y), (P, V)),
    "jnp.isclose": (lambda x: jnp.isclose(x, x + 1.0), (X,)),
    "jnp.ldexp": (lambda x: jnp.ldexp(x, 3), (X,)),
    "jnp.moveaxis": (lambda x: jnp.moveaxis(x, 0, 1), (X,)),
    "jnp.nonzero": (lambda x: jnp.nonzero(x > 0, size=4), (X,)),
    "jnp.permute_dims": (lambda x: jnp.permute_dims(x, (1, 0)), (X,)),
    "jnp.piecewise": (lambda x: jnp.piecewise(x, [x > 0], [jnp.sin, jnp.cos]), (X,)),
    "jnp.place": (lambda x: jnp.place(x, x > 0, jnp.ones(1), inplace=False), (X,)),
    "jnp.polyfit": (lambda y: jnp.polyfit(jnp.arange(4.0), y, 2), (V,)),
    "jnp.put": (lambda x: jnp.put(x, I, jnp.ones(2), inplace=False), (X,)),
    "jnp.put_along_axis": (
        lambda x: jnp.put_along_axis(x, jnp.ones((4, 1), int), 2.0, 1, inplace=False), (X,),
    ),
    "jnp.quantile": (lambda x: jnp.quantile(x, 0.3, axis=1), (X,)),
    "jnp.nanquantile": (lambda x: jnp.nanquantile(x, 0.3, axis=1), (X,)),
    "jnp.percentile": (lambda x: jnp.percentile(x, 30.0, axis=1), (X,)),
    "jnp.nanpercentile": (lambda x: jnp.nanpercentile(x, 30.0, axis=1), (X,)),
    "jnp.repeat": (lambda x: jnp.repeat(x, 2, 0), (X,)),
    "jnp.reshape": (lambda x: jnp.reshape(x, (2, 8)), (X,)),
    "jnp.resize": (lambda x: jnp.resize(x, (3, 8)), (X,)),
    "jnp.roots": (lambda x: jnp.abs(jnp.roots(x, strip_zeros=False)), (W,)),
    "jnp.select": (lambda x: jnp.select([x > 0, x < -1], [x, 2 * x]), (X,)),
    "jnp.swapaxes": (lambda x: jnp.swapaxes(x, 0, 1), (X,)),
    "jnp.take": (lambda x: jnp.take(x, I, 1), (X,)),
    "jnp.take_along_axis": (lambda x: jnp.take_along_axis(x, jnp.ones((4, 1), int), 1), (X,)),
    "jnp.tile": (lambda x: jnp.tile(x, (2, 1)), (X,)),
    "jnp.insert": (lambda x, row: jnp.insert(x, 1, row, axis=0), (X, W)),
    "jnp.intersect1d": (lambda x, y: jnp.intersect1d(x, y, size=4), (X, X[1:])),
    "jnp.setdiff1d": (lambda x, y: jnp.setdiff1d(x, y, size=8), (V, X[1:])),
    "jnp.setxor1d": (lambda x, y: jnp.setxor1d(x, y, size=8), (V, W)),
    "jnp.union1d": (lambda x, y: jnp.union1d(x, y, size=8), (V, W)),
    "jnp.unique": (lambda x: jnp.unique(x, size=16), (X,)),
    "jnp.unique_values": (lambda x: jnp.unique_values(x, size=16), (X,)),
    "jnp.unique_all": (lambda x: jnp.unique_all(x, size=16)[0], (X,)),
    "jnp.unique_counts": (lambda x: jnp.unique_counts(x, size=16)[0], (X,)),
    "jnp.unique_inverse": (lambda x: jnp.unique_inverse(x, size=16)[0], (X,)),
    "jnp.kaiser": (lambda x: jnp.kaiser(4, x), (P[0, 0],)),
    "jnp.vander": (lambda x: jnp.vander(x), (V,)),
    "jnp.vectorize": (lambda x: jnp.vectorize(jnp.sum, signature="(n)->()")(x), (X,)),
    "jnp.where": (lambda x: jnp.where(x > 0, x, 2 * x), (X,)),
    "jnp.linspace": (lambda x, y: jnp.linspace(x, y, 5), (V, W)),
    "jnp.logspace": (lambda x, y: jnp.logspace(x, y, 5), (V, W)),
    "jnp.geomspace": (lambda x, y: jnp.geomspace(x, y, 5), (W, W + 1)),
    "lax.argmax": (lambda x: lax.argmax(x, 1, jnp.int32), (X,)),
    "lax.argmin": (lambda x: lax.argmin(x, 1, jnp.int32), (X,)),
    "lax.associative_scan": (lambda x: lax.associative_scan(jnp.multiply, x), (X,)),
    "lax.bitcast_convert_type": (lambda x: lax.bitcast_convert_type(x, jnp.int32), (X,)),
    "lax.broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (2, 4, 4), (1, 2)), (X,)),
    "lax.collapse": (lambda x: lax.collapse(x, 0, 2), (X,)),
    "lax.composite": (lambda x: lax.composite(jnp.sin, "test.sin")(x), (X,)),
    "lax.cond": (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), (X,)),
    "lax.conv": (lambda x, k: lax.conv(x, k, (1, 1), "SAME"), (IMAGE, FILTER)),
    "lax.conv_general_dilated": (
        lambda x, k: lax.conv_general_dilated(x, k, (2, 1), "VALID"), (IMAGE, FILTER),
    ),
    "lax.conv_general_dilated_local": (
        lambda x, k: lax.conv_general_dilated_local(x, k, (1, 1), "VALID", (3, 3)),
        (IMAGE, np.ones((3, 18, 4, 4), np.float32)),
    ),
    "lax.conv_general_dilated_patches": (
        lambda x: lax.conv_general_dilated_patches(x, (2, 2), (1, 1), "VALID"), (IMAGE,),
    ),
    "lax.conv_transpose": (
        lambda x, k: lax.conv_transpose(x, k, (2, 2), "SAME"),
        (IMAGE.transpose(0, 2, 3, 1), FILTER.transpose(2, 3, 1, 0)),
    ),
    "lax.conv_with_general_padding": (
        lambda x, k: lax.conv_with_general_padding(x, k, (1, 1), "SAME", None, None),
        (IMAGE, FILTER),
    ),
    "lax.convert_element_type": (lambda x: lax.convert_element_type(x, jnp.bfloat16), (X,)),
    "lax.custom_linear_solve": (
        lambda x: lax.custom_linear_solve(lambda y: 2 * y, x, lambda f, y: y / 2, symmetric=True),
        (V,),
    ),
    "lax.custom_root": (
        lambda x: lax.custom_root(
            lambda y: y**2 - x, x, lambda f, y: jnp.sqrt(x), lambda g, y: y / g(1.0)
        ),
        (P[0, 0],),
    ),
    "lax.dot_general": (lambda x, y: lax.dot_general(x, y, DOT), (X, P)),
    "lax.dynamic_slice": (lambda x: lax.dynamic_slice(x, (1, 0), (2, 2)), (X,)),
    "lax.dynamic_index_in_dim": (lambda x: lax.dynamic_index_in_dim(x, 1), (X,)),
    "lax.dynamic_slice_in_dim": (lambda x: lax.dynamic_slice_in_dim(x, 1, 2), (X,)),
    "lax.dynamic_update_slice": (
        lambda x, y: lax.dynamic_update_slice(x, y, (1, 0)), (X, P[:2, :2]),
    ),
    "lax.dynamic_update_index_in_dim": (
        lambda x, y: lax.dynamic_update_index_in_dim(x, y, 1, 0), (X, W),
    ),
    "lax.dynamic_update_slice_in_dim": (
        lambda x, y: lax.dynamic_update_slice_in_dim(x, y, 1, 0), (X, P[:2]),
    ),
    "lax.fft": (lambda x: jnp.real(lax.fft(x, "RFFT", (4,))), (X,)),
    "lax.fori_loop": (lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) * x, x), (X,)),
    "lax.full_like": (lambda x: lax.full_like(x, 2.0), (X,)),
    "lax.gather": (lambda x: lax.gather(x, I[:, None], PICK, (1, 4)), (X,)),
    "lax.imag": (lambda x: lax.imag(lax.complex(x, x)), (X,)),
    "lax.index_in_dim": (lambda x: lax.index_in_dim(x, 1), (X,)),
    "lax.index_take": (lambda x: lax.index_take(x, (I,), (0,)), (X,)),
    "lax.integer_pow": (lambda x: lax.integer_pow(x, 3), (X,)),
    "lax.map": (lambda x: lax.map(jnp.sin, x), (X,)),
    "lax.nextafter": (lambda x: lax.nextafter(x, x + 1), (X,)),
    "lax.pad": (lambda x: lax.pad(x, 0.5, ((1, 1, 0), (0, 0, 1))), (X,)),
    "lax.platform_dependent": (
        lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.sin), (X,),
    ),
    "lax.polynomial": (lambda x: lax.polynomial(x, (1.0, -2.0, 0.5)), (X,)),
    "lax.ragged_dot": (lambda x, y: lax.ragged_dot(x, jnp.stack([y, y]), GROUPS), (X, P)),
    "lax.ragged_dot_general": (
        lambda x, y: lax.ragged_dot_general(
            x, jnp.stack([y, y]), GROUPS,
            lax.RaggedDotDimensionNumbers((([1], [1]), ([], [])), [0], [0]),
        ),
        (X, P),
    ),
    "lax.real": (lambda x: lax.real(lax.complex(x, x)), (X,)),
    "lax.reduce": (lambda x: lax.reduce(x, 1.0, lambda a, b: a * b, (0,)), (X,)),
    "lax.reduce_precision": (lambda x: lax.reduce_precision(x, 5, 10), (X,)),
    "lax.reduce_window": (
        lambda x: lax.reduce_window(x, x[0, 0], lax.mul, (2, 2), (1, 1), "VALID"), (X,),
    ),
    "lax.reshape": (lambda x: lax.reshape(x, (2, 8)), (X,)),
    "lax.scan": (lambda x: lax.scan(lambda c, r: (c * r, c + r), x[0], x), (X,)),
    "lax.scatter": _scatter(lax.scatter),
    "lax.scatter_add": _scatter(lax.scatter_add),
    "lax.scatter_apply": (
        lambda x: lax.scatter_apply(x, I[:, None], jnp.sin, ROWS, update_shape=(2, 4)), (X,),
    ),
    "lax.scatter_max": _scatter(lax.scatter_max),
    "lax.scatter_min": _scatter(lax.scatter_min),
    "lax.scatter_mul": (
        lambda x, u: lax.scatter_mul(x, I[:, None], u, ROWS, unique_indices=True), (X, P[:2]),
    ),
    "lax.scatter_sub": _scatter(lax.scatter_sub),
    "lax.select": (lambda x: lax.select(x > 0, x, 2 * x), (X,)),
    "lax.select_n": (lambda x: lax.select_n(x > 0, x, 2 * x), (X,)),
    "lax.slice": (lambda x: lax.slice(x, (1, 0), (3, 4)), (X,)),
    "lax.slice_in_dim": (lambda x: lax.slice_in_dim(x, 1, 3), (X,)),
    "lax.split": (lambda x: lax.split(x, (1, 3)), (X,)),
    "lax.squeeze": (lambda x: lax.squeeze(x, (0,)), (IMAGE,)),
    "lax.switch": (lambda x: lax.switch(jnp.argmax(x[0]) % 2, [jnp.sin, jnp.cos], x), (X,)),
    "lax.tile": (lambda x: lax.tile(x, (2, 1)), (X,)),
    "lax.top_k": (lambda x: lax.top_k(x, 2), (X,)),
    "lax.approx_max_k": (lambda x: lax.approx_max_k(x, 2), (X,)),
    "lax.approx_min_k": (lambda x: lax.approx_min_k(x, 2), (X,)),
    "lax.transpose": (lambda x: lax.transpose(x, (1, 0)), (X,)),
    "lax.while_loop": (
        lambda x: lax.while_loop(lambda c: jnp.sum(c) < 99, lambda c: c * 1.5, x), (P,),
    ),
    "nn.dot_product_attention": (
        lambda q: nn.dot_product_attention(q, q, q), (np.reshape(X, (1, 4, 2, 2)),),
    ),
    "nn.one_hot": (lambda x: nn.one_hot(jnp.arange(4), 4) * x, (X,)),
    "special.bernoulli": (lambda x: special.bernoulli(4) * x, (P[0, 0],)),
    # more iterations leave float32's range on the way
    "special.bessel_jn": (lambda x: special.bessel_jn(x, v=2, n_iter=10), (W,)),
    "special.hyp2f1": (lambda x: special.hyp2f1(0.5, 1.5, 2.5, x), (np.abs(U[0]) / 2,)),
    "special.sph_harm_y": (
        lambda x: jnp.real(special.sph_harm_y(jnp.array([1]), jnp.array([0]), x, x, n_max=2)),
        (W[:1],),
    ),
    "special.lpmn": (lambda x: special.lpmn(2, 2, x), (U[0],)),
    "special.lpmn_values": (lambda x: special.lpmn_values(2, 2, x, True), (U[0],)),
    "special.multigammaln": (lambda x: special.multigammaln(x + 2, 2), (P,)),
    "special.polygamma": (lambda x: special.polygamma(1, x), (P,)),
    "random.ball": (lambda x: jr.ball(KEY, 2, shape=(4,)) * x[:4, None], (V,)),
    "random.binomial": (lambda p: jr.binomial(KEY, 5.0, p, dtype=jnp.float32), (np.abs(U),)),
    "random.choice": (lambda x: jr.choice(KEY, x), (V,)),
    "random.multinomial": (
        lambda p: jr.multinomial(KEY, 5.0, jax.nn.softmax(p), dtype=jnp.float32), (W,),
    ),
    "random.dirichlet": (lambda a: jr.dirichlet(KEY, a), (W,)),
    "random.generalized_normal": (lambda x: jr.generalized_normal(KEY, 2.0, (4,)) * x, (V,)),
    "random.multivariate_normal": (lambda m: jr.multivariate_normal(KEY, m, jnp.eye(4)), (V,)),
    "random.orthogonal": (lambda x: jnp.abs(jr.orthogonal(KEY, 4)) * x, (X,)),
    "random.poisson": (lambda x: jr.poisson(KEY, x), (P,)),
    "random.triangular": (lambda x: jr.triangular(KEY, x, x + 1, x + 3), (V,)),
    "random.truncated_normal": (lambda x: jr.truncated_normal(KEY, x, x + 1), (V,)),
}  # fmt: skip

# Functions without float arguments or without results that depend on them, or that need a mesh
# or a file.
WITHOUT = {
    "jnp": """arange array_equal array_equiv array_repr array_str bartlett bincount bitwise_and
        bitwise_count bitwise_invert bitwise_left_shift bitwise_not bitwise_or
        bitwise_right_shift bitwise_xor blackman broadcast_shapes can_cast diag_indices
        diag_indices_from dtype einsum_path empty eye from_dlpack frombuffer fromfile
        fromfunction fromiter frompyfunc fromstring full gcd get_printoptions hamming
        hanning identity indices invert isdtype isrealobj iscomplexobj isscalar issubdtype
        iterable lcm left_shift load mask_indices ndim ones packbits printoptions
        promote_types ravel_multi_index result_type right_shift save savez set_printoptions
        shape size tri tril_indices tril_indices_from triu_indices triu_indices_from
        trim_zeros unpackbits unravel_index zeros ix_""",
    "lax": """ConvGeneralDilatedDimensionNumbers PrecisionLike after_all all_gather all_to_all
        axis_index axis_size bitwise_and bitwise_not bitwise_or bitwise_xor broadcast_shapes
        broadcasted_iota clz conv_dimension_numbers conv_general_permutations
        conv_general_shape_tuple conv_shape_tuple conv_transpose_shape_tuple create_token
        dce_sink dtype empty full iota mulhi padtype_to_pads pbroadcast pcast
        population_count ppermute precv psend pshuffle psum_scatter pswapaxes
        ragged_all_to_all reduce_and reduce_or reduce_xor reduce_window_shape_tuple
        rng_bit_generator rng_uniform shift_left shift_right_arithmetic shift_right_logical
        with_sharding_constraint psum pmax pmin pmean all_gather_reduced preduced pvary
        unreduced_psum unreduced_psum_scatter optimization_barrier_p""",
    "nn": """get_scaled_dot_general_config scaled_dot_general scaled_matmul""",
    "special": """""",
    "random": """PRNGKey bits clone fold_in key key_data key_dtype key_impl randint split
        wrap_key_data default_prng_impl""",
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A function of arrays and the arrays that it is called with."""

    name: str
    function: Callable
    arguments: tuple


def _tried(name: str, f: Callable) -> Call | None:
    """Returns the first common arguments that a function accepts, preferring finite results."""
    found = None
    for arguments in RANDOM if name.startswith("random.") else COMMON:
        arrays = [a for a in arguments if isinstance(a, np.ndarray)]
        lists = any(isinstance(a, list) for a in arguments)

        def function(*given: Any, f: Callable = f, arguments: tuple = arguments) -> Any:
            some = iter(given)
            if isinstance(arguments[0], list):
                return f(list(given))
            return f(*[next(some) if isinstance(a, np.ndarray) else a for a in arguments])

        given = tuple(arguments[0]) if lists else tuple(arrays)
        try:
            outs = jax.tree.leaves(jax.jit(function)(*given))
        except Exception:
            continue
        if not outs or not all(isinstance(y, jax.Array) for y in outs):
            continue
        call = Call(name, function, given)
        if all(np.isfinite(np.asarray(y, np.float64)).all() for y in outs if _is_real(y)):
            return call
        found = found or call
    return found


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def names() -> list[str]:
    """Returns the names of the modules' public functions that take floats."""
    found = []
    for short, module in MODULES.items():
        for name in sorted(dir(module)):
            f = getattr(module, name)
            function = callable(f) and not inspect.isclass(f) and type(f).__name__ != "_ScalarMeta"
            if function and not name.startswith("_") and name not in WITHOUT[short].split():
                found.append(f"{short}.{name}")
    return found


def call(name: str) -> Call | None:
    """Returns the call of a function, or None if there is none."""
    if name in EXPLICIT:
        return Call(name, *EXPLICIT[name])
    short, _, function = name.partition(".")
    return _tried(name, getattr(MODULES[short], function))
