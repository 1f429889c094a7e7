"""Corners of JAX: unusual arguments, dtypes and rules, nested transformations, random keys."""

import dataclasses
import functools

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from ._control import layer
from ._table import ROWS, B, W, X, feature

P = PartitionSpec


@feature
def own_quantization(t):
    """Conversions to 8 bits that a program asks for."""

    def rounded(x, dtype):
        return x.astype(dtype).astype(x.dtype)

    def f(w, x):
        four, five = rounded(4 * x, jnp.float8_e4m3fn) / 4, rounded(w, jnp.float8_e5m2)
        looped = lax.scan(lambda c, r: (c, rounded(r, jnp.float8_e4m3fn)), 0.0, x)[1]
        return four, five, looped, four @ five

    with jax.numpy_dtype_promotion("standard"):
        return t(f)(*(a.astype(jnp.bfloat16).astype(jnp.float32) for a in (W, X)))


@feature
def quantization_with_a_straight_through_gradient(t):
    @jax.custom_vjp
    def rounded(x):
        return x.astype(jnp.float8_e4m3fn).astype(x.dtype)

    rounded.defvjp(lambda x: (rounded(x), None), lambda _, g: (g,))
    w = W.astype(jnp.bfloat16).astype(jnp.float32)
    return t(jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ rounded(w)) ** 2)))(w, X)


@feature
def custom_vjp_mapped_with_residuals_of_all_kinds(t):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
    def f(g, w, x, power):
        return g(x @ w) ** power

    def forward(g, w, x, power):
        y, pull = jax.vjp(g, x @ w)
        return y**power, {"x": x, "w": w, "y": y, "pull": pull, "n": jnp.int32(power), "no": None}

    def backward(g, power, kept, ct):
        (ct,) = kept["pull"](ct * power * lax.integer_pow(kept["y"], power - 1))
        ct = jnp.where(kept["n"] == power, ct, 0)
        return jnp.outer(kept["x"], ct), kept["w"] @ ct

    f.defvjp(forward, backward)
    one = jax.grad(lambda w, row: jnp.sum(f(jnp.sin, w, row, 2)), (0, 1))
    return t(jax.vmap(one, (None, 0)))(W, X)


@feature
def closures_over_traced_values(t):
    def f(w, x):
        scale = jnp.mean(x @ w)

        @jax.custom_jvp
        def g(y):
            return jnp.sin(y)

        g.defjvp(lambda primals, tangents: (g(*primals), jnp.cos(primals[0]) * tangents[0]))

        @jax.checkpoint
        def body(y, i):
            return jnp.where(i > 0, g(y @ w) * scale, y), scale * i

        y, steps = lax.scan(body, x, jnp.arange(3.0))
        return jnp.mean(y**2) + jnp.sum(steps)

    return t(jax.grad(f))(W, X)


@feature
def nested_recomputation(t):
    policies = jax.checkpoint_policies

    def f(w, x):
        inner = jax.checkpoint(layer, policy=policies.everything_saveable)
        twice = jax.checkpoint(
            lambda w, x: inner(w, inner(w, x)), policy=policies.dots_saveable, prevent_cse=False
        )
        static = jax.checkpoint(lambda x, n: twice(w, x) * n, static_argnums=1)
        return jnp.mean(static(x, 2) ** 2)

    return t(jax.grad(f))(W, X)


@feature
def branches_mapped_and_differentiated(t):
    def f(w, row, i):
        return lax.switch(i % 3, [lambda: row @ w, lambda: jnp.sin(row), lambda: w[0] * row])

    def total(w, x, rows):
        return jnp.sum(jax.vmap(f, (None, 0, 0))(w, x, rows) ** 2)

    return t(jax.grad(total))(W, X, ROWS)


@feature
def random_keys_as_arrays(t):
    def f(w, x, keys):
        def body(key, row):
            key, sub = jax.random.split(key)
            return key, row + jax.random.truncated_normal(sub, -1, 1, row.shape)

        noisy = lax.scan(body, keys[0], x)[1]
        each = jax.vmap(lambda k: jax.random.uniform(k, (4,)))(keys)
        wrapped = jax.random.wrap_key_data(jax.random.key_data(keys[1]))
        picked = jax.random.bits(wrapped, (3,), jnp.uint8)
        return noisy @ w, each, picked, jax.random.orthogonal(keys[1], 4)

    return t(f)(W, X, jax.random.split(jax.random.key(3), 3))


@feature
def callbacks_mapped(t):
    def host(row):
        return np.tanh(row)

    def f(w, x):
        def one(row):
            y = row @ w
            shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
            together = jax.pure_callback(host, shape, y, vmap_method="broadcast_all")
            return together, jax.pure_callback(host, shape, y, vmap_method="sequential")

        return jax.vmap(one)(x)

    return t(f)(W, X)


