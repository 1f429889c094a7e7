"""Calls to Python, kernels, meshes, jitted functions, names; random numbers; kinds of arguments."""

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify, io_callback, pallas
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ._control import layer, loss
from ._table import MASK, ROWS, B, V, W, X, feature, outside

P = PartitionSpec


@feature
def debug_print(t):
    def f(w, x):
        y = x @ w
        jax.debug.print("mean {}, rows {n}", y.mean(), n=jnp.int32(3))
        return jnp.sum(y * y)

    return t(jax.grad(f))(W, X)


@feature
def debug_callback_in_a_scan(t):
    seen = []

    def f(w, x):
        def body(x, i):
            jax.debug.callback(lambda i, x: seen.append(i), i, x, ordered=True)
            return layer(w, x), None

        return jnp.mean(lax.scan(body, x, jnp.arange(3))[0])

    got = t(jax.grad(f))(W, X)
    jax.effects_barrier()
    assert seen
    return got


@feature
def inspect_sharding(t):
    def f(w, x):
        jax.debug.inspect_array_sharding(x @ w, callback=lambda s: None)
        return loss(w, x)

    return t(jax.jit(jax.grad(f)))(W, X)


@feature
def pure_callback(t):
    def f(w, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        y = jax.pure_callback(lambda x: np.tanh(x), shape, x @ w, vmap_method="expand_dims")
        return y @ w

    return t(f)(W, X)


@feature
def io_callback_without_results(t):
    seen = []

    def f(w, x):
        y = x @ w
        io_callback(lambda n, y: seen.append((n, y)), None, jnp.int32(1), y, ordered=True)
        return jnp.sum(y * y)

    got = t(f)(W, X)
    jax.effects_barrier()
    assert seen[0][1].dtype == np.float32
    return got


@feature
def io_callback_of_integers(t):
    shape = jax.ShapeDtypeStruct((), jnp.int32)
    return t(lambda w, x: (io_callback(lambda: np.int32(7), shape), x @ w))(W, X)


@feature
def equinox_error_if(t):
    def f(w, x):
        y = x @ w
        y = eqx.error_if(y, jnp.any(jnp.isnan(y)), "not a number")
        return jnp.sum(y * y)

    return t(jax.grad(f))(W, X)


@feature
def checked(t):
    def f(w, x):
        y = x @ w
        checkify.check(jnp.all(jnp.isfinite(y)), "infinite")
        return y

    error, y = t(lambda w, x: checkify.checkify(f)(w, x))(W, X)
    return y if error is None or not hasattr(error, "throw") else (error.throw(), y)[1]


@feature
def pallas_kernel(t):
    def kernel(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    def f(w, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas.pallas_call(kernel, out_shape=shape, interpret=True)(x @ w)

    return t(f)(W, X)


@feature
def shard_map(t):
    mesh = jax.make_mesh((jax.device_count(),), ("i",), axis_types=(AxisType.Auto,))

    def f(w, x):
        def body(w, x):
            return lax.psum(jnp.mean(layer(w, x) ** 2), "i")

        return jax.shard_map(body, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())(w, x)

    return t(jax.grad(f))(W, X)


@feature
def pmap_inside(t):
    def f(w, x):
        return jax.pmap(lambda x: lax.pmean(jnp.tanh(x @ w), "i"), axis_name="i")(x[None])

    return t(f)(W, X)


@feature
def sharding_constraint(t):
    mesh = jax.make_mesh((jax.device_count(),), ("i",), axis_types=(AxisType.Auto,))

    def f(w, x):
        return lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("i")))

    return t(jax.jit(f))(W, X)


@feature
def auto_axes(t):
    mesh = jax.make_mesh((jax.device_count(),), ("i",), axis_types=(AxisType.Explicit,))

    def f(w, x):
        inner = jax.sharding.auto_axes(lambda w, x: jnp.tanh(x @ w), out_sharding=P("i", None))
        return jnp.mean(inner(w, x) @ w)

    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("i", None)))
        w = jax.device_put(W, NamedSharding(mesh, P(None, None)))
        return jax.tree.map(np.asarray, t(jax.value_and_grad(f))(w, x))


@feature
def auto_axes_within_a_loop(t):
    mesh = jax.make_mesh((jax.device_count(),), ("i",), axis_types=(AxisType.Explicit,))

    def f(w, x):
        inner = jax.sharding.auto_axes(lambda w, x: jnp.tanh(x @ w), out_sharding=P("i", None))
        return jnp.mean(lax.scan(lambda x, _: (inner(w, x), None), x, None, 2)[0] ** 2)

    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("i", None)))
        w = jax.device_put(W, NamedSharding(mesh, P(None, None)))
        return jax.tree.map(np.asarray, t(jax.value_and_grad(f))(w, x))


