"""Programs that between them use every kind of control flow, nested; floats and integers mixed."""

import functools

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -0.5, 0.5) * jnp.cos(x),))


@jax.custom_jvp
def softsign(x):
    return x / (1 + jnp.abs(x))


@softsign.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return softsign(x), 3.0 * t / (1 + jnp.abs(x)) ** 2  # wrong on purpose: it must be kept


def elementwise(x):
    return jnp.tanh(x) * 2 + jnp.exp(-jnp.square(x))


def contractions(x):
    return jnp.einsum("ij,kj->ik", x, jnp.sin(x)) @ x


def calls(x):
    big = jax.jit(lambda y: functools.reduce(lambda a, _: jnp.sin(a) * 1.5, range(40), y))
    return big(jax.jit(jax.nn.relu)(x))


def scan_with_everything(x):
    def body(carry, row):
        i, c = carry
        c = jnp.where(i % 2 == 0, c @ x, softsign(c)) + row
        return (i + 1, c), (jnp.sum(c), i)

    (i, c), (ys, js) = lax.scan(body, (0, x), jnp.broadcast_to(x[:, None], (4, 4, 4)), reverse=True)
    return c + i.astype(x.dtype), ys, js


def while_loop(x):
    def body(c):
        return c[0] + 1, c[1] * 0.9 + x

    return lax.while_loop(lambda c: jnp.logical_and(c[0] < 7, jnp.sum(c[1]) < 40), body, (0, x))[1]


def fori_loop(x):
    return lax.fori_loop(0, 5, lambda i, c: c * 0.5 + x[None, i % 4], x)


def branches(x):
    y = lax.cond(jnp.sum(x) > 0, jnp.sin, lambda a: a * 2, x)
    return lax.switch(jnp.int32(2), [lambda a: a, jnp.cos, lambda a: a - 1], y)


def remat(x):
    f = jax.checkpoint(lambda a: jnp.sin(jnp.sin(a @ x)))
    return jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)(x)


def custom_derivatives(x):
    return clipped(x) + softsign(x)


def nested(x):
    def body(c, row):
        c = lax.cond(jnp.sum(row) > 0, jax.checkpoint(lambda a: clipped(a @ x)), softsign, c)
        c = lax.fori_loop(0, 3, lambda i, a: jax.jit(lambda b: b + 0.1 * softsign(b))(a), c)
        return c, jnp.max(c, axis=0)

    c, ys = lax.scan(jax.checkpoint(body), x, x)
    return jnp.sum(ys) + jnp.sum(lax.map(lambda r: r * jnp.sum(c), c))


def indexing(x):
    order = jnp.argsort(x[0])
    y = x[order].at[0].add(1.0).at[jnp.array([1, 2])].set(0.5)
    return jnp.cumsum(jnp.sort(y, axis=1), axis=0), lax.top_k(y, 2)[1]


def randomness(x):
    key = jax.random.key(3)
    return x * jax.random.bernoulli(key, 0.5, x.shape).astype(x.dtype) + jax.random.normal(
        key, x.shape, x.dtype
    )


DIFFERENTIABLE = [
    elementwise, contractions, calls, scan_with_everything, branches, remat, custom_derivatives,
    nested, indexing, randomness,
]  # fmt: skip
PROGRAMS = [*DIFFERENTIABLE, while_loop, fori_loop]


def together(programs, of=lambda f: f):
    """Returns one program that runs several, each behind ``of``: they are compiled at once."""
    return lambda x: {f.__name__: of(f)(x) for f in programs}


def scalar(f):
    """The sum of all float outputs of ``f``: something to differentiate."""

    def loss(x):
        outs = [y for y in jax.tree.leaves(f(x)) if jnp.issubdtype(y.dtype, jnp.floating)]
        return sum((jnp.sum(y) for y in outs), jnp.zeros((), x.dtype))

    return loss
