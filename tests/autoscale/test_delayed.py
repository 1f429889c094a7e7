"""Delayed scaling: the history goes in and comes out, and the scales are those that it asks for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from arrays import normal
from scalewise.autoscaling import RULES, AmaxHistory, Family
from scalewise.interpret import CONTRACTIONS, transformed

W = normal(0, (16, 16)) / 4
X = normal(1, (8, 16))


def step(w, x):
    """A loss over a scan, its gradient, and an update."""

    def loss(w):
        h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)
        return jnp.mean(jnp.square(h @ w.T))

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


def product(w, x):
    return x @ w


def test_what_the_audit_runs_of_a_delayed_function_keeps_its_exceptions():
    recipe = dataclasses.replace(sw.recipes.fp8_delayed, keep={"dot_general": "bf16"})
    found = transformed(sw.autoscale(step, recipe))
    assert found.interpretation.overrides.keep == recipe.keep


def test_a_history_of_the_same_arrays_is_current_scaling():
    delayed = sw.autoscale(step, "fp8_delayed")
    history = delayed.init(W, X)
    (new, value), history = jax.jit(delayed.step)(history, W, X)
    want, loss = jax.jit(sw.autoscale(step, "fp8"))(W, X)
    np.testing.assert_array_equal(new, want)
    assert value == loss
    assert history.amaxes.shape == (len(history.operand_ids), 16)
    assert (np.asarray(history.amaxes[:, :2]) > 0).all()
    assert not history.amaxes[:, 2:].any()


def test_the_amax_of_a_loop_is_that_of_all_iterations():
    def f(x):
        return jax.lax.scan(lambda c, s: (c + s * jnp.sum(x @ W), None), 0.0, jnp.arange(4.0))[0]

    def g(x):
        return jax.lax.scan(lambda c, _: (2 * c, jnp.sum(c @ W)), x, None, length=4)[1].sum()

    for function, times in ((f, 1), (g, 8)):
        history = sw.autoscale(function, "fp8_delayed").init(X)
        largest = float(jnp.max(history.amaxes))
        assert largest == times * float(jnp.max(jnp.abs(X)))


def test_a_growing_operand_saturates_once_and_old_steps_are_forgotten():
    recipe = sw.recipes.fp8_delayed.with_operands(scaling=sw.Delayed(history=2))
    delayed = sw.autoscale(product, recipe)
    one, many = jnp.ones((4, 4)), jnp.full((4, 4), 64.0)
    history = delayed.init(one, one)
    run = jax.jit(delayed.step)
    first, history = run(history, one, many)  # 1 was known and put at 128: there is room up to 3.5
    assert float(first[0, 0]) == 4 * 448 / 128
    second, history = run(history, one, many)
    assert float(second[0, 0]) == 256
    for _ in range(2):
        _, history = run(history, one, one)
    assert float(jnp.max(history.amaxes)) == 1


def test_an_operand_of_zeros_has_the_scale_one():
    delayed = sw.autoscale(product, "fp8_delayed")
    history = delayed.init(jnp.zeros((4, 4)), jnp.ones((4, 4)))
    y, history = delayed.step(history, jnp.ones((4, 4)), jnp.ones((4, 4)))
    assert (np.asarray(y) == 4).all()
    y, history = delayed.step(history, jnp.full((4, 4), jnp.inf), jnp.ones((4, 4)))
    assert not np.isfinite(np.asarray(y)).any()
    assert np.isfinite(np.asarray(history.amaxes)).all()


def test_without_a_history_it_is_current_scaling_and_differentiable():
    delayed = sw.autoscale(product, "fp8_delayed")
    np.testing.assert_array_equal(delayed(W, X), sw.autoscale(product, "fp8")(W, X))
    total = lambda f: jax.grad(lambda w: jnp.sum(f(w, X)))(W)  # noqa: E731
    np.testing.assert_array_equal(total(delayed), total(sw.autoscale(product, "fp8")))
    assert delayed.__name__ == "product"


def test_a_cast_reads_its_operand_once():
    """Rounding doesn't wait for this step's amax: its scales came with the history."""
    delayed = sw.autoscale(product, "fp8_delayed")
    history = delayed.init(W, X)
    traced = jax.make_jaxpr(delayed.step)(history, W, X).jaxpr
    ours = [e for e in traced.eqns if e.primitive.name == "reduce_max" and e.invars[0].aval.ndim]
    later = {e.outvars[0] for e in ours if e.invars[0].aval.shape != history.amaxes.shape}
    assert len(later) == 2
    for eqn in traced.eqns:  # all that depends on an amax of this step
        if later & {v for v in eqn.invars if hasattr(v, "count")}:
            assert eqn.primitive.name != "dot_general"
            later |= set(eqn.outvars)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"per": "channel"}, "one scale for an operand"),
        ({"forward": "mxfp8_e4m3"}, "keeps one scale for an array, mxfp8_e4m3 has one a block"),
    ],
)
def test_contradictory_recipes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        sw.recipes.fp8_delayed.with_operands(**change)


def test_histories_of_other_programs_are_refused():
    delayed = sw.autoscale(product, "fp8_delayed")
    other = sw.autoscale(lambda x: x, "fp8_delayed").init(X)
    with pytest.raises(ValueError, match="made for another program"):
        delayed.step(other, W, X)
    with pytest.raises(TypeError, match="takes the AmaxHistory that init made, not a float"):
        delayed.step(1.0, W, X)
    assert isinstance(other, AmaxHistory)
    assert other.operand_ids == ()
    more = sw.autoscale(lambda w, x: product(w, x) @ w, "fp8_delayed").init(W, X)
    with pytest.raises(ValueError, match="has an operand 1/0, which this program has not"):
        delayed.step(more, W, X)


def test_operands_are_numbered_by_contractions_alone():
    """Operand ids depend neither on where arrays are nor on operations between contractions."""
    history = sw.autoscale(step, "fp8_delayed").init(W, X)
    other = sw.autoscale(lambda w, x: step(jnp.sin(w), jnp.cos(x)), "fp8_delayed")
    assert other.step(history, W, X)[1].operand_ids == history.operand_ids
    contractions = {name for name, rule in RULES.items() if rule.family is Family.CONTRACTION}
    assert contractions <= CONTRACTIONS


def test_a_step_differentiated_from_outside_is_refused():
    delayed = sw.autoscale(product, "fp8_delayed")
    history = delayed.init(W, X)
    with pytest.raises(TypeError, match="can't be differentiated from outside"):
        jax.grad(lambda w: jnp.sum(delayed.step(history, w, X)[0]))(W)


def test_attributes_of_a_callable_object_are_not_copied():
    class Layer:
        steps, recipe = "mine", "mine"

        def __init__(self):
            self.steps = self.recipe = self.f = "mine"

        def __call__(self, x):
            return x @ x

    scaled = sw.autoscale(Layer(), "fp8_delayed")
    assert scaled.init(jnp.ones((4, 4))).amaxes.shape[1] == 16
