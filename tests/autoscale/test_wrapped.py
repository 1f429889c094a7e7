"""Transformed functions as JAX and Python see them: signatures, methods, and missing arguments."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import scalewise as sw
from arrays import normal

W, X = normal(0, (8, 8)), normal(1, (4, 8))
KEY = jax.random.key(0)


def power(w, x, n):
    for _ in range(n):
        x = x @ w
    return x


def keyed(f):
    return sw.autoscale(f, "nvfp4", keyed=True)


def test_static_arguments_count_from_the_key():
    f = keyed(power)
    assert str(inspect.signature(f)) == "(key, /, w, x, n)"
    assert f.__name__ == "power"
    want = f(KEY, W, X, 2)
    by_name, by_number = jax.jit(f, static_argnames="n"), jax.jit(f, static_argnums=3)
    for got in (by_name(KEY, W, X, n=2), by_name(KEY, W, X, 2), by_number(KEY, W, X, 2)):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    outer = jax.jit(sw.autocast(f, "f32"), static_argnames="n")
    np.testing.assert_allclose(outer(KEY, W, X, n=2), want, rtol=1e-5)


def test_a_function_with_an_argument_of_the_same_name():
    f = keyed(lambda key, x: x + key)
    assert str(inspect.signature(f)) == "(key_, /, key, x)"
    assert jax.jit(f)(KEY, 1.0, x=2.0) == 3


def test_a_callable_without_a_signature():
    f = keyed(max)
    assert not hasattr(f, "__wrapped__")
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(max)


def test_the_donated_argument_is_the_named_one():
    f = keyed(lambda w, x: (w @ x, x * 2))
    w, x = W + 0, W + 1
    jax.jit(f, donate_argnames="x")(KEY, w, x)
    assert x.is_deleted()
    assert not w.is_deleted()


class Model:
    def __init__(self):
        self.w = W

    @functools.partial(sw.autoscale, recipe="fp8")
    def current(self, x):
        return jnp.sum(x @ self.w)

    @functools.partial(sw.autoscale, recipe="fp8_delayed")
    def delayed(self, x, scale=1.0):
        """Returns a sum."""
        return jnp.sum(x @ self.w) * scale


class Net(nnx.Module):
    def __init__(self):
        self.w, self.calls = nnx.Param(W), nnx.Variable(jnp.int32(0))

    @functools.partial(sw.autoscale, recipe="fp8_delayed")
    def loss(self, x):
        self.calls[...] += 1
        return jnp.sum(x @ self.w[...])


def test_a_method_with_a_history_is_bound():
    model = Model()
    want = model.current(X)
    np.testing.assert_allclose(model.delayed(X), want, rtol=1e-5)
    np.testing.assert_allclose(model.delayed(X, scale=2.0), 2 * want, rtol=1e-5)
    np.testing.assert_allclose(Model.delayed(model, X), want, rtol=1e-5)
    assert model.delayed.__doc__ == "Returns a sum."
    history = model.delayed.init(X)
    got, history = jax.jit(model.delayed.step)(history, X)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert history.amaxes[0, 0] > 0


def test_a_method_of_a_module_updates_it():
    net = Net()
    history = net.loss.init(X)
    _, history = net.loss.step(history, X)
    assert int(net.calls[...]) == 1


def test_arrays_of_a_partial_stay_numbers():
    """Also where Flax NNX is imported, whose objects in a partial are arguments."""

    def ordered(x, *, order):
        assert isinstance(order, np.ndarray)
        return x[np.argsort(order)] * 2

    f = functools.partial(ordered, order=np.array([2, 0, 1]))
    got = sw.emulate(f, "fp16")(jnp.arange(3.0))
    assert jnp.array_equal(got, jnp.array([2.0, 4.0, 0.0]))
