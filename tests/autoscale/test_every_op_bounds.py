"""``scalify``: minima, maxima and bounds of numbers beside float32's largest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from arrays import normal
from cases import nightly

RECIPES = ["scalify", *nightly(["fp16_every_op"])]
BIG = float(jnp.finfo(jnp.float32).max)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("big", [1e30, 3e38, BIG])
@pytest.mark.parametrize("small", [1.19, 1e-5, 1e-30])
def test_the_lesser_of_two_arguments_keeps_its_digits(recipe, big, small):
    def f(big, small):
        least = jnp.minimum(big, small), jnp.minimum(small, big), jnp.fmin(big, small)
        most = jnp.maximum(-big, -small), jnp.maximum(-small, -big), jnp.maximum(small, -big)
        clipped = jnp.clip(big, -small, small), jnp.clip(small, -big, big)
        return jnp.stack(least), -jnp.stack(most[:2]), jnp.stack([*most[2:], *clipped])

    got = jax.jit(sw.autoscale(f, recipe))(jnp.float32(big), jnp.float32(small))
    for x in got:
        np.testing.assert_allclose(x, np.full(x.shape, small), rtol=2e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_some_elements_of_each_operand(recipe):
    x, y = jnp.array([1e30, 2.0, 0.0, -3.0]), jnp.array([5.0, 1e30, 1e-3, 1e30])
    low, high = jax.jit(sw.autoscale(lambda x, y: (jnp.minimum(x, y), jnp.maximum(x, y)), recipe))(
        x, y
    )
    # beside 1e30, FP16 holds no 2: it becomes the smallest number
    np.testing.assert_array_equal(np.sign(low), [1, 1, 0, -1])
    assert np.abs(low).max() < 1e30 * 2.0**-24
    np.testing.assert_allclose(high[jnp.array([0, 1, 3])], 1e30, rtol=2e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_non_finite_elements_stay(recipe):
    x, y = jnp.array([jnp.nan, jnp.inf, -jnp.inf, BIG]), jnp.array([1.0, 2.0, 3.0, 4.0])
    for f in (jnp.minimum, jnp.maximum):
        for g in (f, lambda x, y, f=f: f(y, x)):
            got, want = jax.jit(sw.autoscale(g, recipe))(x, y), g(x, y)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
            np.testing.assert_array_equal(np.isinf(got), np.isinf(want))
    low = jax.jit(sw.autoscale(jnp.minimum, recipe))(x, y)
    np.testing.assert_allclose(low, [np.nan, 2, -np.inf, 4], rtol=2e-3)


def best(first, losses):
    """Early stopping: the least loss so far."""
    return jax.lax.scan(lambda b, x: (jnp.minimum(b, x), None), first, losses)[0]


def last(first, losses):
    def below(state):
        return state[1] < losses.shape[0]

    def next_(state):
        return jnp.minimum(state[0], losses[state[1]]), state[1] + 1

    return jax.lax.while_loop(below, next_, (first, 0))[0]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("f", [best, last])
def test_a_carry_that_begins_with_the_largest_number(recipe, f):
    got = jax.jit(sw.autoscale(f, recipe))(jnp.float32(BIG), jnp.array([2.0, 1.5, 1.2, 1.4]))
    np.testing.assert_allclose(got, 1.2, rtol=1e-3)
    constant = jax.jit(sw.autoscale(lambda x: f(jnp.float32(BIG), x), recipe))
    np.testing.assert_allclose(constant(jnp.array([2.0, 1.5, 1.2, 1.4])), 1.2, rtol=1e-3)


def attention(scores, values):
    """Online softmax: the largest score so far begins with the least number."""

    def body(carry, block):
        most, total, out = carry
        s, v = block
        new = jnp.maximum(most, s.max())
        p, old = jnp.exp(s - new), jnp.exp(most - new)
        return (new, total * old + p.sum(), out * old + p @ v), None

    init = jnp.float32(-BIG), jnp.float32(0), jnp.zeros(values.shape[-1])
    (_, total, out), _ = jax.lax.scan(body, init, (scores, values))
    return out / total


@pytest.mark.parametrize("recipe", RECIPES)
def test_online_softmax_equals_softmax(recipe):
    scores, values = normal(0, (3, 4)) - 20, normal(1, (3, 4, 2))
    want = jax.nn.softmax(scores.ravel()) @ values.reshape(12, 2)
    got = jax.jit(sw.autoscale(attention, recipe))(scores, values)
    np.testing.assert_allclose(got, want, atol=0.02)


@pytest.mark.parametrize("recipe", RECIPES)
def test_extremes_along_an_axis(recipe):
    x = normal(0, (4, 6)) * 1e-6

    def f(x, first):
        ordered = jnp.sort(x), jax.lax.top_k(x, 3)[0]
        running = jax.lax.cummin(x, axis=1), jax.lax.cummax(x, axis=1)
        ends = x.min(1, initial=BIG), x.max(1, initial=-BIG), jnp.minimum(x.min(1), first)
        return ordered, running, ends

    first = jnp.float32(BIG)
    got = jax.jit(sw.autoscale(f, recipe))(x, first)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(f(x, first)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gradient_of_a_minimum(recipe):
    def f(x, y):
        return jnp.sum(jnp.minimum(x, y) ** 2)

    x, y = jnp.array([1.0, 2.0, 3.0]), jnp.full(3, BIG)
    got = jax.jit(sw.autoscale(jax.grad(f, (0, 1)), recipe))(x, y)
    np.testing.assert_allclose(got, [[2, 4, 6], [0, 0, 0]], rtol=1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("x64", [False, *nightly([True])])
def test_the_largest_number_stays_finite(recipe, x64):
    """Rounded to the nearest number of FP16's precision it would be infinite."""

    def f(x):
        same = x, -x, x.max(), jnp.nan_to_num(x * jnp.inf), jnp.minimum(x * jnp.inf, top)
        return jnp.stack([*map(jnp.squeeze, same), jnp.abs(-top * jnp.ones(())) + 0 * x[0]])

    with jax.enable_x64(x64):
        top = float(jnp.finfo(jnp.float64 if x64 else jnp.float32).max)
        x = jnp.array([top])
        got = jax.jit(sw.autoscale(f, recipe))(x)
        assert got.dtype == x.dtype
        np.testing.assert_allclose(got, [top, -top, top, top, top, top], rtol=1e-3)
        np.testing.assert_allclose(
            jax.jit(sw.autoscale(jnp.log, recipe))(x), np.log(top), rtol=1e-3
        )
        beyond = jax.jit(sw.autoscale(lambda x: x * 4, recipe))(x)
        np.testing.assert_array_equal(beyond, np.inf)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("factor", [1e36, 2e36, 8e37])
def test_a_large_constant_factor_keeps_its_value(recipe, factor):
    def f(x):
        return x * factor * 1e-36

    x = jnp.array([3.0, -0.25])
    np.testing.assert_allclose(jax.jit(sw.autoscale(f, recipe))(x), f(np.float64(x)), rtol=2e-3)
    tiny = jnp.float32(1e-30)
    got = jax.jit(sw.autoscale(jax.grad(lambda x: x * x * factor), recipe))(tiny)
    np.testing.assert_allclose(got, 2e-30 * factor, rtol=2e-3)
