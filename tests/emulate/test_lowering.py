"""Emulated float64 equations, lowered by an outer ``jit`` without x64, are those of eager mode."""

import jax
import jax.numpy as jnp
import jax.scipy.special as special
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse

import scalewise as sw
from arrays import normal

X = np.asarray(normal(0, (4, 4)), np.float32)
P = np.abs(X) + np.float32(0.5)


def pool(x):
    return jnp.sum(lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"))


def window(x, operation):  # the first value is traced: the generic primitive, not reduce_window_sum
    return lax.reduce_window(x, x[0, 0], operation, (2, 2), (1, 1), "VALID")


# Their lowerings, or the functions that they apply to scalars, are other JAX functions.
CASES = {
    "argmax": lambda x, p: jnp.argmax(x, 1),
    "argmin": lambda x, p: jnp.argmin(x, 1),
    "nanargmax": lambda x, p: jnp.nanargmax(x, 1),
    "categorical": lambda x, p: jax.random.categorical(jax.random.key(0), x),
    "max_pool_gradient": lambda x, p: jax.grad(pool)(x),
    "igamma": lambda x, p: special.gammainc(p, p + 1),
    "igammac": lambda x, p: special.gammaincc(p, p + 1),
    "betainc": lambda x, p: special.betainc(p, p, jnp.tanh(p)),
    "i0e": lambda x, p: special.i0e(x),
    "random_gamma": lambda x, p: jax.random.gamma(jax.random.key(0), p),
    "reduce_window": lambda x, p: window(x, lax.add),
    "reduce_window_of_a_function": lambda x, p: window(x, lambda a, b: jnp.maximum(a * 0.5, b)),
    "reduce_of_a_function": lambda x, p: lax.reduce(x, 1.0, lambda a, b: a * b, (0,)),
    "sparse": lambda x, p: sparse.BCOO.fromdense(x, nse=16) @ p,
    "gather": lambda x, p: x[jnp.array([0, 9])],
    "apply": lambda x, p: x.at[jnp.array([0, 2])].apply(jnp.sin),
    "apply_twice": lambda x, p: p.at[jnp.array([1, 1])].apply(lambda y: jnp.sqrt(y) * 3),
    "scatter_mul": lambda x, p: x.at[jnp.array([0, 2])].multiply(p[:2]),
    "complex": lambda x, p: lax.complex(x, p) * 2j,
    "parts": lambda x, p: jnp.abs(lax.complex(x, p)) * p + jnp.real(jnp.fft.fft(x)) + p,
    "cumprod": lambda x, p: lax.cumprod(x, 1),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:emulate.* no narrow format has complex numbers")
def test_under_jit():
    def every(x, p):
        return {name: f(x, p) for name, f in CASES.items()}

    want = jax.jit(every)(X, P)
    got = jax.jit(sw.emulate(every, "fp32"))(X, P)
    for name in CASES:
        assert got[name].dtype == want[name].dtype, name
        np.testing.assert_allclose(got[name], want[name], rtol=2e-5, atol=2e-6, err_msg=name)


def test_an_update_functions_own_results_are_rounded():
    x = jnp.float32([1.0, 3.0])

    def f(y):
        return (y * 0.1 + 1e3) - 1e3  # of 1e3 + 0.3 FP16 keeps multiples of 1/2

    got = jax.jit(sw.emulate(lambda x: x.at[jnp.array([1])].apply(f), "fp16"))(x)
    assert [float(y) for y in got] == [1.0, float(sw.emulate(f, "fp16")(x[1]))] == [1.0, 0.5]


@pytest.mark.parametrize("recipe", ["fp16_every_op", "fp16"])
def test_an_update_function_is_applied_under_autoscale(recipe):
    def f(x):
        return (x * 3).at[jnp.array([0, 2])].apply(jnp.sin)

    x = jnp.asarray(X)
    np.testing.assert_allclose(jax.jit(sw.autoscale(f, recipe))(x), f(x), atol=4e-3)


def test_an_update_function_runs_in_float32_under_autocast():
    def f(x):
        return (x @ x).at[jnp.array([0])].apply(lambda y: jnp.exp(y + 10))

    x = jnp.eye(2) * 2
    np.testing.assert_allclose(sw.autocast(f)(x), f(x), rtol=1e-6)  # FP16 ends at 65504


@pytest.mark.parametrize("f", [
    lambda x: jnp.sum(special.gammainc(1.5, x) * special.i0e(x)),
    lambda x: jnp.sum(lax.cumsum(x, 0) ** 2) + jnp.sum(x[jnp.array([0, 2])] ** 3),
])  # fmt: skip
@pytest.mark.slow
def test_transformed_from_outside_under_jit(f):
    def second(f):
        return jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(f)(x))))

    def every(f):
        return lambda x: (f(x[0]), jax.vmap(f)(x), jax.grad(f)(x[0]), second(f)(x[0]))

    want = jax.jit(every(f))(P)
    got = jax.jit(every(sw.emulate(f, "fp32")))(P)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_without_64_bit_arrays_there_is_no_scope():
    def f(x):  # complex64 and keys have elements of 64 bits
        return jnp.abs(jnp.fft.fft(x)) + jax.random.uniform(jax.random.key(0), x.shape)

    assert "x64_scope" not in str(jax.make_jaxpr(sw.autoscale(f, "fp16"))(X))
    assert "x64_scope" in str(jax.make_jaxpr(sw.emulate(lambda x: jnp.cumsum(x, 0), "fp16"))(X))
