"""Delayed scaling in a training step: its history against NumPy's maxima and a step by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import scalewise as sw
from scalewise.training import DynamicLossScale, step

STEPS = 3


pytestmark = pytest.mark.usefixtures("users_promotion")


def params():
    return {"w": jnp.linspace(-1, 1, 12).reshape(6, 2)}


def batch(seed, n=8):
    """Inputs of another magnitude in each row."""
    random = np.random.default_rng(seed)
    return {"x": random.normal(size=(n, 6)) * 2.0 ** np.arange(n)[:, None], "y": np.ones((n, 2))}


def loss(p, b):
    return jnp.mean(jnp.square(jnp.tanh(b["x"] @ p["w"]) - b["y"]))


def train(**options):
    return step(loss, optax.adam(1e-2), sw.recipes.fp8_delayed, **options)


def row(history, operand):
    """The history of an operand of the forward product, which is the program's first."""
    first = min(history.operand_ids, key=lambda s: int(s.split("/")[0].split(".")[0])).split("/")[0]
    return np.asarray(history.amaxes)[history.operand_ids.index(f"{first}/{operand}")]


def largest(b):
    return np.abs(b["x"]).max().astype(np.float32)


def trained(one, steps=STEPS):
    state, jitted = one.init(params(), batch(0)), jax.jit(one)
    for number in range(1, steps + 1):
        state, metrics = jitted(state, batch(number))
    return state, metrics


def test_it_equals_autoscale_of_the_gradient():
    def by_hand(p, b):
        return jax.value_and_grad(loss)(p, b)

    delayed, optimizer, p = sw.autoscale(by_hand, "fp8_delayed"), optax.adam(1e-2), params()
    history, moments = delayed.init(p, batch(0)), optimizer.init(p)
    for number in range(1, STEPS + 1):
        (value, g), history = jax.jit(delayed.step)(history, p, batch(number))
        updates, moments = optimizer.update(g, moments, p)
        p = optax.apply_updates(p, updates)
    state, metrics = trained(train())
    np.testing.assert_allclose(state.params["w"], p["w"], rtol=1e-6)
    np.testing.assert_allclose(metrics.loss, value, rtol=1e-6)
    np.testing.assert_allclose(row(state.history, 0), row(history, 0))


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_history_holds_the_batches_maxima(accumulate):
    """One history over the microbatches: a whole batch's maximum, however it is cut."""
    state, _ = trained(train(accumulate=accumulate))
    want = [largest(batch(n)) for n in range(STEPS, -1, -1)]
    np.testing.assert_array_equal(row(state.history, 0)[: STEPS + 1], want)
    np.testing.assert_array_equal(row(state.history, 0)[STEPS + 1 :], 0)
    assert row(state.history, 1)[STEPS] == 1  # the largest weight, before the first step


def test_microbatches_round_with_the_scales_of_the_steps_before():
    """Not with those of the microbatch before: the parts of one batch, each alone, add up to it."""
    whole, alone = train(accumulate=4), train()
    state = whole.init(params(), batch(0))
    _, metrics = jax.jit(whole)(state, batch(1))
    parts = [{k: v[i : i + 2] for k, v in batch(1).items()} for i in range(0, 8, 2)]
    one = jax.jit(alone)
    losses = [float(one(state, part)[1].loss) for part in parts]
    np.testing.assert_allclose(metrics.loss, np.mean(losses), rtol=1e-6)


@pytest.mark.parametrize("wrong", ["data", "gradient"])
def test_a_step_that_is_left_out_keeps_the_history(wrong):
    one = train(scaling=DynamicLossScale(initial=2.0**32 if wrong == "gradient" else 1.0))
    state, bad = one.init(params(), batch(0)), batch(1)
    bad["x"][0, 0], bad["y"][0, 0] = (np.nan, 1) if wrong == "data" else (1, 1e30)
    after, metrics = jax.jit(one)(state, bad)
    assert not bool(metrics.finite)
    np.testing.assert_array_equal(after.history.amaxes, state.history.amaxes)
    assert (int(after.step), int(metrics.skipped)) == (1, 1)


def test_devices_share_one_history():
    one = train(axis_name="data")
    state = one.init(params(), batch(0))
    halves = {k: v.reshape(2, 4, -1) for k, v in batch(1).items()}
    after, metrics = jax.jit(jax.vmap(one, in_axes=(None, 0), axis_name="data"))(state, halves)
    first, second = (jax.tree.map(lambda x, m=m: x[m], after) for m in (0, 1))
    np.testing.assert_array_equal(first.history.amaxes, second.history.amaxes)
    np.testing.assert_array_equal(first.params["w"], second.params["w"])
    assert row(first.history, 0)[0] == largest(batch(1))
    assert row(first.history, 0)[0] != largest({"x": halves["x"][0]})
    assert bool(metrics.finite.all())
