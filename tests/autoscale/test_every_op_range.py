"""``scalify``: random draws, float64 programs, wide results and non-finite elements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from arrays import normal
from cases import nightly

RECIPES = ["scalify", *nightly(["fp16_every_op"])]


def draws(key):
    """Each of them takes a uniform number near its end to infinity if that is rounded to FP16."""
    shape = (65536,)
    uniform = jax.random.uniform(key, shape)
    return {
        "normal": jax.random.normal(key, shape),
        "gumbel": jax.random.gumbel(key, shape),
        "exponential": jax.random.exponential(key, shape),
        "logistic": jax.random.logistic(key, shape),
        "laplace": jax.random.laplace(key, shape),
        "truncated": jax.random.truncated_normal(key, -6.0, 6.0, shape),
        "user's own": -jnp.log(-jnp.log1p(-uniform)),
    }


@pytest.mark.parametrize("recipe", [*RECIPES, "fp8"])
def test_random_draws_are_computed_in_float32(recipe):
    key = jax.random.key(1)
    want, got = jax.jit(draws)(key), jax.jit(sw.autoscale(draws, recipe))(key)
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_draw_is_rounded_where_it_meets_an_argument(recipe):
    def sample(key, mean, scale):
        def turn(key, _):
            key, own = jax.random.split(key)
            return key, mean + scale * jax.random.normal(own, (512,))

        return jax.lax.scan(turn, key, None, length=4)[1]

    key, mean, scale = jax.random.key(1), jnp.float32(1e3), jnp.float32(1.2e5)
    got = np.asarray(jax.jit(sw.autoscale(sample, recipe))(key, mean, scale))
    want = np.asarray(jax.jit(sample)(key, mean, scale))
    np.testing.assert_allclose(got, want, rtol=4e-3, atol=4e-3 * want.std())
    mantissa, _ = np.frexp(got)
    np.testing.assert_array_equal(mantissa * 2**11, np.round(mantissa * 2**11))


def wide(x):
    low = jnp.where(x.sum() > 0, 1, 2)  # under x64 a weakly typed int64
    clamped = jax.lax.clamp(low.astype(x.dtype), x, jnp.asarray(3, x.dtype))
    drawn = jax.random.truncated_normal(jax.random.key(0), -2, 2, x.shape, x.dtype)
    return clamped, jnp.clip(x, low, 3), drawn * x, jax.nn.softmax(x * x), jnp.sum(x) / x


@pytest.mark.parametrize(
    ("recipe", "x64"),
    nightly(
        [("scalify", False), ("scalify", True), ("fp16_every_op", True)], but=[("scalify", True)]
    ),
)
def test_programs_of_either_width(recipe, x64):
    with jax.enable_x64(x64):
        x = jnp.arange(1.0, 5.0)
        f = jax.jit(sw.autoscale(wide, recipe))
        for got, want in zip(f(x), wide(x), strict=True):
            assert got.dtype == want.dtype == x.dtype
            np.testing.assert_allclose(got, want, rtol=3e-3)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.slow
def test_float64_numbers_beyond_float32(recipe):
    def f(x):
        return (x * 1e60) * (x * 1e100), jnp.sqrt(x * 1e-200), jnp.exp(x + 700) / jnp.exp(x + 699)

    with jax.enable_x64(True):
        x = jnp.arange(1.0, 5.0)
        for got, want in zip(jax.jit(sw.autoscale(f, recipe))(x), f(x), strict=True):
            np.testing.assert_allclose(got, want, rtol=3e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_logarithms_of_tiny_numbers(recipe):
    def loss(logits, y):  # the loss of Flax's VAE
        p = jax.nn.log_sigmoid(logits)
        return -jnp.sum(y * p + (1 - y) * jnp.log(-jnp.expm1(p)))

    logits, y = jnp.array([-3, 0.5, 9, 20, -20]), jnp.array([0.0, 1, 1, 1, 0])
    want, gradient = jax.value_and_grad(loss)(logits, y)
    got, back = jax.jit(sw.autoscale(jax.value_and_grad(loss), recipe))(logits, y)
    np.testing.assert_allclose(got, want, rtol=3e-3)
    np.testing.assert_allclose(back, gradient, rtol=5e-3, atol=1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_function_without_a_rule_has_the_formats_whole_range(recipe):
    got = jax.jit(sw.autoscale(jnp.exp, recipe))(jnp.array([8.0, 32]))
    np.testing.assert_allclose(got, np.exp([8.0, 32]), rtol=0.05)


@pytest.mark.slow
def test_gradients_through_a_transformer_block_keep_their_size():
    """Propagated by guesses, they lay at a thousandth of unit size after a few operations."""

    def block(x, w):
        n = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        scores = jnp.where(jnp.tril(jnp.ones((8, 8), bool)), (n @ w[0]) @ (n @ w[1]).T, -1e9)
        x = x + jax.nn.softmax(scores) @ (n @ w[2])
        return x + jax.nn.gelu(x @ w[3]) @ w[4]

    def loss(w, x):
        logits = jax.lax.scan(lambda x, w: (block(x, w), None), 0.02 * x, w)[0]
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    x, w = normal(0, (8, 16)), jax.random.key(1)
    w = normal(w, (3, 5, 16, 16)) / 4
    want = jax.jit(jax.grad(loss))(w, x)
    got = jax.jit(sw.autoscale(jax.grad(loss), "scalify"))(w, x)
    size = np.linalg.norm(want, axis=(-2, -1))
    assert (np.linalg.norm(got - want, axis=(-2, -1)) < 0.02 * size).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_numbers_too_small_for_a_tensors_scale_stay_nonzero(recipe):
    x = jnp.array([-80.0, 0, 80])
    got = jax.jit(sw.autoscale(lambda x: jnp.log(jnp.exp(x)) + 1 / jnp.exp(x), recipe))(x)
    assert np.isfinite(got).all()


def several(x, w):
    h = jnp.tanh(x @ w) * jax.nn.softmax(x) + jnp.sqrt(jnp.abs(x)) / (1 + jnp.exp(x))
    return h - h.mean(-1, keepdims=True)


@pytest.mark.parametrize("recipe", ["scalify", *nightly(["fp16_every_op"])])
def test_a_non_finite_element_leaves_the_others_as_they_are(recipe):
    """Forward and backward: the rows without it are those of float32."""

    def both(x, w):
        y, pull = jax.vjp(lambda x: several(x, w), x)
        return y, pull(jnp.cos(jnp.arange(12.0)).reshape(3, 4))[0]

    x = normal(0, (3, 4))
    w = normal(1, (4, 4))
    f, plain = jax.jit(sw.autoscale(both, recipe)), jax.jit(both)
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        given = x.at[1, 2].set(bad)
        for got, want in zip(f(given, w), plain(given, w), strict=True):
            ok = np.isfinite(want)
            np.testing.assert_array_equal(np.isfinite(got), ok)
            np.testing.assert_allclose(got[ok], want[ok], rtol=0.01, atol=0.01)
            assert ok[[0, 2]].all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_constant_beside_a_huge_number_keeps_its_value(recipe):
    """Where it bounds or replaces that number, whose scale would round it to 2^21."""
    x = jnp.asarray([1e18, 0.5, 3.0], jnp.float32)

    def bounded(x):
        valid = jnp.where(jnp.abs(x) < 1e9, x, 1.0)
        several = jnp.clip(x, -2, 2), jnp.minimum(x, 6.0), jax.lax.clamp(0.0, x, 3.0), valid
        return jnp.stack([y[0] for y in several])

    np.testing.assert_array_equal(jax.jit(sw.autoscale(bounded, recipe))(x), [2, 6, 3, 1])


FACTORED = {
    "solve": lambda a: jnp.linalg.solve(a, a[:, :2]),
    "inverse": jnp.linalg.inv,
    "lu": jax.scipy.linalg.lu,
    "cholesky": lambda a: jnp.linalg.cholesky(a @ a.T),
    "hessenberg": jax.scipy.linalg.hessenberg,
}


@pytest.mark.parametrize("name", nightly(FACTORED))
def test_factors_of_matrices_of_any_magnitude(name):
    """L's elements are at most 1 beside U's of the matrix's own magnitude, in one array."""
    a = normal(0, (8, 8)) / 8 + 3 * jnp.eye(8)
    for k in (-40, 40):
        given = a * np.float32(2.0**k)
        want = FACTORED[name](given)
        got = jax.jit(sw.autoscale(FACTORED[name], "fp16_every_op"))(given)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(np.linalg.norm(x - y) / np.linalg.norm(y), 0, atol=0.002)
