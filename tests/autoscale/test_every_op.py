"""``scalify``: FP16 and BF16 at each step, and nothing lost to their range."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from arrays import normal
from cases import nightly
from programs import DIFFERENTIABLE, PROGRAMS, scalar, together
from scalewise.formats import BF16, FP32

EACH = sw.recipes.fp16_every_op
BRAIN = sw.Scalify(BF16, rescale="max")


def close(got, want, rtol):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) <= rtol * np.linalg.norm(want)


# Of "calls", a chain of 40 sines, the gradients span 2^120, and it takes 10 s to compile.
SHORT = [f for f in PROGRAMS if f.__name__ != "calls"]


def test_every_kind_of_control_flow():
    x, f = normal(0, (4, 4)), together(SHORT)
    got, want = jax.jit(sw.autoscale(f, EACH))(x), jax.jit(f)(x)
    jax.tree.map(lambda a, b: close(a, b, 0.03), got, want)


def test_gradients_of_it():
    smooth = [f for f in SHORT if f in DIFFERENTIABLE]
    x, f = normal(0, (4, 4)), together(smooth, lambda f: jax.grad(scalar(f)))
    got, want = jax.jit(sw.autoscale(f, EACH))(x), jax.jit(f)(x)
    jax.tree.map(lambda a, b: close(a, b, 0.05), got, want)


def test_each_result_is_a_number_of_the_format():
    f = sw.autoscale(lambda x, y: (x * y, x + y, jnp.exp(x), x @ y), BRAIN)
    x = normal(0, (8, 8))
    for y in jax.jit(f)(x, x.T):
        mantissa, _ = np.frexp(np.asarray(y))
        np.testing.assert_array_equal(mantissa * 2**8, np.round(mantissa * 2**8))
    # XLA: under jit bf16 (1 + 2^-8) + 2^-8 reads back as 1.00390625; rounded each time it is 1
    tiny = jnp.full(3, 2.0**-8)
    g = jax.jit(sw.autoscale(lambda o, t: (o + t) + t, BRAIN))
    np.testing.assert_array_equal(g(jnp.ones(3), tiny), np.ones(3))


def test_exponents_have_no_range():
    def far(x):
        y = x
        for _ in range(5):
            y = y * y  # x^32: 10^-960 to 10^960
        for _ in range(5):
            y = jnp.sqrt(y)
        return y

    x = jnp.array([1e30, 1.1e30, 1.2e30])
    close(jax.jit(sw.autoscale(far, EACH))(x), x, 2e-2)
    close(jax.jit(sw.autoscale(far, EACH))(x * 1e-60), x * 1e-60, 2e-2)
    assert np.isinf(far(x)).all()


def test_a_second_moment_doesnt_vanish_where_the_gradient_doesnt():
    g = jnp.logspace(-9, 0, 64)

    def update(g):
        v = 0.001 * jnp.square(g)
        return g / (jnp.sqrt(v / 0.001) + 1e-12)

    got = jax.jit(sw.autoscale(update, EACH))(g)
    assert np.isfinite(got).all()
    assert (np.asarray(got) <= 1.01).all()  # never larger than the true step


def test_adam_learns_from_gradients_that_span_2_to_the_17():
    g = jnp.logspace(0, -5, 64)

    def step(v, w):  # RMSProp after one step: each weight moves by the same
        v = 0.9 * v + 0.1 * jnp.square(g)
        return v, w - 0.01 * g / (jnp.sqrt(v) + 1e-12)

    f, v, w = jax.jit(sw.autoscale(step, EACH)), jnp.zeros(64), jnp.zeros(64)
    for _ in range(3):
        v, w = f(v, w)
    want = 0.01 * sum(1 / np.sqrt(1 - 0.9**n) for n in (1, 2, 3))
    np.testing.assert_allclose(w, np.full(64, -want), rtol=0.03)


@pytest.mark.parametrize("rescale", nightly(["max", "l2", None], but=["l2"]))
def test_each_measure(rescale):
    recipe = sw.Scalify(rescale=rescale)
    f = lambda x: jax.nn.softmax(jnp.tanh(x) @ x.T)  # noqa: E731
    x = normal(0, (8, 8))
    close(jax.jit(sw.autoscale(f, recipe))(x), f(x), 5e-3)


def test_vmap_inside_and_outside():
    x = normal(0, (3, 4, 4)) * jnp.array([1e-20, 1, 1e20])[:, None, None]
    f = lambda x: jnp.tanh(x / jnp.max(jnp.abs(x))) @ x  # noqa: E731
    close(jax.jit(jax.vmap(sw.autoscale(f, EACH)))(x)[0], f(x[0]), 2e-3)
    close(jax.jit(sw.autoscale(jax.vmap(f), EACH))(x)[2], f(x[2]), 2e-3)


def test_rescaling_by_hand_forward_and_backward():
    def sums(mark):
        def f(x):
            for _ in range(4):  # of numbers all alike: their sums leave unit size
                x = jnp.broadcast_to(mark(jnp.sum(x)), x.shape)
            return x[0]

        return f

    def same(x):
        return x

    x = jnp.ones(4096)
    run = lambda mark: float(jax.jit(sw.autoscale(sums(mark), "scalify"))(x))  # noqa: E731
    assert run(sw.rescale) == 4096.0**4
    assert run(same) == 4096.0**4  # scales are found anew after sums
    text = str(jax.make_jaxpr(sw.autoscale(lambda x: sw.rescale(x * 2), "scalify"))(x))
    plain = str(jax.make_jaxpr(sw.autoscale(lambda x: x * 2, "scalify"))(x))
    assert text.count("reduce_sum") > plain.count("reduce_sum")
    for mark in (sw.rescale, sw.rescale_gradient):
        assert sums(mark)(x) == 4096.0**4
        np.testing.assert_array_equal(jax.grad(sums(mark))(x), jax.grad(sums(same))(x))
    back = jax.jit(sw.autoscale(jax.grad(sums(sw.rescale_gradient)), "scalify"))(x)
    np.testing.assert_array_equal(back, jax.grad(sums(same))(x))
    assert "copy" not in str(jax.make_jaxpr(sw.rescale_gradient)(x))


@pytest.mark.parametrize(("arithmetic", "beyond"), [("float32", 131072.0), ("narrow", np.inf)])
def test_arithmetic_of_contractions(arithmetic, beyond):
    """Data of unit size: sums of 64 fit in FP16 whatever the scales are, those of 131,072 don't."""
    recipe = sw.Scalify(arithmetic=arithmetic)
    dot = jax.jit(sw.autoscale(jnp.dot, recipe))
    for terms, want in ((64, 64.0), (131072, beyond)):
        for factor in (1.0, 2.0**30):
            assert float(dot(jnp.ones(terms), jnp.full(terms, factor))) == want * factor


