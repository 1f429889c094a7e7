"""What is done with a transformed function: JAX's transformations, compilation, export, checks."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from ._control import layer, loss
from ._table import B, V, W, X, outside


@outside
def gradient(t):
    return jax.grad(t(loss))(W, X)


@outside
def gradient_with_auxiliary_results(t):
    f = t(lambda w, x: (loss(w, x), {"y": x @ w, "n": jnp.int32(3)}))
    return jax.value_and_grad(f, has_aux=True)(W, X)


@outside
def gradient_of_some_arguments(t):
    f = t(lambda w, n, x: loss(w, x) * n)
    return jax.jit(jax.grad(f, argnums=(0, 2)))(W, 2, X)


@outside
def vector_jacobian_products(t):
    y, pull = jax.vjp(t(layer), W, X)
    return y, pull(y), jax.vmap(pull)(jnp.stack([y, 2 * y]))


@outside
def jacobian_by_rows(t):
    return jax.jacrev(t(layer))(W, X[0])


@outside
def transposed(t):
    f = t(lambda x: (jnp.cumsum(x @ W, 1), 2 * x[0]))
    g = t(lambda w, x: x @ w)
    inside = jax.jit(lambda w, y: jax.linear_transpose(lambda x: g(w, x), X)(y)[0])
    return jax.linear_transpose(f, X)((X, X[0]))[0], inside(W, X)


@outside
def mapped(t):
    f = t(lambda w, x: jnp.tanh(x @ w))
    return jax.vmap(f, (None, 0))(W, X), jax.vmap(f, (0, None), 1)(jnp.stack([W, V]), X)


@outside
def gradients_of_examples(t):
    return jax.vmap(jax.grad(t(lambda w, row: jnp.sum(jnp.tanh(row @ w) ** 2))), (None, 0))(W, X)


@outside
def mapped_over_an_axis_name(t):
    f = t(lambda w, row: row @ w - jax.lax.pmean(row @ w, "i"))
    return jax.vmap(f, (None, 0), axis_name="i")(W, X)


@outside
def recomputed(t):
    return jax.grad(jax.checkpoint(t(loss)))(W, X)


@outside
def within_a_loop(t):
    f = t(layer)

    def looped(w, x):
        return jnp.mean(jax.lax.scan(lambda x, _: (f(w, x), None), x, None, 3)[0])

    return jax.grad(looped)(W, X)


@outside
def within_a_branch(t):
    f = t(layer)
    return jax.jit(lambda w, x: jax.lax.cond(x[0, 0] > 9, lambda: x, lambda: f(w, x)))(W, X)


@outside
def transformed_twice(t):
    return t(lambda w, x: t(layer)(w, x) @ w)(W, X)


@outside
def donated(t):
    f = jax.jit(t(lambda w, x: w - 0.1 * jax.grad(loss)(w, x)), donate_argnums=0)
    return f(jnp.array(W), X)


@outside
def static_arguments(t):
    def f(w, x, name, *, power):
        assert name == "a"
        return layer(w, x) ** power

    return jax.jit(t(f), static_argnames=("name", "power"))(W, X, name="a", power=2)


@outside
def without_jit(t):
    with jax.disable_jit():
        return t(lambda w, x: jax.lax.scan(lambda x, _: (layer(w, x), None), x, None, 2)[0])(W, X)


@outside
def checking_for_nan(t):
    with jax.debug_nans(True):
        return jax.jit(t(jax.grad(loss)))(W, X)


@outside
def a_mask_of_infinity_while_checking_for_infinity(t):
    def f(w, x):
        masked = jax.jit(lambda y: jax.nn.softmax(jnp.where(x > 0, y, -jnp.inf)))
        return jnp.sum(masked(x @ w)[:, 0])

    with jax.debug_infs(True), jax.debug_nans(True):
        return t(f)(W, X), jax.grad(t(f))(W, X), jax.jit(t(jax.grad(f)))(W, X)


@outside
def checking_for_leaks(t):
    with jax.checking_leaks():
        return jax.jit(t(jax.grad(loss)))(W, X), jax.grad(t(loss))(W, X)


@outside
def types_alone(t):
    shapes = jax.eval_shape(t(jax.grad(loss)), W, X)
    text = str(jax.make_jaxpr(t(loss))(W, X))
    return np.zeros(shapes.shape, shapes.dtype), np.bool_(len(text) > 10)


@outside
def compiled_ahead_of_time(t):
    return jax.jit(t(jax.grad(loss))).lower(W, X).compile()(W, X)


def read_back(made):
    """Returns an exported program after it was written and read, which needs flatbuffers."""
    if importlib.util.find_spec("flatbuffers") is None:
        return made
    return export.deserialize(made.serialize())


@outside
def exported(t):
    f = jax.jit(t(jax.grad(loss)))
    made = export.export(f, platforms=("cpu", "cuda", "tpu"))(W, X)
    return read_back(made).call(W, X)


@outside
def exported_with_symbolic_shapes(t):
    (n,) = export.symbolic_shape("n")
    f = jax.jit(t(jax.grad(loss)))
    types = jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((n, 16), jnp.float32)
    made = export.export(f, platforms=("cpu", "cuda", "tpu"))(*types)
    return read_back(made).call(W, X)


@outside
def pmapped(t):
    f = t(lambda w, x: jax.lax.pmean(layer(w, x), "i"))
    return jax.pmap(f, axis_name="i")(W[None], X[None])


@outside
def mapped_over_a_mesh(t):
    mesh = jax.make_mesh((jax.device_count(),), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    f = t(lambda w, x: jax.lax.pmean(jax.grad(loss)(w, x), "i"))
    return jax.shard_map(f, mesh=mesh, in_specs=(spec(), spec("i")), out_specs=spec())(W, X)


@outside
def vectorized(t):
    f = jnp.vectorize(t(lambda w, b: jnp.tanh(w @ b)), signature="(i,j),(j)->(i)")
    return f(jnp.stack([W, V]), jnp.stack([B, 2 * B]))


@outside
def gradient_of_gradient(t):
    return jax.grad(lambda w: jnp.sum(jax.grad(t(loss))(w, X) ** 2))(W)


@outside
def forward_mode(t):
    f = t(layer)
    y, pushforward = jax.linearize(f, W, X)
    tangents = jnp.stack([X, 2 * X])
    mapped = jax.vmap(lambda dx: jax.jvp(lambda x: f(W, x), (X,), (dx,))[1])(tangents)
    return jax.jvp(f, (W, X), (V, X)), y, pushforward(V, X), mapped


@outside
def jacobian_by_columns(t):
    return jax.jacfwd(t(layer), 1)(W, X[0]), jax.jit(jax.jacfwd(t(loss)))(W, X)


@outside
def hessian(t):
    f = t(lambda b: jnp.sum(jnp.tanh(b @ W) ** 2))
    return jax.hessian(f)(B), jax.jacrev(jax.jacrev(f))(B)


@outside
def hessian_vector_product(t):
    f = t(loss)
    return jax.jvp(jax.grad(f), (W, X), (V, X))[1], jax.grad(
        lambda w: jnp.vdot(jax.grad(f)(w, X), V)
    )(W)


@outside
def third_derivative(t):
    return jax.grad(jax.grad(jax.grad(t(lambda x: jnp.sin(x) * x))))(jnp.float32(0.5))


@outside
def gradient_of_complex_numbers(t):
    f = t(lambda w, x: jax.lax.complex(x @ w, x))
    g = t(lambda z: jnp.sum(jnp.abs(z) ** 2))
    return jax.grad(lambda w: jnp.sum(jnp.abs(f(w, X)) ** 2))(W), jax.grad(g)(jax.lax.complex(X, X))


@outside
def gradient_of_a_mapped_gradient(t):
    rows = jax.vmap(jax.grad(t(lambda w, r: jnp.sum(jnp.tanh(r @ w) ** 2)), 1), (None, 0))
    return jax.grad(lambda w: jnp.sum(rows(w, X) ** 2))(W)


@outside
def gradient_over_a_mesh(t):
    mesh = jax.make_mesh((jax.device_count(),), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    f = t(lambda w, x: jax.lax.pmean(loss(w, x), "i"))
    mapped = jax.shard_map(f, mesh=mesh, in_specs=(spec(), spec("i")), out_specs=spec())
    return jax.grad(mapped)(W, X)