@feature
def rows_gathered_over_an_explicit_mesh(t):
    mesh = jax.make_mesh((jax.device_count(),), ("i",), axis_types=(AxisType.Explicit,))

    def f(w, x):
        y = (x @ w).at[ROWS[:4]].get(out_sharding=P(None, None))
        return jnp.mean(jax.sharding.reshard(y, P("i", None)) ** 2)

    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("i", None)))
        w = jax.device_put(W, NamedSharding(mesh, P(None, None)))
        return jax.tree.map(np.asarray, t(f)(w, x))


def _with_explicit_axes(w, x):
    inner = jax.sharding.explicit_axes(
        lambda w, x: jnp.tanh(x @ w), in_sharding=(P(None, None), P("i", None))
    )
    return jnp.mean(inner(w, x) ** 2)


@outside
def explicit_axes(t):
    mesh = jax.make_mesh((jax.device_count(),), ("i",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        step = jax.jit(t(jax.value_and_grad(_with_explicit_axes)))
        from_outside = jax.value_and_grad(t(_with_explicit_axes))
        return jax.tree.map(np.asarray, (step(W, X), from_outside(W, X)))


@feature
def explicit_axes_eagerly(t):
    mesh = jax.make_mesh((jax.device_count(),), ("i",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        return jax.tree.map(np.asarray, t(jax.value_and_grad(_with_explicit_axes))(W, X))


@feature
def collectives_over_vmap(t):
    def f(w, x):
        def row(r):
            r = r @ w
            return r - lax.pmean(r, "i"), lax.all_gather(r, "i"), lax.axis_index("i")

        return jax.vmap(row, axis_name="i")(x)

    return t(f)(W, X)


@feature
def jitted_functions(t):
    @functools.partial(jax.jit, static_argnames="power", donate_argnums=1)
    def f(w, x, *, power):
        return jnp.tanh(x @ w) ** power

    return t(lambda w, x: f(w, jnp.copy(x), power=2) + f(w, jnp.copy(x), power=3))(W, X)


@feature
def compile_time_evaluation(t):
    def f(w, x):
        with jax.ensure_compile_time_eval():
            scale = float(jnp.sum(jnp.arange(4.0)))
        return x @ w * scale

    return t(f)(W, X)


@feature
def choice_by_platform(t):
    def f(w, x):
        return lax.platform_dependent(w, x, cpu=layer, default=lambda w, x: x @ w)

    return t(jax.jit(f))(W, X)


@feature
def composite(t):
    f = lax.composite(lambda w, x: jnp.tanh(x @ w), "scalewise.test")
    return t(lambda w, x: f(w, x))(W, X)


@feature
def optimization_barrier(t):
    def f(w, x):
        y, n = lax.optimization_barrier((x @ w, jnp.int32(2)))
        return y * n.astype(y.dtype)

    return t(jax.grad(lambda w, x: jnp.mean(f(w, x) ** 2)))(W, X)


@feature
def random_draws(t):
    def f(w, x, key):
        a, b, c = jax.random.split(key, 3)
        dropped = jnp.where(jax.random.bernoulli(a, 0.8, x.shape), x / 0.8, 0)
        noise = jax.random.normal(b, x.shape) + jax.random.uniform(c, x.shape)
        return dropped @ w + noise, jax.random.randint(a, (4,), 0, 100)

    return t(f)(W, X, jax.random.key(0))


@feature
def random_bit_generator_of_the_device(t):
    key = jax.random.key(0, impl="rbg")
    return t(lambda w, x, key: x @ w + jax.random.normal(key, x.shape))(W, X, key)


@feature
def legacy_keys(t):
    def f(w, x, key):
        return x @ w + jax.random.normal(jax.random.fold_in(key, 3), x.shape)

    return t(f)(W, X, jax.random.PRNGKey(0))


class Layer(NamedTuple):
    w: jax.Array
    b: jax.Array | None
    count: int


@feature
def arguments_in_pytrees(t):
    def f(layers, *, x, scale=2.0, name=None):
        for each in layers.values():
            x = jnp.tanh(x @ each.w) * scale + (0 if each.b is None else each.b)
        return {"x": x, "count": sum(each.count for each in layers.values()), "name": name}

    layers = {"a": Layer(W, None, 1), "b": Layer(V, B[None], 2)}
    return t(f)(layers, x=X, name="net")["x"]


@feature
def functions_as_arguments(t):
    f = jax.tree_util.Partial(layer, W)
    return t(lambda f, x: f(x))(f, X)


@feature
def numpy_and_python_numbers(t):
    return t(lambda w, x, n, k: (x @ w * k, n * 2, jnp.asarray(n) + 1))(W, X, 3, np.float32(0.5))[0]


@feature
def captured_arrays(t):
    w, mask = jnp.asarray(W), jnp.asarray(MASK)
    return t(jax.jit(lambda x: jnp.where(mask, x @ w, 0.0)[jnp.asarray(ROWS)]))(X)


@feature
def strict_promotion(t):
    def f(w, x, n):
        y = x @ w
        return jnp.mean(y * 2 + 1) + n.astype(y.dtype) + jnp.float32(1) * y[0, 0]

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        return t(jax.grad(f))(W, X, jnp.int32(2))
