"""The likely mistakes of the first minutes: each message says what to write instead."""

import warnings

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import scalewise as sw

X = jnp.ones((2, 3))


def loss_of(w, x):
    return jnp.mean((x @ w) ** 2)


@pytest.mark.parametrize("name", ["audit", "explain", "plan", "record"])
def test_a_report_is_asked_of_the_function_that_makes_it(name):
    make = getattr(sw, name, None) or sw.auditing.record
    pending = make(loss_of, 6.0) if name == "plan" else make(loss_of)
    with pytest.raises(AttributeError, match=rf"call it .*: {name}\(f, \.\.\.\)\(x\)\.show"):
        pending.show()
    assert repr(pending) == f"<{name}(f, ...): a function of f's arguments>"


@pytest.mark.parametrize("integer", ["int8", "uint4", "i32", np.int8, jnp.int4, np.dtype("bool")])
def test_there_are_no_integer_formats(integer):
    for call in (
        lambda: sw.round_to(X, integer),
        lambda: sw.emulate(loss_of, integer),
        lambda: sw.quantize(X, integer),
        lambda: sw.audit(loss_of, integer)(X.T, X),
    ):
        with pytest.raises(ValueError, match="no integer formats: its smallest are e4m3fn"):
            call()
    with pytest.raises(ValueError, match="no integer formats"):
        sw.autoscale(loss_of, "int8")


def pair():
    return hk.transform(lambda x: hk.Linear(3)(x))


@pytest.mark.parametrize("make", [lambda: nn.Dense(3), pair])
@pytest.mark.parametrize("name", ["autoscale", "audit", "emulate", "autocast", "explain", "plan"])
def test_a_module_without_its_parameters_is_no_function(make, name):
    model = make()
    options = [6.0] if name == "plan" else ["bf16"]
    with pytest.raises(TypeError, match=r"; pass its method apply|expected a function"):
        getattr(sw, name)(model, *options)(X, X)


def test_a_bound_module_is_a_function():
    model = nn.Dense(3)
    bound = model.bind(model.init(jax.random.key(0), X))
    np.testing.assert_array_equal(sw.emulate(bound, "fp32")(X), sw.emulate(bound, "fp32")(X))


def test_a_missing_argument_is_described():
    with pytest.raises(TypeError, match="step: optimizer is missing"):
        sw.training.step(loss_of)  # pyright: ignore


@pytest.mark.parametrize("outer", ["fp8", "bf16"])
def test_a_step_that_is_wrapped_twice_warns(outer):
    once = sw.autoscale(loss_of, "fp8")
    with pytest.warns(UserWarning, match="loss_of is a result of autoscale already"):
        sw.autoscale(once, outer)
    with pytest.warns(UserWarning, match="already"):
        sw.autoscale(jax.jit(once), outer)
    with pytest.warns(UserWarning, match="already"):
        sw.training.step(once, optax.sgd(0.1), "fp8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sw.autoscale(jax.grad(loss_of), outer)


def test_long_lists_of_names_end_after_a_dozen():
    for call in (
        lambda: sw.autoscale(loss_of, "fp9"),
        lambda: sw.emulate(loss_of, "fpxx"),
        lambda: sw.audit(loss_of, "fpxx"),
    ):
        with pytest.raises(ValueError, match=r"\.\.\. \(\d+ in all: scalewise ") as found:
            call()
        listed = str(found.value).partition("expected one of ")[2].partition(", ...")[0]
        assert len(listed.split(", ")) == 12
