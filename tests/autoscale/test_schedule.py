"""Recipes that follow each other, and layers that a pattern keeps wide."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import scalewise as sw
from arrays import normal
from scalewise import training

W = normal(0, (32, 32)) / 6
X = normal(1, (16, 32))
WARM = sw.Schedule({0: "bf16", 2: "mxfp4_forward", 0.9: "bf16"}, steps=20)


def loss(w, x):
    return jnp.sum(jnp.square(jnp.tanh(x @ w)))


def gradients(recipe):
    return np.asarray(sw.autoscale(jax.grad(loss), recipe)(W, X))


def near(got, want):
    """Compares two programs that XLA compiles in another way: numbers on ties go either way."""
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)


def test_each_step_has_the_recipe_of_its_phase():
    assert WARM.starts == (0, 2, 18)
    bf16, mxfp4 = gradients("bf16"), gradients("mxfp4_forward")
    assert np.linalg.norm(bf16 - mxfp4) > 0.1 * np.linalg.norm(bf16)
    step = sw.autoscale(jax.grad(loss), WARM)
    compiled = jax.jit(step)
    for i, want in {0: bf16, 1: bf16, 2: mxfp4, 17: mxfp4, 18: bf16, 99: bf16}.items():
        near(compiled(i, W, X), want)
    np.testing.assert_array_equal(step(2, W, X), mxfp4)


@pytest.mark.slow
def test_a_schedule_inside_a_loop_over_the_steps():
    step = sw.autoscale(jax.grad(loss), WARM)
    out = jax.lax.scan(lambda c, i: (c, step(i, W, X)), 0, jnp.arange(20))[1]
    wide, narrow = gradients("bf16"), gradients("mxfp4_forward")
    for i, got in enumerate(out):
        near(got, narrow if 2 <= i < 18 else wide)


def test_a_key_comes_behind_the_step():
    schedule = sw.Schedule({0: "bf16", 2: "nvfp4"})
    step = jax.jit(sw.autoscale(jax.grad(loss), schedule, keyed=True))
    key, other = jax.random.split(jax.random.key(0))
    np.testing.assert_array_equal(step(0, key, W, X), step(0, other, W, X))
    assert np.any(step(2, key, W, X) != step(2, other, W, X))


@pytest.mark.slow
def test_a_training_step_follows_its_states_step():
    def model(params, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ params["w"])))

    def train(policy):
        step = training.step(model, optax.sgd(0.1), policy)
        states = [step.init({"w": W})]
        for _ in range(2):
            states.append(jax.jit(step)(states[-1], X)[0])
        return [np.asarray(state.params["w"]) for state in states]

    _, first, second = train(sw.Schedule({0: "bf16", 1: "mxfp4_forward"}))
    wide = train("bf16")
    near(first, wide[1])
    gradient = sw.autoscale(jax.grad(model), "mxfp4_forward")({"w": jnp.asarray(first)}, X)["w"]
    near(second - first, -0.1 * np.asarray(gradient))
    assert np.linalg.norm(second - wide[2]) > 0.1 * np.linalg.norm(second - first)


def layers(ws, x):
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer_{i}"), jax.named_scope("dense"):
            x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


def formats(recipe):
    rows = sw.explain(jax.grad(layers), recipe)([W] * 12, X).rows
    return [(r.direction, r.format) for r in rows if r.kind == "contraction"]


def test_a_pattern_keeps_the_first_and_the_last_layer():
    keep = {re.compile(r"^layer_(0|11)/"): "bf16"}
    found = formats(dataclasses.replace(sw.recipes.nvfp4, keep=keep))
    forward = [fmt for direction, fmt in found if direction == "forward"]
    assert forward == ["bf16 x bf16", *["nvfp4 x nvfp4"] * 10, "bf16 x bf16"]
    assert [fmt for d, fmt in found if d == "backward"].count("bf16 x bf16") == 3


def test_a_recipe_with_a_pattern_evaluates_from_its_repr():
    recipe = dataclasses.replace(sw.recipes.fp8, keep={re.compile("^head"): "bf16"})
    assert eval(repr(recipe), {"re": re, **vars(sw.autoscaling)}) == recipe
    assert hash(recipe) == hash(dataclasses.replace(recipe))


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: sw.Schedule({}), ValueError, "expected step 0"),
        (lambda: sw.Schedule({5: "bf16"}), ValueError, r"begin at \(5,\); expected step 0"),
        (lambda: sw.Schedule({0: "bf16", 0.5: "fp8"}), ValueError, "expected steps, the number"),
        (lambda: sw.Schedule({0: "bf16", 1.5: "fp8"}, 10), ValueError, "begins at 1.5; expected"),
        (
            lambda: sw.Schedule({0: "bf16", 30: "fp8", 0.9: "bf16"}, steps=20),
            ValueError, "never ends: the next begins at step 30, and the run has 20 steps",
        ),
        (
            lambda: sw.Schedule(((0, "bf16"), (9, "fp8"), (4, "bf16"))),
            ValueError, "begin at the steps 0, 9, 4; expected increasing ones",
        ),
        (lambda: sw.Schedule({0: "bf16"}, steps=0), ValueError, "steps is 0; expected a positive"),
        (lambda: sw.Schedule({0: "fp88"}), ValueError, "fp88"),
        (lambda: sw.Schedule({0: "fp8_delayed"}), ValueError, "needs the history of every step"),
        (
            lambda: sw.Schedule(
                {0: "fp8", 1: sw.Recipe(state=(("mu", sw.Storage("bf16")),))}
            ),
            ValueError, "give all of them the same Recipe.state",
        ),
        (lambda: WARM.recipe(-1), ValueError, "step is -1; expected 0, 1"),
        (lambda: sw.autoscale(loss, WARM)(W, X), TypeError, "the first argument is the step"),
        (
            lambda: formats(sw.Recipe(keep={re.compile("^head"): "bf16"})),
            ValueError, r"'\^head', which is found in no scope where .* dot_general.*layer_0/dense",
        ),
        (
            lambda: formats(sw.Recipe(keep={"head": "bf16"})),
            ValueError, "'head', which is neither a primitive, nor a scope",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_refused(build, error, message):
    with pytest.raises(error, match=message):
        build()
