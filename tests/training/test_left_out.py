"""Steps that ``training.step`` leaves out: what they count, and do to the loss scale."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import scalewise as sw
from scalewise.training import (
    DynamicLossScale,
    step,
)

pytestmark = pytest.mark.usefixtures("users_promotion")


def test_steps_left_out_in_a_row_are_counted():
    """A gradient of NaN beside a finite loss, as data make one, lowers the scale each time."""

    def loss(w, x):
        return jnp.sum(jnp.where(x > 0, jnp.sqrt(x * w), 0.0))  # NaN times 0 in the gradient

    train = step(loss, optax.sgd(0.1), scaling=DynamicLossScale(min_scale=0.25))
    state, run = train.init(jnp.float32(1)), jax.jit(train)
    rows, bad = [], jnp.float32(-1.0)
    for x in (bad, bad, bad, bad, jnp.float32(1), bad):
        state, metrics = run(state, x)
        rows.append((int(metrics.skipped_in_a_row), int(metrics.skipped), float(metrics.scale)))
    top = 2.0**16
    assert rows == [
        (1, 1, top), (2, 2, top / 2), (3, 3, top / 4), (4, 4, top / 8), (0, 4, top / 16),
        (1, 5, top / 16),
    ]  # fmt: skip


def test_an_object_in_the_batch_is_refused():
    train = step(lambda w, x, rngs: w * x, optax.sgd(0.1))
    with pytest.raises(TypeError, match="the batch holds a Flax NNX object"):
        train(train.init(jnp.float32(1)), jnp.float32(1), nnx.Rngs(0))


def test_without_the_check_every_step_is_made_and_no_finite_test_is_in_the_program():
    def loss(params, x):
        return jnp.sum(params["w"] * x)

    params = {"w": jnp.ones(4)}
    step = sw.training.step(loss, optax.sgd(1.0), "p=f32,c=bf16,o=f32", check_finite=False)
    state = step.init(params)
    program = str(jax.make_jaxpr(step)(state, jnp.ones(4)))
    assert "is_finite" not in program
    assert "is_finite" in str(
        jax.make_jaxpr(sw.training.step(loss, optax.sgd(1.0)))(state, jnp.ones(4))
    )
    after, metrics = jax.jit(step)(state, jnp.array([1.0, 2.0, jnp.inf, 0.0]))
    assert bool(metrics.finite)
    assert int(metrics.skipped) == 0
    np.testing.assert_array_equal(after.params["w"], [0.0, -1.0, -np.inf, 1.0])


def test_clipping_and_a_constant_scale_need_no_check():
    loss = lambda w, x: jnp.sum(w * x)  # noqa: E731
    scaling = sw.training.StaticLossScale(8.0)
    results = []
    for check in (True, False):
        step = sw.training.step(loss, optax.sgd(1.0), scaling=scaling, clip=0.5, check_finite=check)
        results.append(jax.jit(step)(step.init(jnp.ones(4)), jnp.arange(4.0))[0].params)
    np.testing.assert_array_equal(*results)


def test_the_check_is_needed_by_a_scale_that_changes():
    with pytest.raises(ValueError, match="not DynamicLossScale"):
        sw.training.step(lambda w, x: jnp.sum(w * x), optax.sgd(1.0), "c=f16", check_finite=False)
