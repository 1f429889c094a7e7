"""Rules that keep a scale: by equivariance, from exponents far out of float32's range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.special import erf

import scalewise as sw
from arrays import normal

X = normal(0, (6,))
PLAIN = sw.Recipe(sw.Products.short(None, None), residuals=None)


def at(exponent):
    return sw.ScaledArray.from_exponent(X, exponent)


def parts(y):
    if isinstance(y, sw.ScaledArray):
        return np.asarray(y.data, np.float64), int(y.exponent)
    return np.asarray(y, np.float64), 0


@pytest.mark.parametrize(
    ("f", "slope"),
    [(jnp.sin, 1), (jnp.tanh, 1), (jnp.arctan, 1), (jnp.arcsinh, 1), (erf, 2 / np.sqrt(np.pi))],
    ids=["sin", "tanh", "atan", "asinh", "erf"],
)
def test_odd_functions_keep_the_scale_of_small_numbers(f, slope):
    run = jax.jit(sw.autoscale(f, PLAIN))
    for exponent in (-300, -150, -60):
        data, scale = parts(run(at(exponent)))
        np.testing.assert_allclose(np.ldexp(data, scale - exponent), X * slope, rtol=1e-6)
    for exponent in (-8, -1, 0, 3):
        data, scale = parts(run(at(exponent)))
        np.testing.assert_allclose(data * 2.0**scale, f(X * 2.0**exponent), rtol=1e-6)


@pytest.mark.parametrize("k", [-300, 300])
def test_orders_roots_and_products_move_only_the_scale(k):
    def several(x):
        keys, values = lax.sort((x, 2 * x))
        top, places = lax.top_k(x, 3)
        return keys, values, top, places, jnp.cbrt(x), jnp.prod(x)

    run = jax.jit(sw.autoscale(several, PLAIN))
    here, there = run(at(0)), run(at(k))
    moves = (k, k, k, None, k // 3, 6 * k)
    for a, b, move in zip(here, there, moves, strict=True):
        if move is None:
            np.testing.assert_array_equal(a, b)
            continue
        (da, ea), (db, eb) = parts(a), parts(b)
        np.testing.assert_array_equal(da, db)
        assert eb - ea == move


@pytest.mark.parametrize("recipe", ["fp16", "scalify"])
def test_largest_elements_are_found_among_slices_with_exponents_of_their_own(recipe):
    def grown(x):
        ys = lax.scan(lambda c, _: (c * 2.0**20, c * 2.0**20), x, None, length=3)[1]
        return jnp.argmax(ys, 0), jnp.argmin(ys, 0), jnp.sign(ys)

    x = jnp.array([1.0, -1.5])
    got = sw.autoscale(grown, recipe)(sw.ScaledArray.from_exponent(x, -5))
    for y, want in zip(got, grown(x), strict=True):
        y = y.value() if isinstance(y, sw.ScaledArray) else y
        np.testing.assert_array_equal(y, want)
