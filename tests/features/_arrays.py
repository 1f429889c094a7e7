"""Kinds of arrays: integers, mixed dtypes, empty arrays; moved, sorted and indexed elements."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._control import loss
from ._table import INT8, MASK, ROWS, V, W, X, feature

STEP = np.float32(np.abs(W).max() / 127)


def product(a, b, result=jnp.float32):
    """Returns a matrix product of operands of any two dtypes."""
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=result)


@feature
def weights_of_8_bit_integers(t):
    def f(q, scale, x):
        return product(x, q) * scale, product(x.astype(jnp.bfloat16), q) * scale

    return t(f)(INT8, STEP, X)


@feature
def weights_of_4_bit_integers(t):
    q = jnp.asarray(np.clip(np.round(W * 8), -8, 7), jnp.int4)
    return t(lambda q, x: (product(x, q), x @ q.astype(x.dtype)))(q, X)


@feature
def weights_of_unsigned_integers(t):
    q = jnp.asarray(np.abs(INT8), jnp.uint8)
    return t(lambda q, x: product(q.T, x.T))(q, X[:, :16])


@feature
def products_with_booleans(t):
    def f(x, mask):
        some = mask.astype(x.dtype)
        return product(x, mask.T), some.T @ x, x * mask, jnp.sum(mask, dtype=x.dtype)

    with jax.numpy_dtype_promotion("standard"):
        return t(f)(X, MASK)


@feature
def products_of_integers(t):
    return t(lambda q, x: (product(q, q, jnp.int32), product(q, q), x @ W))(INT8, X)


@feature
def arithmetic_with_integers(t):
    def f(x, rows):
        r = rows[:, None]
        powers = jnp.abs(x) ** (r % 3), jnp.ldexp(x, r % 4), x // 2, x % 3
        return x * r, r / (jnp.abs(x) + 1), jnp.where(r > 2, x, r), jnp.maximum(x, r), powers

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return t(f)(X, ROWS)


@feature
def dtypes_mixed(t):
    def f(w, x):
        y = product(x.astype(jnp.bfloat16), w)
        z = product(x, w.astype(jnp.float16))
        return y + z, product(x.astype(jnp.float16), w.astype(jnp.float16), jnp.float16)

    return t(f)(W, X)


@feature
def dtypes_of_8_bits(t):
    def f(w, x):
        w = w.astype(jnp.float8_e4m3fn)
        return x @ w.astype(x.dtype), product(x.astype(jnp.float8_e4m3fn), w)

    # numbers of that dtype, since `emulate` and `autoscale` compute in dtypes of their own
    w, x = (a.astype(jnp.float8_e4m3fn).astype(jnp.float32) for a in (W, X))
    return t(f)(w, x)


@feature
def complex_numbers(t):
    def f(w, x):
        z = lax.complex(x @ w, x)
        turned = z * jnp.exp(jnp.complex64(0.3j)) @ jnp.conj(z).T
        return jnp.real(turned), jnp.imag(turned), jnp.abs(z), jnp.angle(z[:, :2])

    return t(f)(W, X)


@feature
def empty_arrays(t):
    def f(w, x, none):
        rows, columns = none @ w, x[:, :0] @ w[:0]
        return rows, columns, jnp.sum(none), jnp.sum(columns + x @ w), jnp.sort(none, 0)

    return t(f)(W, X, X[:0])


@feature
def gradients_of_empty_arrays(t):
    def f(w, x, none):
        return loss(w, x) + jnp.sum(jnp.tanh(none @ w) ** 2) + jnp.sum(jnp.max(none, 1))

    return t(jax.grad(f, (0, 2)))(W, X, X[:0])


@feature
def empty_states(t):
    return t(lambda state, w, x: (state, loss(w, x)))({"a": (), "b": [], "c": None}, W, X)


@feature
def arrays_without_axes(t):
    return t(jax.value_and_grad(lambda a, b: jnp.tanh(a * b) + jnp.dot(a, b)))(
        jnp.float32(0.3), jnp.float32(2)
    )


@feature
def sorting(t):
    def f(w, x):
        y = x @ w
        keys, values = lax.sort((x[:, 0], y[:, 0]), num_keys=1)
        return keys, values, jnp.sort(y, 1), lax.top_k(x, 3), jnp.argsort(x[:, 0])

    return t(f)(W, X)


@feature
def quantiles(t):
    def f(x):
        inside = jnp.searchsorted(jnp.linspace(-2.0, 2.0, 9), x[0])
        return jnp.median(x), jnp.quantile(x, 0.3), jnp.percentile(x, 60.0, axis=1), inside

    return t(f)(X)


@feature
def gradients_of_indexing(t):
    def f(w, x, rows):
        y = (x @ w)[rows, rows * 2]
        return jnp.sum(jnp.zeros(8).at[rows].add(y) ** 2) + jnp.sum(jnp.take(w, rows, 0) ** 2)

    return t(jax.grad(f))(W, X, ROWS)


@feature
def ragged_products(t):
    sizes = jnp.asarray([3, 1, 4], jnp.int32)

    def f(w, x, n):
        return jnp.mean(jnp.tanh(lax.ragged_dot(x, w, n)) ** 2)

    return t(jax.grad(f))(jnp.stack([W, V, W.T]), X, sizes)
