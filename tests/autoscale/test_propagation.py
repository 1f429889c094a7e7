"""``rescale="never"``: scales follow from scales and shapes, on every row of the coverage table."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import scalewise as sw
from arrays import normal
from cases import nightly
from primitives import FLOATS, OTHERS, together
from scalewise import scaled
from scalewise.scaled import scaled_tree

NEVER = sw.Scalify(rescale="never")
# A loop's trips and a branch are chosen by data, and what they carry depends on the choice.
CHOSEN_BY_DATA = ("while", "cond", "custom_linear_solve")
ROWS = {name: row for name, row in (FLOATS | OTHERS).items() if name not in CHOSEN_BY_DATA}


def lift(x):
    x = jnp.asarray(x)
    return sw.ScaledArray(x, 1.0) if x.dtype == jnp.float32 else x


@pytest.mark.filterwarnings("ignore:.*(can.t be transformed|complex numbers)")
def test_no_scale_is_found_from_data():
    """Data of any size give the same scales; one that is found follows their size."""
    lifted = {name: [jax.tree.map(lift, a) for a in given] for name, (_, given) in ROWS.items()}

    @jax.jit
    def scales(factor):
        def resized(x):
            return dataclasses.replace(x, data=x.data * factor) if scaled.is_scaled(x) else x

        run = together(ROWS, lambda f: sw.autoscale(f, NEVER))
        outs = run(scaled_tree.map(resized, lifted))
        return {
            name: [y.scale for y in scaled_tree.leaves(out) if scaled.is_scaled(y)]
            for name, out in outs.items()
        }

    first, *others = [scales(jnp.float32(factor)) for factor in (1, 2.0**5, 2.0**-5, 0)]
    assert sum(map(len, first.values())) > 100
    assert not [name for name in ROWS if any(other[name] != first[name] for other in others)]


def data(seed, shape=(4, 16)):
    return jnp.float16(normal(seed, shape))


A = sw.ScaledArray(data(0), 2.0**-20)
B = sw.ScaledArray(data(1), 2.0**9)
POSITIVE = sw.ScaledArray(jnp.abs(data(2)) + 1, 2.0**-30)
PUBLISHED = {
    "add": (lambda a, b: a + b, scaled.add, (A, B)),
    "sub": (lambda a, b: a - b, scaled.sub, (A, B)),
    "mul": (lambda a, b: a * b, scaled.mul, (A, B)),
    "div": (lambda a, b: a / b, scaled.div, (A, POSITIVE)),
    "maximum": (jnp.maximum, scaled.maximum, (A, B)),
    "minimum": (jnp.minimum, scaled.minimum, (A, B)),
    "concatenate": (lambda a, b: jnp.concatenate([a, b]), lambda a, b: scaled.concatenate([a, b]),
                    (A, B)),
    "neg": (jnp.negative, scaled.neg, (A,)),
    "abs": (jnp.abs, scaled.abs, (A,)),
    "relu": (jax.nn.relu, scaled.relu, (A,)),
    "max": (jnp.max, scaled.max, (A,)),
    "min": (jnp.min, scaled.min, (A,)),
    "square": (jnp.square, scaled.square, (A,)),
    "integer_pow": (lambda a: a**3, lambda a: scaled.integer_pow(a, 3), (A,)),
    "sqrt": (jnp.sqrt, scaled.sqrt, (POSITIVE,)),
    "rsqrt": (jax.lax.rsqrt, scaled.rsqrt, (POSITIVE,)),
    "sum": (lambda a: jnp.sum(a, 1), lambda a: scaled.sum(a, 1), (A,)),
    "matmul": (lambda a, b: a @ b.T, lambda a, b: scaled.matmul(a, b.T), (A, B)),
    "exp": (jnp.exp, scaled.exp, (A,)),
    "log": (jnp.log, scaled.log, (POSITIVE,)),
    "tanh": (jnp.tanh, scaled.tanh, (A,)),
    "sigmoid": (jax.nn.sigmoid, scaled.sigmoid, (A,)),
    "sin": (jnp.sin, scaled.sin, (A,)),
    "cos": (jnp.cos, scaled.cos, (A,)),
}  # fmt: skip


def test_the_scales_are_those_of_the_scaled_operations():
    """So relu keeps 2^-20, also where half of the data are negative."""
    given = {name: arrays for name, (_, _, arrays) in PUBLISHED.items()}
    programs = {name: (f, ()) for name, (f, _, _) in PUBLISHED.items()}
    operations = {name: (f, ()) for name, (_, f, _) in PUBLISHED.items()}
    every = jax.jit(together(programs, lambda f: sw.autoscale(f, NEVER)))(given)
    published = jax.jit(together(operations))(given)
    for name, got in every.items():
        want = published[name]
        assert float(got.scale) == float(want.scale), name
        # never flushed to zero
        np.testing.assert_allclose(got.data, want.data, rtol=0, atol=2.0**-24, err_msg=name)


@pytest.mark.parametrize("number", [-0.7, *nightly([1.0, 3.0, 1e10])])
def test_a_constant_goes_into_the_scale(number):
    """As in ``scaled.mul``: the data keep their bits in a chain, a loop and its gradient."""

    def chain(x):
        for _ in range(3):
            x = x * number / 0.3
        return x

    def loop(x):
        return jax.lax.fori_loop(0, 3, lambda i, x: x * number / 0.3, x)

    def gradient(x):
        turn = lambda x, _: (x * number / 0.3, None)  # noqa: E731
        return jax.grad(lambda y: jnp.sum(jax.lax.scan(turn, y, None, length=3)[0] * x))(x)

    want = A
    for _ in range(3):
        want = scaled.div(scaled.mul(want, number), 0.3)
    for f in (chain, loop, gradient):
        got = sw.autoscale(f, NEVER)(A)
        np.testing.assert_array_equal(got.data, want.data)
        np.testing.assert_allclose(got.scale, want.scale, rtol=1e-6)


@pytest.mark.parametrize("exponent", [-60, -40, 0])
@pytest.mark.parametrize(
    "f",
    [
        lambda x: jnp.clip(x, -0.75, 0.75),
        lambda x: jnp.clip(x, -1, 1),  # integers, converted by jitted functions
        lambda x: jnp.where(x > 0, x, 0),
        lambda x: lax.clamp(-0.75, x, 0.0),
        lambda x: jnp.minimum(0.75, x),
        lambda x: jnp.maximum(x, -1e30),
        jax.nn.relu6,
    ],
)
def test_a_bound_keeps_the_scale_of_what_it_bounds(f, exponent):
    x = jnp.array([1.3, -0.7, 0.2, 0.0]) * 2.0**exponent
    np.testing.assert_allclose(sw.autoscale(f, NEVER)(x), f(x), rtol=2.0**-10)


def test_a_marked_place_is_rescaled():
    f = sw.autoscale(lambda a: sw.rescale(a * a), NEVER)
    y = f(sw.ScaledArray(data(0) * 64, 1.0))
    assert float(y.scale) > 2.0**8
    with pytest.raises(ValueError, match=r"rescale is 'always'; expected one of .*'never'"):
        sw.Scalify(rescale="always")
