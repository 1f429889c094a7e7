"""Functions of numbers: linear algebra, Fourier transforms, convolutions, reductions, networks."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import optimize

from ._table import B, S, V, W, X, feature

IMAGES = np.resize(X, (2, 8, 8, 4))
KERNEL = np.resize(W, (3, 3, 4, 4))
LAYOUT = ("NHWC", "HWIO", "NHWC")


@feature
def gradients_of_linear_algebra(t):
    def f(s):
        return jnp.sum(jnp.linalg.cholesky(s) ** 3) + jnp.linalg.slogdet(s)[1]

    return t(jax.grad(f))(S)


@feature
def gradient_of_a_fourier_transform(t):
    return t(jax.grad(lambda w, x: jnp.mean(jnp.abs(jnp.fft.rfft(x @ w)) ** 2)))(W, X)


@feature
def gradient_of_a_convolution(t):
    def f(k, x):
        y = lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=LAYOUT)
        return jnp.mean(jnp.tanh(y) ** 2)

    return t(jax.grad(f, (0, 1)))(KERNEL, IMAGES)


@feature
def attention(t):
    def f(w, x, mask):
        q, k, v = (x @ m for m in (w, w.T, jnp.flip(w)))
        heads = [y.reshape(1, 8, 2, 8) for y in (q, k, v)]
        y = jax.nn.dot_product_attention(*heads, mask=mask[None, None], is_causal=True)
        return jnp.mean(y**2)

    with jax.numpy_rank_promotion("allow"):
        return t(jax.grad(f))(W, X, np.tril(np.ones((8, 8), bool)))


@feature
def activations(t):
    def f(w, x):
        y = x @ w
        names = "relu", "gelu", "silu", "softplus", "log_softmax", "elu", "glu", "standardize"
        return [getattr(jax.nn, name)(y) for name in names]

    return t(f)(W, X)


@feature
def recurrent_network(t):
    def f(w, v, x):
        def cell(state, row):
            c, h = state
            gates = jax.nn.sigmoid(row @ w + h @ v)
            c = c * gates + jnp.tanh(row @ w)
            return (c, gates * jnp.tanh(c)), h

        (_, h), hs = lax.scan(cell, (jnp.zeros(16), jnp.zeros(16)), x)
        return jnp.mean(h**2) + jnp.mean(hs**2)

    return t(jax.grad(f, (0, 1)))(W, V, X)


@feature
def minimizer(t):
    def f(s, b):
        return optimize.minimize(lambda x: x @ s @ x / 2 - b @ x, jnp.zeros(16), method="BFGS").fun

    return t(f)(S, B)
