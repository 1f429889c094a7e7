"""The policies of the interpretation of stored values, each made and called by itself."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.arrays import normal
from tests.cases import nightly

import scalewise as sw
from scalewise.autoscaling import Boundaries, Operands, load
from scalewise.autoscaling._residuals import Residuals
from scalewise.autoscaling._setup import Setup
from scalewise.autoscaling._value import StoredValue
from scalewise.interpret import Interpretation, body_of
from scalewise.scalifying import EveryOp, ResultRounding, ScaledValue


def equation(f, *args):
    return body_of(jax.make_jaxpr(f)(*args).jaxpr).steps[0].equation


@pytest.mark.parametrize("recipe", ["nvfp4", *nightly(["fp8", "mxfp8"])])
def test_operands_are_rounded_as_quantize_does(recipe):
    x, w = normal(0, (16, 64)), normal(1, (64, 32))
    own = sw.recipes.recipe(recipe)
    values = [ScaledValue(jnp.asarray(x), origin="forward"), ScaledValue(jnp.asarray(w))]
    policy = Operands(Setup(own))
    product = load(policy.multiply(equation(jnp.matmul, x, w), values)).value()
    stored = sw.quantize_params({"w": w}, own)["w"]
    setting = own.products.operand("forward", "activation")
    assert setting is not None
    scaling = None if setting.scaling == sw.Amax() else setting.scaling
    axis = None if setting.per_tensor else 1
    rounded = sw.quantize(x, setting.format, scaling=scaling, axis=axis)
    wide = [np.asarray(a.value(), np.float64) for a in (rounded, stored)]
    exact, size = np.matmul(*wide), np.matmul(*map(np.abs, wide))
    assert (np.abs(product - exact) <= 64 * 2.0**-24 * size).all()
    assert not np.allclose(product, np.matmul(x, w), rtol=1e-3)


def test_large_computed_values_wait_in_the_residuals_format():
    policy = Residuals(Setup(sw.Recipe(min_size=8)))
    value = ScaledValue(jnp.asarray(1e6 * normal(0, (4, 8))), origin="forward")
    stored = policy.stored(value, policy.setup.recipe.residuals)
    assert isinstance(stored, StoredValue)
    assert stored.data.dtype == jnp.float16
    np.testing.assert_allclose(load(stored).value(), value.data, rtol=2.0**-11)
    for other in (
        dataclasses.replace(value, origin="stored"),  # an argument is in memory as it is
        ScaledValue(value.data[0, :4], origin="forward"),
        dataclasses.replace(value, data=value.data.astype(jnp.bfloat16)),
    ):
        assert policy.stored(other, policy.setup.recipe.residuals) is other


def test_interpretations_inherit_two_levels_at_most():
    for cls in (Boundaries, EveryOp):
        assert len([c for c in cls.__mro__ if issubclass(c, Interpretation)]) == 3
        assert not cls.__subclasses__()
    assert Interpretation not in Residuals.__mro__ + Operands.__mro__ + ResultRounding.__mro__


def test_results_are_rounded_once_with_a_scale_of_their_own():
    policy = ResultRounding(sw.recipes.fp16_every_op)
    x = 1e9 * normal(0, (4, 8))
    found = policy.rescaled(ScaledValue(jnp.asarray(x)))
    assert found.data.dtype == jnp.float16
    wide = dataclasses.replace(found, data=found.data.astype(jnp.float32))
    np.testing.assert_allclose(wide.value(), x, rtol=2.0**-11)
