"""Control flow, recomputation, custom derivatives, and derivatives within a program."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ._table import ROWS, B, V, W, X, feature


def layer(w, x):
    return jnp.tanh(x @ w)


def loss(w, x):
    return jnp.mean(jnp.square(layer(w, x)))


@feature
def while_with_integer_carry(t):
    def f(w, x, n):
        step = lambda c: (c[0] + 1, layer(w, c[1]), c[2] ^ (c[0] % 2 == 0))  # noqa: E731
        return lax.while_loop(lambda c: c[0] < n, step, (jnp.int32(0), x, jnp.bool_(False)))

    return t(f)(W, X, jnp.int32(3))


@feature
def while_that_reads_a_float(t):
    def f(w, x):
        return lax.while_loop(lambda x: jnp.sum(x * x) > 1, lambda x: 0.5 * (x @ w), x)

    return t(f)(W, X)


@feature
def scan_of_layers(t):
    def f(ws, x):
        y, means = lax.scan(lambda x, w: (layer(w, x), jnp.mean(x)), x, ws, reverse=True)
        return jnp.mean(y) + jnp.sum(means)

    return t(jax.grad(f))(jnp.stack([W, V, W.T]), X)


@feature
def scan_of_nothing(t):
    def f(ws, x):
        return lax.scan(lambda x, w: (layer(w, x), jnp.sum(x)), x, ws)

    return t(f)(jnp.zeros((0, 16, 16)), X)


@feature
def scan_with_keys_and_integers(t):
    def f(w, x):
        def body(carry, key):
            i, x = carry
            keep = jax.random.bernoulli(key, 0.5, x.shape)
            return (i + 1, jnp.where(keep, x @ w, x)), (i, key)

        (i, x), (steps, keys) = lax.scan(body, (0, x), jax.random.split(jax.random.key(0), 3))
        return i, x, steps, jax.random.key_data(keys)

    return t(f)(W, X)


@feature
def scan_of_remat_of_cond(t):
    def f(w, x):
        @jax.checkpoint
        def body(x, i):
            return lax.cond(i % 2 == 0, layer, lambda w, x: x @ w.T, w, x), None

        return jnp.mean(lax.scan(body, x, jnp.arange(3))[0] ** 2)

    return t(jax.grad(f))(W, X)


@feature
def cond_differentiated(t):
    def f(w, x):
        return lax.cond(jnp.sum(x) > 1e6, lambda: jnp.sum(x), lambda: loss(w, x))

    return t(jax.grad(f))(W, X)


@feature
def switch_vmapped(t):
    def f(w, x, which):
        cases = [lambda r: r @ w, lambda r: w @ r, lambda r: 2 * r]
        return jax.vmap(lambda i, r: lax.switch(i, cases, r))(which, x)

    return t(f)(W, X, ROWS)


@feature
def associative_scan(t):
    return t(lambda w: lax.associative_scan(jnp.matmul, jnp.stack([w, w.T, w])))(W)


@feature
def map_in_batches(t):
    return t(lambda w, x: lax.map(lambda row: jnp.tanh(row @ w), x, batch_size=3))(W, X)


@feature
def remat_policies(t):
    def f(w, x):
        def block(w, x):
            return checkpoint_name(layer(w, checkpoint_name(x @ w, "named")), "out")

        policies = jax.checkpoint_policies
        for policy in (
            policies.dots_saveable,
            policies.nothing_saveable,
            policies.dots_with_no_batch_dims_saveable,
            policies.save_only_these_names("named"),
            policies.save_anything_except_these_names("out"),
        ):
            x = jax.checkpoint(block, policy=policy)(w, x)
        return jnp.mean(x * x)

    return t(jax.grad(f))(W, X)


@feature
def remat_offloaded(t):
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["a"], names_which_can_be_offloaded=[],
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip
    block = jax.checkpoint(lambda w, x: checkpoint_name(layer(w, x), "a") @ w, policy=policy)
    return t(jax.grad(lambda w, x: jnp.mean(block(w, x) ** 2)))(W, X)


@feature
def custom_jvp(t):
    @jax.custom_jvp
    def f(w, x):
        return layer(w, x)

    f.defjvps(lambda dw, y, w, x: 2 * (x @ dw), None)
    return t(jax.grad(lambda w, x: jnp.mean(f(w, x))))(W, X)


@feature
def custom_vjp_with_static_and_integer_arguments(t):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def f(scale, w, x, rows):
        return scale * (x[rows] @ w)

    f.defvjp(
        lambda scale, w, x, rows: (f(scale, w, x, rows), (w, x, rows)),
        lambda scale, kept, g: (kept[1][kept[2]].T @ g, jnp.zeros_like(kept[1]), None),
    )
    return t(jax.grad(lambda w, x, rows: jnp.mean(f(2.0, w, x, rows))))(W, X, ROWS)


@feature
def custom_vmap(t):
    @jax.custom_batching.custom_vmap
    def f(w, row):
        return row @ w

    @f.def_vmap
    def _(size, batched, w, rows):
        return rows @ w, True

    return t(lambda w, x: jax.vmap(f, (None, 0))(w, x))(W, X)


@feature
def sequential_vmap(t):
    f = jax.custom_batching.sequential_vmap(lambda row: jnp.tanh(row) @ W)
    return t(lambda x: jax.vmap(f)(x))(X)


@feature
def custom_root(t):
    def f(a):
        def newton(g, x):
            return lax.fori_loop(0, 8, lambda i, x: x - g(x) / (2 * x), x)

        tangent = lambda g, y: y / g(jnp.ones_like(y))  # noqa: E731
        return lax.custom_root(lambda x: x * x - a, jnp.ones_like(a), newton, tangent)

    return t(jax.value_and_grad(f))(jnp.float32(3))


@feature
def linear_transpose(t):
    return t(lambda w, x: jax.linear_transpose(lambda x: x @ w, x)(x @ w)[0])(W, X)


@feature
def hessian_inside(t):
    return t(lambda w, b: jax.hessian(lambda b: jnp.sum(jnp.tanh(b @ w) ** 2))(b))(W, B)
