"""``autoscale`` beside the rest of JAX: jit's options, checkpoints, Flax NNX, Equinox, Optax."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import scalewise as sw
from arrays import normal
from scalewise.autoscaling import AmaxHistory

X = normal(0, (8, 16))
OPTIMIZER = optax.adam(1e-2)
NARROW = dataclasses.replace(
    sw.recipes.fp8_delayed,
    state=(
        (r"\.mu", sw.Storage("e4m3fn")),
        (r"\.nu", sw.Storage("fp16", root=2)),
        (r"'w'", sw.Storage("mxfp8_e4m3")),
        (r"'b'", sw.Storage("bf16")),
    ),
)


pytestmark = pytest.mark.usefixtures("users_promotion")


def loss(params, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ params["w"] + params["b"]) @ params["w"].T - x))


def step(state, x, *, power=1, scale=1.0):
    params, moments = state
    value, gradient = jax.value_and_grad(lambda p: loss(p, x) ** power * scale)(params)
    updates, moments = OPTIMIZER.update(gradient, moments)
    return (optax.apply_updates(params, updates), moments), value


def initial():
    params = {"w": normal(1, (16, 16)) / 4, "b": jnp.zeros(16)}
    return params, OPTIMIZER.init(params)


def equal(a, b):
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    for x, y in zip(a, b, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_static_and_keyword_arguments_and_donation():
    run = jax.jit(sw.autoscale(step), static_argnames="power", donate_argnums=0)
    state = initial()
    given = state[0]["w"]
    (params, _), value = run(state, X, power=2, scale=2.0)
    assert given.is_deleted()
    want, gradient = jax.value_and_grad(lambda p: loss(p, X) ** 2 * 2)(initial()[0])
    assert float(value) == pytest.approx(float(want), rel=1e-3)
    assert (np.sign(initial()[0]["w"] - params["w"]) == np.sign(gradient["w"])).mean() > 0.99


def test_a_scaled_state_goes_through_orbax_and_back_bit_for_bit(tmp_path):
    scaled = sw.autoscale(step, NARROW)
    state = sw.store(initial(), NARROW)
    history = scaled.init(state, X)
    run = jax.jit(scaled.step)
    (state, _), history = run(history, state, X)
    kinds = {type(a) for a in jax.tree.leaves(state, is_leaf=lambda a: hasattr(a, "value"))}
    assert {sw.ScaledArray, sw.SqrtStored} <= kinds
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", (state, history))
        checkpointer.wait_until_finished()
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, (state, history))
        back = checkpointer.restore(tmp_path / "state", like)
    assert isinstance(back[1], AmaxHistory)
    equal(back, (state, history))
    equal(run(back[1], back[0], X), run(history, state, X))


def test_a_flax_module():
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)

    def of_model(params, x):
        return jnp.mean(jnp.square(nnx.merge(graph, params)(x)))

    value, gradient = jax.jit(jax.value_and_grad(sw.autoscale(of_model, "fp8")))(params, X)
    want, plain = jax.value_and_grad(of_model)(params, X)
    assert float(value) == pytest.approx(float(want), rel=0.05)
    for g, p in zip(jax.tree.leaves(gradient), jax.tree.leaves(plain), strict=True):
        assert float(jnp.linalg.norm(g - p)) < 0.1 * float(jnp.linalg.norm(p))
    assert jax.tree.structure(gradient) == jax.tree.structure(plain)


class Counted(eqx.Module):
    """A model as users write them: layers, a function, Python numbers that are no static fields."""

    layer: eqx.nn.Linear
    activation: Callable
    width: int
    rate: float

    def __call__(self, x):
        return self.activation(self.layer(x)).reshape(self.width) * self.rate


def test_an_equinox_step_that_returns_its_model():
    model = Counted(eqx.nn.Linear(16, 16, key=jax.random.key(0)), jax.nn.gelu, 16, 0.5)
    optimizer = optax.sgd(0.1)

    def step(model, moments, x):
        gradients = eqx.filter_grad(lambda m: jnp.mean(jnp.square(jax.vmap(m)(x) - x)))(model)
        updates, moments = optimizer.update(gradients, moments, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), moments

    moments = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    run, plain = eqx.filter_jit(sw.autoscale(step, "fp8")), eqx.filter_jit(step)
    got, want = (f(*f(model, moments, X), X) for f in (run, plain))
    assert got[0].activation is jax.nn.gelu
    assert (type(got[0].width), type(got[0].rate)) == (int, float)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    moved = model.layer.weight - want[0].layer.weight
    distance = jnp.linalg.norm(got[0].layer.weight - want[0].layer.weight)
    assert distance < 0.1 * jnp.linalg.norm(moved)


def test_a_flax_state_whose_step_is_a_python_number():
    """``TrainState.create`` sets step=0, which ``jax.jit`` traces: 1 / step is an infinity."""
    schedule = lambda step: 1e-2 * jnp.minimum(1.0, 1 / step)  # noqa: E731
    model = linen.Dense(16)

    def step(state, x):
        gradients = jax.grad(lambda p: jnp.mean(jnp.square(state.apply_fn(p, x) - x)))(state.params)
        updates = jax.tree.map(lambda g: g * schedule(state.step), gradients)
        return state.apply_gradients(grads=updates)

    params = model.init(jax.random.key(0), X)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(1.0))
    delayed = sw.autoscale(step, "fp8_delayed")
    history = delayed.init(state, X)
    assert jax.eval_shape(delayed.step, history, state, X)[0].step.dtype == jnp.int32
    assert jax.eval_shape(lambda x: sw.autoscale(step, "fp8")(state, x), X).step.dtype == jnp.int32
    report = sw.audit(step, "fp16", trials=0, steps=2)(state, X)
    assert report.error.relative < 1e-2


def test_a_flax_step_that_updates_its_model_in_place():
    """The caller's model is updated under ``nnx.jit``, not under ``jax.jit``, which gets a copy."""

    def loss(model, x):
        return jnp.mean(jnp.square(model(x) - x))

    def step(model, x):
        gradients = nnx.grad(loss)(model, x)
        nnx.update(model, jax.tree.map(lambda w, g: w - g, nnx.state(model), gradients))
        return model

    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    updated = nnx.clone(model)
    nnx.jit(sw.autoscale(lambda model, x: step(model, x).bias.sum(), "fp8"))(updated, X)
    returned = jax.jit(sw.autoscale(step, "fp8"))(model, X)
    gradients = nnx.grad(sw.autoscale(loss, "fp8"))(model, X)
    moved = returned.kernel[...] - model.kernel[...]
    np.testing.assert_allclose(moved, -gradients.kernel[...], rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(updated.kernel[...], returned.kernel[...])
