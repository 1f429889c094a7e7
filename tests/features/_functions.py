"""Functions of numbers: linear algebra, Fourier transforms, convolutions, reductions, networks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.scipy import ndimage, optimize, signal, special

from ._table import MASK, ROWS, B, S, V, W, X, feature

IMAGES = np.resize(X, (2, 8, 8, 4))
KERNEL = np.resize(W, (3, 3, 4, 4))
LAYOUT = ("NHWC", "HWIO", "NHWC")


@feature
def decompositions(t):
    def f(s, x):
        q, r = jnp.linalg.qr(x.T)
        low = jnp.linalg.cholesky(s)
        return low, jnp.abs(r), jnp.linalg.eigvalsh(s), jnp.linalg.svd(x, compute_uv=False), q @ q.T

    return t(f)(S, X)


@feature
def linear_systems(t):
    def f(s, b):
        sign, logdet = jnp.linalg.slogdet(s)
        triangle = lax.linalg.triangular_solve(jnp.tril(s), b[:, None], left_side=True, lower=True)
        return jnp.linalg.solve(s, b), jnp.linalg.inv(s), sign * logdet, triangle

    return t(f)(S, B)


@feature
def gradients_of_linear_algebra(t):
    def f(s):
        return jnp.sum(jnp.linalg.cholesky(s) ** 3) + jnp.linalg.slogdet(s)[1]

    return t(jax.grad(f))(S)


@feature
def matrix_exponential(t):
    return t(jax.scipy.linalg.expm)(W)


@feature
def eigenvalues(t):
    return t(lambda w: jnp.sort(jnp.abs(jnp.linalg.eigvals(w + 2 * jnp.diag(jnp.arange(16.0))))))(W)


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
def pooling(t):
    def f(k, x):
        x = lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=LAYOUT)
        window = (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        largest = lax.reduce_window(x, -jnp.inf, lax.max, *window)
        return jnp.mean(largest * lax.reduce_window(x, 0.0, lax.add, *window))

    return t(jax.grad(f))(KERNEL, IMAGES)


@feature
def images(t):
    def f(x):
        small = jax.image.resize(x, (2, 4, 4, 4), "bilinear")
        rows = jnp.linspace(0.0, 6.0, 5)
        return small, ndimage.map_coordinates(x[0, :, :, 0], [rows, rows], order=1)

    return t(f)(IMAGES)


@feature
def signals(t):
    return t(lambda x, b: (jnp.convolve(b, x[0]), signal.convolve2d(x, x[:3, :3], mode="same")))(
        X, B
    )


@feature
def reductions(t):
    def f(w, x):
        y = x @ w
        product = jnp.prod(1 + y[:2] / 8)
        by_hand = lax.reduce(y, np.float32(0), lambda a, b: a + b, (0,))
        return product, by_hand, jnp.std(y), jnp.linalg.norm(y), special.logsumexp(y, 1)

    return t(f)(W, X)


@feature
def polynomials_and_interpolation(t):
    def f(x, b):
        knots = jnp.linspace(-3.0, 3.0, 16)
        return jnp.polyval(b[:4], x), jnp.interp(x, knots, b)

    with jax.numpy_rank_promotion("allow"):
        return t(f)(X, B)


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
def cross_entropy(t):
    def f(w, x, rows):
        logits = jnp.where(rows[:, None] >= 0, x @ w, jnp.finfo(x.dtype).min)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, rows))

    with jax.numpy_rank_promotion("allow"):
        return t(jax.value_and_grad(f))(W, X, ROWS)


@feature
def minimizer(t):
    def f(s, b):
        return optimize.minimize(lambda x: x @ s @ x / 2 - b @ x, jnp.zeros(16), method="BFGS").fun

    return t(f)(S, B)


@feature
def masked_reductions(t):
    def f(w, x, mask):
        y = x @ w
        where = {"where": mask}
        return jnp.mean(y, **where), jnp.max(y, initial=-1e9, **where), jnp.sum(y, 0, **where)

    return t(f)(W, X, MASK)
