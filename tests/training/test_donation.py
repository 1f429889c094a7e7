"""The first state can be donated to the step: no two of its arrays share a buffer."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from arrays import normal
from cases import nightly
from scalewise import training

pytestmark = pytest.mark.usefixtures("users_promotion")


def plain():
    tied = normal(2, (4, 4))
    return {"w": normal(0, (4, 64)), "v": normal(1, (64, 4)), "tied": [tied, tied]}


class Module(eqx.Module):
    first: eqx.nn.Linear
    calls: jax.Array


def of_module(model, x):
    return jnp.mean(jax.vmap(model.first)(x))


def of_net(model, x):
    return jnp.mean(jnp.tanh(model(x)))


def of_params(p, x):
    return jnp.mean(jnp.tanh(x @ p["tied"][0] @ p["w"]) @ p["v"] @ p["tied"][1])


MODELS = {
    "plain": (plain, of_params),
    "nnx": (lambda: nnx.BatchNorm(4, rngs=nnx.Rngs(0)), of_net),
    "equinox": (
        lambda: Module(eqx.nn.Linear(4, 4, key=jax.random.key(0)), jnp.int32(3)),
        of_module,
    ),
}


def copies(tree):
    return [np.array(x) for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


OPTIONS = {
    "none": {"policy": None},
    "fp8": {"policy": "fp8"},
    "delayed": {"policy": "fp8_delayed", "accumulate": 2},
    "scaled": {"policy": "p=f32,c=f16,o=f32", "clip": 1.0},
    "own dtype": {"policy": "c=bf16", "weights": "stochastic"},
    "master": {"policy": "p=f32,c=f16", "weights": "master"},
    "narrow": {"policy": "p=bf16,c=bf16"},
    "compensated": {"policy": "p=f32,c=f16", "weights": "compensated"},
    "moments": {"policy": "p=f16,c=f16", "moments": {"mu": "bf16", "nu": "fp16"}},
}


@pytest.mark.parametrize(
    ("model", "options"),
    nightly(
        itertools.product(MODELS, OPTIONS),
        but=[("plain", "delayed"), ("plain", "master"), ("nnx", "scaled"), ("equinox", "moments")],
    ),
)
def test_the_first_state_of_a_step_can_be_donated(model, options):
    make, loss = MODELS[model]
    given = make()
    before = copies(given)
    train = training.step(loss, optax.adam(1e-2), **OPTIONS[options])
    x = normal(3, (2, 4))
    state = train.init(given, x)
    donating = jax.jit(train, donate_argnums=0)
    state, _ = donating(state, x)
    _, metrics = donating(state, x)
    assert np.isfinite(float(metrics.loss))
    for a, b in zip(copies(given), before, strict=True):  # not deleted, nor written to
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("scaling", [training.StaticLossScale(), training.DynamicLossScale()])
def test_the_state_of_a_loss_scale_can_be_donated(scaling):
    state = scaling.init()
    assert jax.jit(scaling.update, donate_argnums=0)(state, jnp.bool_(True)).good_steps == 1


WRAPPERS = {
    "loss_scaled": training.loss_scaled,
    "master": training.master_weights,
    "stochastic": training.stochastic_rounding,
    "compensated": training.compensated,
    "store_state": lambda optimizer: training.store_state(optimizer, {"mu": "fp16"}),
}


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=list(WRAPPERS))
def test_an_optimizers_first_state_can_be_donated_with_the_parameters(wrapper):
    optimizer, params = wrapper(optax.adam(1e-2)), {"w": jnp.ones(8), "v": jnp.ones(3)}

    def update(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return training.apply_updates(params, updates), state

    gradients = jax.tree.map(jnp.ones_like, params)
    state = optimizer.init(params)
    params, _ = jax.jit(update, donate_argnums=(0, 1))(params, state, gradients)
    assert params["w"].max() < 1
