"""More corners of JAX: collectives, products, indices, solvers, loops of unusual kinds."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import sparse
from jax.sharding import AxisType, PartitionSpec

from ._control import layer
from ._table import INT8, ROWS, B, S, V, W, X, feature

P = PartitionSpec


@feature
def reductions_by_functions_of_the_program(t):
    def f(w, x):
        y = jnp.tanh(x @ w)
        pair = lax.reduce(
            (x, lax.broadcasted_iota(jnp.int32, y.shape, 1)), (-jnp.inf, jnp.int32(0)),
            lambda a, b: tuple(jnp.where(a[0] >= b[0], p, q) for p, q in zip(a, b, strict=True)),
            (1,),
        )  # fmt: skip
        squares = lax.reduce(y, np.float32(0), lambda a, b: lax.add(a, b), (0,))
        windows = lax.reduce_window(y, np.float32(1), lambda a, b: a * b, (1, 2), (1, 2), "VALID")
        return pair, squares, windows, lax.reduce_or(x > 0.5, (1,))

    return t(f)(W, X)


@feature
def sparse_products_and_their_gradients(t):
    dense = np.where(np.abs(W) > 0.3, W, 0)
    matrix = sparse.BCOO.fromdense(dense, nse=64)

    def f(data, x):
        product = sparse.BCOO((data, matrix.indices), shape=matrix.shape) @ x.T
        return jnp.sum(jnp.tanh(product) ** 2)

    sums = sparse.sparsify(lambda m, x: jnp.sum(m @ x.T))
    return t(jax.grad(f, (0, 1)))(matrix.data, X), t(lambda m, x: sums(m, x))(matrix, X)


@feature
def indices_below_zero_and_out_of_range(t):
    def f(w, x, i):
        y = x @ w
        return (
            lax.dynamic_slice(y, (i, jnp.int32(0)), (2, 16)), y[-1], y[i, -2],
            lax.dynamic_index_in_dim(y, -i, 1), y.at[100].get(mode="clip"),
            y.at[jnp.array([0, 50])].set(1.0, mode="drop"), y.at[-i].add(y[0]),
            jnp.take(y, ROWS - 3, axis=0, mode="wrap"), lax.dynamic_update_slice(y, x, (i, i)),
        )  # fmt: skip

    return t(jax.jit(f))(W, X, jnp.int32(-3))


@feature
def collectives_of_all_kinds_over_vmap(t):
    def f(w, x):
        def row(r):
            r = r @ w
            turned = lax.ppermute(r, "i", [(k, (k + 1) % 8) for k in range(8)])
            parts = lax.all_to_all(r[:8], "i", 0, 0)
            scattered = lax.psum_scatter(r[:8], "i", scatter_dimension=0)
            return turned, parts, scattered, lax.pmax(r, "i"), lax.psum(1, "i")

        return jax.vmap(row, axis_name="i")(x)

    return t(f)(W, X)


@feature
def collectives_of_all_kinds_over_a_mesh(t):
    n = jax.device_count()
    mesh = jax.make_mesh((n,), ("i",), axis_types=(AxisType.Auto,))

    def body(w, x):
        y = lax.psum_scatter(layer(w, x), "i", scatter_dimension=1, tiled=True)
        y = lax.ppermute(y, "i", [(k, (k + 1) % n) for k in range(n)])
        y = lax.all_gather(y, "i", axis=1, tiled=True)
        return y + lax.axis_index("i").astype(y.dtype)

    def f(w, x):
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"), check_vma=False
        )
        return jnp.mean(mapped(w, x) ** 2)

    return t(jax.jit(jax.value_and_grad(f)))(W, X)


@feature
def products_with_precisions(t):
    def f(w, x):
        with jax.default_matmul_precision("float32"):
            y = jnp.matmul(x, w, precision="highest")
        algorithm = lax.DotAlgorithmPreset.F32_F32_F32
        z = lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=algorithm)
        return y, z, lax.dot(x, w, preferred_element_type=jnp.float32), jnp.vecdot(x, y)

    return t(f)(W, X)


@feature
def convolutions_of_all_kinds(t):
    def f(k, x):
        image = x.reshape(1, 4, 8, 4)
        kernel = k[:, :4].reshape(2, 2, 4, 4)
        names = ("NHWC", "HWIO", "NHWC")
        conv = functools.partial(lax.conv_general_dilated, dimension_numbers=names)
        grouped = conv(image, kernel[:, :, :1], (1, 1), "VALID", feature_group_count=4)
        dilated = conv(
            image, kernel, (1, 1), ((1, 1), (0, 2)), lhs_dilation=(2, 1), rhs_dilation=(1, 2)
        )
        turned = lax.conv_transpose(image, kernel, (2, 2), "SAME", dimension_numbers=names)
        patches = lax.conv_general_dilated_patches(
            image, (2, 2), (1, 1), "VALID", dimension_numbers=names
        )
        return sum(jnp.mean(y**2) for y in (grouped, dilated, turned, patches))

    return t(jax.value_and_grad(f))(W, X)


@feature
def mutable_arrays_inside(t):
    def f(w, x):
        total = jax.new_ref(jnp.zeros((8, 16)))
        rows = jax.new_ref(x)

        def body(i, _):
            total[...] += rows[...] @ w * (i + 1)
            rows[0] = total[i]
            return _

        with jax.numpy_dtype_promotion("standard"):
            lax.fori_loop(0, 3, body, None)
        return total[...]

    return t(f)(W, X)


@feature
def solvers_of_linear_systems(t):
    def f(s, b):
        gmres = jax.scipy.sparse.linalg.gmres(lambda v: s @ v, b, tol=1e-3, maxiter=3)[0]
        stable = jax.scipy.sparse.linalg.bicgstab(lambda v: s @ v, b, maxiter=8)[0]
        upper = jax.scipy.linalg.solve_triangular(s, b)
        band = jnp.full(16, 0.2)
        inside = band.at[0].set(0), jnp.full(16, 2.0), band.at[-1].set(0)
        return gmres, stable, upper, lax.linalg.tridiagonal_solve(*inside, b[:, None])

    return t(f)(S, B)


@feature
def wide_floats_inside(t):
    def f(w, x):
        with jax.enable_x64(True):
            y = jnp.sum(x.astype(jnp.float64) ** 2).astype(jnp.float32)
        return x @ w, y

    return t(jax.jit(f))(W, X)


@feature
def quantized_attention_cache(t):
    """Keys stored in 8-bit integers with a scale for each row, written at an index."""

    def f(q, cache, scales, row, i):
        scale = jnp.max(jnp.abs(row)) / 127
        cache = cache.at[i].set(jnp.round(row / scale).astype(jnp.int8))
        scales = scales.at[i].set(scale)
        scores = q @ (cache.astype(q.dtype) * scales[:, None]).T
        return jax.nn.softmax(scores), cache, scales

    return t(f)(X, INT8[:8], jnp.full(8, 1 / 64), jnp.round(V[0] * 0) + 1, jnp.int32(5))


def promoting():
    """Returns contexts in which libraries promote as they like."""
    contexts = contextlib.ExitStack()
    contexts.enter_context(jax.numpy_dtype_promotion("standard"))
    contexts.enter_context(jax.numpy_rank_promotion("allow"))
    return contexts