@feature
def custom_rules_for_mapping_and_gradients(t):
    @jax.custom_batching.custom_vmap
    def product(w, row):
        return row @ w

    @product.def_vmap
    def _(size, batched, w, rows):
        return jnp.einsum("bi,ij->bj", rows, w), True

    @jax.custom_vjp
    def f(w, row):
        return jnp.tanh(product(w, row))

    f.defvjp(
        lambda w, row: (f(w, row), (w, row)),
        lambda kept, g: (jnp.outer(kept[1], g), product(kept[0].T, g)),
    )
    one = jax.grad(lambda row, w: jnp.sum(f(w, row) ** 2))
    return t(lambda w, x: jax.vmap(one, (0, None))(x, w))(W, X)


@feature
def integers_of_four_bits(t):
    def f(x):
        small = jnp.clip(jnp.round(x * 4), -8, 7).astype(jnp.int4)
        positive = jnp.clip(jnp.round(jnp.abs(x) * 4), 0, 15).astype(jnp.uint4)
        return small.astype(x.dtype) @ W, positive.astype(jnp.int32), small.astype(jnp.int8)

    # inputs that no rounding moves across a boundary
    return t(f)(jnp.round(X * 4) / 4)


@feature
def gradients_of_complex_functions(t):
    def f(z, w):
        y = jnp.exp(1j * z) @ w.astype(z.dtype)
        return jnp.sum(jnp.abs(y) ** 2)

    holomorphic = jax.grad(lambda z: jnp.sum(z**2), holomorphic=True)
    z = lax.complex(X, 0.1 * X)
    with jax.numpy_dtype_promotion("standard"):
        return t(jax.grad(f, (0, 1)))(z, W), t(lambda z: jnp.real(holomorphic(z)))(z)


@feature
def weak_types(t):
    def f(w, x, a):
        looped = lax.fori_loop(0, 3, lambda i, c: c * 0.5 + i, 1.0)
        scanned = lax.scan(lambda c, r: (c + jnp.mean(r), c), 0.0, x)[0]
        waited = lax.while_loop(lambda c: c < 3.0, lambda c: c + 1.5, jnp.asarray(0.25))
        return x @ w * a, looped, scanned, waited, jnp.where(x > 0, 1.0, a), jnp.maximum(x, 0)

    with jax.numpy_dtype_promotion("standard"):
        return t(f)(W, X, 0.5)


@feature
def gradients_beside_integers(t):
    def f(w, n, x):
        return jnp.mean((x @ w) ** 2) * n["count"]

    n = {"count": 3, "rows": ROWS}
    gradient = jax.grad(f, (0, 1), allow_int=True)

    def both(w, n, x):
        dw, dn = gradient(w, n, x)
        zero = np.zeros((), jax.dtypes.float0)
        moved = jax.jvp(lambda w, k: f(w, {"count": k}, x), (w, 3), (w, zero))[1]
        return dw, moved, [np.shape(leaf) for leaf in jax.tree.leaves(dn)][-1] == (8,)

    return t(both)(W, n, X)[:2]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Net:
    w: jax.Array
    act: str = dataclasses.field(metadata={"static": True}, default="tanh")


@feature
def dataclasses_and_paths(t):
    def f(net, x):
        named = jax.tree_util.tree_map_with_path(
            lambda path, a: a * (2.0 if "w" in jax.tree_util.keystr(path) else 1.0), net
        )
        return jnp.mean(getattr(jnp, net.act)(x @ named.w) ** 2)

    return t(jax.grad(f))(Net(W), X).w


@feature
def partial_functions_with_arrays_in_loops(t):
    def f(g, h, x):
        return lax.fori_loop(0, 2, lambda i, x: g(h(x)), x)

    partial = jax.tree_util.Partial
    return t(f)(partial(layer, W), partial(jnp.add, B[None]), X)


def _solved(a, b, *, dtype):
    if a.dtype != dtype or b.dtype != dtype:
        raise TypeError(f"expected operands of {dtype}")
    return jnp.linalg.solve(a, b)


# A library's own (lineax's are alike), whose parameters say of which dtype its operands are.
SOLVE = jex.core.Primitive("solve_of_another_library")
SOLVE.def_impl(_solved)
SOLVE.def_abstract_eval(lambda a, b, *, dtype: b)
mlir.register_lowering(SOLVE, mlir.lower_fun(_solved, multiple_results=False))


@feature
def primitive_of_another_library(t):
    def f(w, x):
        a = jnp.eye(W.shape[0]) + 0.1 * (w @ w.T)
        return SOLVE.bind(a, (x @ w).T, dtype="float32")

    return t(f)(W, X)


@feature
def nan_literals_in_loops(t):
    def f(w, x):
        def body(i, y):
            return jnp.where(i > 4000, jnp.nan, jnp.tanh(x + y @ w))

        return lax.fori_loop(0, 2000, body, x)

    return t(f)(0.3 * W, X)