@pytest.mark.parametrize("kept", ["head", "mul"])
def test_kept_equations_are_not_rounded_and_others_are(kept):
    def f(w, x):
        with jax.named_scope("head"):
            y = w * x * 0.1
        return y, -y

    w, x = jax.random.uniform(jax.random.key(0), (2, 64), minval=1, maxval=2) * 2.0**100
    recipe = dataclasses.replace(EACH, keep={kept: FP32})
    exact, rounded = jax.jit(sw.autoscale(f, recipe))(w, x * 2.0**-90)
    want = w * (x * 2.0**-90) * 0.1
    np.testing.assert_array_equal(exact, want)
    np.testing.assert_array_equal(rounded, -sw.round_to(want * 2.0**-110, "fp16") * 2.0**110)


def test_an_optimizer_kept_in_float32_sees_all_of_a_gradients_range():
    def step(w, v, g):
        with jax.named_scope("optimizer"):
            v = 0.999 * v + (1 - 0.999) * jnp.square(g)
            return w - 0.01 * g / (jnp.sqrt(v) + 1e-30), v

    g = jnp.logspace(-12, 8, 64)
    careful = jax.jit(sw.autoscale(step, dataclasses.replace(EACH, keep={"optimizer": FP32})))
    narrow = jax.jit(sw.autoscale(step, EACH))
    w, v = jnp.zeros(64), jnp.zeros(64)
    np.testing.assert_allclose(careful(w, v, g)[0], step(w, v, g)[0], rtol=1e-5)
    assert np.abs(np.asarray(narrow(w, v, g)[0]) / step(w, v, g)[0] - 1).max() > 0.1


def test_loops_and_branches_use_the_storage_format_even_if_parts_are_kept():
    def f(x):
        def turn(carry, row):
            with jax.named_scope("careful"):
                carry = carry + row * row
            return carry, carry

        total, each = jax.lax.scan(turn, jnp.zeros(4), x)
        return jax.lax.cond(total[0] > 0, lambda t: t * 2, lambda t: t, total), each

    x = normal(0, (5, 4)) * 1e4
    recipe = dataclasses.replace(EACH, keep={"careful": FP32, "mul": BF16})
    for got, want in zip(jax.jit(sw.autoscale(f, recipe))(x), f(x), strict=True):
        close(got, want, 5e-3)


def test_a_wide_operation_reads_values_that_depend_on_no_argument():
    def f(w):
        return jnp.arange(12.0).reshape(1, 12) @ w

    recipe = dataclasses.replace(sw.recipes.fp16_every_op, keep={"dot_general": "fp32"})
    w = jnp.linspace(0.1, 0.9, 24).reshape(12, 2)
    assert jnp.allclose(sw.autoscale(f, recipe)(w), f(w), rtol=1e-3)


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        ({}, "scalify"),
        ({"rescale": "max"}, "fp16_every_op"),
        ({"format": "bf16", "rescale": "max", "keep": {"tanh": "fp32"}}, None),
    ],
)
def test_scalify_is_the_recipe(options, recipe):
    def loss(w, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ w)))

    args = jnp.full((4, 4), 256.0), jnp.full((8, 4), 1e3)
    if recipe is None:
        recipe = sw.Scalify(BF16, rescale="max", keep=(("tanh", FP32),))
    found = jax.make_jaxpr(jax.grad(sw.scalify(loss, **options)))(*args)
    assert str(found) == str(jax.make_jaxpr(jax.grad(sw.autoscale(loss, recipe)))(*args))
    assert "f16" in str(found)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"format": "e4m3fn"}, "e4m3fn; expected 'fp16' or 'bf16'"),
        ({"rescale": "always"}, "scalify: rescale is 'always'"),
        ({"keep": {"head": "e4m3fn"}}, "keep names e4m3fn"),
    ],
)
def test_scalify_refuses_what_it_cannot_do(bad, message):
    with pytest.raises(ValueError, match=message):
        sw.scalify(jnp.tanh, **bad)
