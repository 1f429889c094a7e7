"""Every recipe under every structure and transformation, within an error bound from its formats."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import scalewise as sw
from arrays import normal
from cases import nightly
from scalewise.formats import BlockFormat

X = normal(0, (64, 32))
W = normal(1, (32, 32)) / math.sqrt(32)
RECIPES = sw.recipes.CATALOGUE


def loop(w, x):
    return lax.fori_loop(0, 2, lambda i, x: jnp.tanh(x @ w), x)


def scan(w, x):
    return lax.scan(lambda x, _: (jnp.tanh(x @ w), x.mean()), x, None, length=2)[0]


def remat(w, x):
    return jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x @ w) @ w))(x)


def cond(w, x):
    return lax.cond(jnp.sum(x) > 1e6, lambda x: x, lambda x: jnp.tanh(x @ w), x)


def while_(w, x):  # JAX differentiates no while loop in reverse
    def body(carry):
        i, y = carry
        return i + 1, jnp.tanh(y @ lax.stop_gradient(w))

    return x @ w + lax.while_loop(lambda carry: carry[0] < 2, body, (0, lax.stop_gradient(x)))[1]


@jax.custom_vjp
def product(w, x):
    return x @ w


product.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, g: (r[1].T @ g, g @ r[0].T))


def custom_vjp(w, x):
    return jnp.tanh(product(w, x))


def vmap(w, x):
    return jax.vmap(lambda row: jnp.tanh(row @ w))(x)


def shard_map(w, x):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jax.shard_map(
        lambda w, x: jnp.tanh(x @ w), mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d")
    )
    return f(w, x)


def convolution(w, x):
    kernel, image = w.reshape(2, 2, 8, 32)[..., :32], x.reshape(4, 8, 8, 8)
    return lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def sort(w, x):
    return jnp.sort(x @ w, axis=0) * jnp.linspace(0, 1, 64)[:, None]


def lstm(w, x):
    def cell(carry, row):
        h, c = carry
        i, f, o, g = jnp.split(row @ w + h @ w, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jnp.tile(jax.nn.sigmoid(o) * jnp.tanh(c), (1, 4))
        return (h, c), h

    start = (jnp.zeros((16, 32)), jnp.zeros((16, 8)))
    return lax.scan(cell, start, x.reshape(4, 16, 32))[1]


def dropout(w, x):
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, x.shape), x @ w, 0) / 0.9


def attention(w, x):
    q, k, v = (x.reshape(2, 32, 2, 16), (x @ w).reshape(2, 32, 2, 16), x.reshape(2, 32, 2, 16))
    return jax.nn.dot_product_attention(q, k, v).reshape(64, 32) @ w


def embedding(w, x):
    return jnp.take(x, jnp.arange(64) % 32, axis=0) @ w


STRUCTURES = (loop, scan, remat, cond, while_, custom_vjp, vmap, shard_map, convolution, sort, lstm,
              dropout, attention, embedding)  # fmt: skip


def loss_of(f):
    """Returns a loss whose gradients are near 1: muS scales them by constants."""

    def loss(w, x):
        return jnp.sum(jnp.square(f(w, x) + 0.5)) / 2

    return loss


def step(f):
    def step(w, x):
        value, gradient = jax.value_and_grad(loss_of(f))(w, x)
        return w - gradient, value

    return step


# each returns a result of f whose products a transformation rounds; the identity gives float32's
TRANSFORMATIONS = {
    "forward": lambda f, t: t(f),
    "inner": lambda f, t: jax.grad(lambda w, x: jnp.sum(jnp.square(t(f)(w, x) + 0.5)) / 2),
    "outer gradient": lambda f, t: jax.grad(t(loss_of(f))),
    "gradient": lambda f, t: t(jax.grad(loss_of(f))),
    "whole step": lambda f, t: lambda w, x: w - t(step(f))(w, x)[0],
}


def unit_error(fmt):
    """Returns the largest relative error of a normal number that is rounded to the format."""
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    return 2.0 ** -(element.mantissa_bits + 1)


def bound(recipe):
    """Returns a bound on a result's error under a recipe, relative to its norm.

    The error of a number that is rounded to nearest with p bits is at most u = 2^-p of it, and
    spread evenly over a binade 0.42 u in the root of the mean square. The errors of a product's
    operands are independent and add as squares. A gradient here has up to three products in a row,
    so that six such errors give 0.42 sqrt(6) u, about u. A stochastic rounding has twice the mean
    square. The rest, a factor of 1.6, is for small arrays, gradients that nearly cancel, and
    numbers that a scale makes subnormal. Where every operation rounds, there are up to nine times
    as many roundings.
    """
    if isinstance(recipe, sw.Scalify):
        return 1.6 * 3 * unit_error(recipe.format)
    formats = [recipe.products.formats()[0][0], recipe.products.formats()[1][0], recipe.residuals]
    worst = max(unit_error(fmt) for fmt in formats if fmt is not None)
    return 1.6 * (math.sqrt(2) if recipe.is_random else 1) * worst


@functools.cache
def computed(transformation, recipe):
    """Returns the results of all structures, which are compiled as one program."""
    change = TRANSFORMATIONS[transformation]

    def run(w, x):
        def transform(f):
            return f if recipe is None else sw.autoscale(f, RECIPES[recipe])

        return {f.__name__: change(f, transform)(w, x) for f in STRUCTURES}

    return {name: np.asarray(y, np.float64) for name, y in jax.jit(run)(W, X).items()}


@pytest.mark.parametrize("transformation", nightly(TRANSFORMATIONS, but=["gradient"]))
@pytest.mark.parametrize("recipe", nightly(RECIPES, but=["fp8"]))
def test_errors_are_within_the_bound_of_the_formats(recipe, transformation):
    got, want = computed(transformation, recipe), computed(transformation, None)
    for name, y in got.items():
        error = np.linalg.norm(y - want[name]) / np.linalg.norm(want[name])
        assert 0 < error < bound(RECIPES[recipe]), name
