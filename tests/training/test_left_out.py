"""Steps that ``training.step`` leaves out: what they count, warn of, and do to the loss scale."""

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


def test_steps_left_out_in_a_row_are_counted_and_cause_a_warning():
    """A gradient of NaN beside a finite loss, as data make one, lowers the scale each time."""

    def loss(w, x):
        return jnp.sum(jnp.where(x > 0, jnp.sqrt(x * w), 0.0))  # NaN times 0 in the gradient

    train = step(loss, optax.sgd(0.1), scaling=DynamicLossScale(min_scale=0.25), warn_after=3)
    state, run = train.init(jnp.float32(1)), jax.jit(train)
    rows, bad = [], jnp.float32(-1.0)

    def run_all():
        nonlocal state
        for x in (bad, bad, bad, bad, jnp.float32(1), bad):
            state, metrics = run(state, x)
            rows.append((int(metrics.skipped_in_a_row), int(metrics.skipped)))
        jax.effects_barrier()

    with pytest.warns(UserWarning, match=r"3 steps in a row were left out.*loss scale is 8192"):
        run_all()
    assert rows == [(1, 1), (2, 2), (3, 3), (4, 4), (0, 4), (1, 5)]
    at_floor = DynamicLossScale(initial=1.0, min_scale=1.0)
    train = step(loss, optax.sgd(0.1), scaling=at_floor, warn_after=2)
    state, run = train.init(jnp.float32(1)), jax.jit(train)
    with pytest.warns(UserWarning, match=r"loss scale is 1\. That is its smallest, min_scale"):
        run_all()
    with pytest.raises(ValueError, match=r"warn_after is 0; expected a positive integer or None"):
        step(loss, optax.sgd(0.1), warn_after=0)


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_batches_that_are_not_finite_leave_the_loss_scale_alone(bad):
    """The loss stays finite, and the gradient is NaN under every scale."""

    def loss(w, x):
        return jnp.mean(jnp.tanh(jnp.where(x == x, w * x, 1.0)))

    train = step(loss, optax.sgd(0.1), scaling=DynamicLossScale())
    state, run = train.init(jnp.float32(1)), jax.jit(train)
    x = jnp.array([1.0, bad, 0.5], jnp.float32)
    for i in range(60):
        state, metrics = run(state, x)
        assert (bool(metrics.finite), int(metrics.skipped_in_a_row)) == (False, i + 1)
    state, metrics = run(state, jnp.array([1.0, 2.0, 0.5], jnp.float32))
    assert (bool(metrics.finite), float(metrics.scale)) == (True, 2.0**16)


def test_inputs_beyond_the_range_of_float16_leave_the_loss_scale_alone():
    """Clipped, the loss is finite in float16; the gradient of the overflow is NaN at any scale."""

    def loss(w, x):
        y = x @ w
        return jnp.mean(jnp.tanh(jnp.where(y == y, y, 0))) + jnp.sum(w * 0)

    train = step(loss, optax.sgd(0.1), "p=f32,c=f16,o=f32", warn_after=2)
    state, run = train.init(jnp.ones((3, 1))), jax.jit(train)
    good, large = jnp.eye(3), jnp.full((3, 3), 7e4)
    for _ in range(4):
        state, metrics = run(state, good)
    before = float(metrics.scale)
    with pytest.warns(UserWarning, match="or numbers beyond float16's 65504"):
        state, _ = jax.block_until_ready(run(run(state, large)[0], large))
    for _ in range(60):
        state, metrics = run(state, large)
    assert not bool(metrics.finite)
    state, metrics = run(state, good)
    assert (bool(metrics.finite), float(metrics.scale)) == (True, before)
    # float32 holds these inputs
    wide = step(loss, optax.sgd(0.1), scaling=DynamicLossScale())
    assert bool(jax.jit(wide)(wide.init(jnp.ones((3, 1))), large)[1].finite)


def test_infinities_of_a_mask_do_not_keep_the_loss_scale_from_falling():
    def loss(w, batch):
        scores = jnp.where(batch["mask"] == 0, w * batch["x"], -1e9)
        return 1e33 * jnp.sum(jax.nn.softmax(scores) * batch["x"])  # overflows under 2^16

    train = step(loss, optax.sgd(0.0), scaling=DynamicLossScale())
    state, run = train.init(jnp.float32(1)), jax.jit(train)
    mask = jnp.array([0, 0, -jnp.inf], jnp.float32)
    for _ in range(20):
        state, metrics = run(state, {"x": jnp.array([1.0, 2.0, 3.0]), "mask": mask})
    assert bool(metrics.finite)
    assert 1 < float(metrics.scale) < 2.0**17


def test_a_warning_names_data_that_is_not_finite():
    train = step(
        lambda w, x: jnp.sum(jnp.tanh(w * x)), optax.sgd(0.1),
        scaling=DynamicLossScale(), warn_after=2,
    )  # fmt: skip
    state, run, x = train.init(jnp.float32(1)), jax.jit(train), jnp.array([jnp.inf])
    with pytest.warns(UserWarning, match=r"loss scale is 65536\. The batch holds NaN or infinity"):
        jax.block_until_ready(run(run(state, x)[0], x))


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


@pytest.mark.parametrize(
    ("options", "message"),
    [({"policy": "c=f16"}, "scaling is DynamicLossScale"), ({"warn_after": 3}, "no warn_after")],
)
def test_the_check_is_needed_by_a_scale_that_changes_and_by_a_warning(options, message):
    with pytest.raises(ValueError, match=message):
        sw.training.step(lambda w, x: jnp.sum(w * x), optax.sgd(1.0), check_finite=False, **options)
