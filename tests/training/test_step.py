"""``training.step`` against the same computation written by hand, for three kinds of model."""

import dataclasses
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import scalewise as sw
from arrays import normal
from cases import nightly, refused
from scalewise.training import (
    DynamicLossScale,
    StaticLossScale,
    loss_scale_of,
    step,
)

pytestmark = pytest.mark.usefixtures("users_promotion")


def params(seed=0):
    a, b = jax.random.split(jax.random.key(seed))
    return {"a": normal(a, (6, 16)) / 3, "b": normal(b, (16, 2)) / 4}


def batch(seed=1, n=8):
    a, b = jax.random.split(jax.random.key(seed))
    return {"x": normal(a, (n, 6)), "y": normal(b, (n, 2))}


def loss(p, batch):
    return jnp.mean(jnp.square(jnp.tanh(batch["x"] @ p["a"]) @ p["b"] - batch["y"]))


def close(a, b, rtol=2e-6, atol=1e-7):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(
            np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=rtol, atol=atol
        )


def run(train, model, steps=5):
    state, one = train.init(model), jax.jit(train)
    for i in range(steps):
        state, metrics = one(state, batch(i))
    return state, metrics


def test_without_a_policy_it_equals_optax():
    optimizer, p = optax.adamw(1e-2), params()
    state = optimizer.init(p)
    for i in range(5):
        value, g = jax.value_and_grad(loss)(p, batch(i))
        updates, state = optimizer.update(g, state, p)
        p = optax.apply_updates(p, updates)
    got, metrics = run(step(loss, optimizer), params())
    close(got.params, p)
    close(metrics.loss, value)
    assert int(got.step) == 5
    assert (float(metrics.scale), int(metrics.skipped), bool(metrics.finite)) == (1, 0, True)


def test_it_equals_mixed_precision_written_by_hand():
    """FP16 operands, a scale of 1024, clipping: the order is the whole point."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5, momentum=0.9))
    p = params()
    state = optimizer.init(p)

    def by_hand(p, b):
        low = jax.tree.map(lambda x: x.astype(jnp.float16), p)
        y = jnp.tanh(b["x"].astype(jnp.float16) @ low["a"]) @ low["b"]
        return 1024 * jnp.mean(jnp.square(y.astype(jnp.float32) - b["y"]))

    for i in range(5):
        g = jax.tree.map(lambda g: g / 1024, jax.grad(by_hand)(p, batch(i)))
        updates, state = optimizer.update(g, state, p)
        p = optax.apply_updates(p, updates)
    train = step(
        loss, optax.sgd(0.5, momentum=0.9), "c=f16", scaling=StaticLossScale(1024.0), clip=0.1
    )
    close(run(train, params())[0].params, p, rtol=1e-3, atol=1e-4)


def test_accumulation_equals_the_whole_batch():
    whole, parts = step(loss, optax.adam(1e-2)), step(loss, optax.adam(1e-2), accumulate=4)
    a, b = run(whole, params()), run(parts, params())
    close(a[0].params, b[0].params, rtol=1e-4, atol=1e-5)
    close(a[1].loss, b[1].loss, rtol=1e-5)


@pytest.mark.parametrize("policy", ["fp8", *nightly([None, "c=bf16"])])
@pytest.mark.parametrize("dtype", ["float64", *nightly(["float32"])])
def test_accumulation_in_a_float64_program(policy, dtype):
    """Weights or batch alone may be float64, and so may the loss."""
    with jax.enable_x64(True):
        p = jax.tree.map(lambda x: x.astype(dtype), params())
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), batch())
        whole, parts = (step(loss, optax.sgd(0.1), policy, accumulate=n) for n in (1, 2))
        (a, one), (b, two) = (jax.jit(t)(t.init(p), wide) for t in (whole, parts))
        assert one.loss.dtype == two.loss.dtype
        close(one.loss, two.loss, rtol=0.02)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert x.dtype == y.dtype
        close(a.params, b.params, rtol=0.05, atol=2e-3)


def test_one_bad_microbatch_leaves_the_whole_step_out():
    train = step(loss, optax.adam(1e-2), "c=f16", accumulate=4)
    state = train.init(params())
    bad = batch()
    bad["y"] = bad["y"].at[3, 1].set(jnp.inf)
    after, metrics = jax.jit(train)(state, bad)
    assert not bool(metrics.finite)
    close(after.params, state.params, rtol=0, atol=0)
    inner = (after.optimizer.inner, state.optimizer.inner)
    close(*inner, rtol=0, atol=0)
    assert (int(after.step), int(metrics.skipped)) == (1, 1)


def test_a_non_finite_loss_keeps_the_scale():
    """A NaN in the data is no overflow: halving would only cost the next steps their gradients."""
    train = step(loss, optax.sgd(0.1), "c=f16", scaling=DynamicLossScale(initial=2.0**10))
    state = train.init(params())
    wrong = batch() | {"x": batch()["x"].at[0, 0].set(jnp.nan)}
    after, metrics = jax.jit(train)(state, wrong)
    assert np.isnan(float(metrics.loss))
    assert float(loss_scale_of(after.optimizer).scale) == 2.0**10
    assert int(loss_scale_of(after.optimizer).skipped) == 1

    # but a gradient that overflows because of the scale brings it down
    train = step(loss, optax.sgd(0.1), "c=f16", scaling=DynamicLossScale(initial=2.0**30))
    state = train.init(params())
    after, metrics = jax.jit(train)(state, batch())
    assert np.isfinite(float(metrics.loss))
    assert not bool(metrics.finite)
    assert float(loss_scale_of(after.optimizer).scale) == 2.0**29


@pytest.mark.parametrize("weights", [None, "stochastic", *nightly(["compensated", "plain"])])
@pytest.mark.parametrize("dtype", ["bf16", *nightly(["f16"])])
def test_narrow_weights(weights, dtype):
    train = step(loss, optax.adamw(1e-2), f"p={dtype},c={dtype},o=f32", weights=weights)
    state, metrics = run(train, params(), 30)
    want, _ = run(step(loss, optax.adamw(1e-2)), params(), 30)
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} <= {"float16", "bfloat16"}
    eps = float(jnp.finfo(state.params["a"].dtype).eps)
    close(state.params, want.params, rtol=0, atol=0.05 + 4 * eps)
    assert bool(metrics.finite)
    if weights is None:
        assert state.optimizer.inner.master["a"].dtype == jnp.float32
        close(state.optimizer.inner.master["a"].astype(state.params["a"].dtype), state.params["a"])


def test_a_loss_of_narrow_weights_is_scaled_in_float32():
    """In an FP16 program the cotangent of a scale of 2^17 would be infinite."""
    train = step(
        lambda p, b: p["w"].sum() * 2.0**-12, optax.sgd(1.0), "p=f16,c=f16",
        scaling=StaticLossScale(2.0**17),
    )  # fmt: skip
    _, metrics = train(train.init({"w": jnp.ones(3)}), None)
    assert metrics.loss.dtype == jnp.float32
    assert bool(metrics.finite)


def test_narrow_moments_and_five_bytes_per_parameter():
    from scalewise.training import NARROW_ADAM

    train = step(loss, optax.adamw(1e-2), "p=f16,c=f16", weights="stochastic", moments=NARROW_ADAM)
    state, _ = run(train, params(), 3)
    n = sum(x.size for x in jax.tree.leaves(state.params))
    moments = jax.tree.leaves(
        (state.optimizer.inner.inner[0].mu, state.optimizer.inner.inner[0].nu)
    )
    assert sum(x.nbytes for x in jax.tree.leaves(state.params)) == 2 * n
    assert sum(x.nbytes for x in moments if x.size > 1) == 3 * n  # others are scales


def test_a_recipe_works_as_a_policy():
    state, metrics = run(step(loss, optax.adamw(1e-2), sw.recipes.fp8), params())
    want, reference = run(step(loss, optax.adamw(1e-2)), params())
    close(metrics.loss, reference.loss, rtol=0.1)
    assert not np.array_equal(np.asarray(state.params["a"]), np.asarray(want.params["a"]))


@pytest.mark.parametrize("name", ["fp8", "fp16", "bf16"])
def test_the_name_of_a_recipe_is_the_recipe(name):
    def traced(policy):
        train = step(loss, optax.sgd(1.0), policy)
        return str(jax.make_jaxpr(train)(train.init(params()), batch()))

    assert traced(name) == traced(sw.recipes.CATALOGUE[name])


def test_aux_is_in_the_metrics():
    def with_aux(p, b):
        return loss(p, b), {"n": b["x"].shape[0], "mean": b["x"].mean()}

    _, metrics = run(step(with_aux, optax.sgd(0.1), "c=bf16", has_aux=True), params(), 1)
    assert int(metrics.aux["n"]) == 8
    _, metrics = run(step(with_aux, optax.sgd(0.1), has_aux=True, accumulate=2), params(), 1)
    assert metrics.aux["mean"].shape == (2,)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(6, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(jax.nn.relu(self.norm(self.first(x)))))


def of_model(model, b):
    return jnp.mean(jnp.square(model(b["x"]) - b["y"]))


@pytest.mark.parametrize("accumulate", [2, *nightly([1])])
@pytest.mark.parametrize("policy", ["c=f16", *nightly([None])])
def test_flax_nnx(policy, accumulate):
    """Weights learn, statistics and dropout's counter move; a bad step moves none of them."""
    train = step(of_model, optax.adam(3e-2), policy, accumulate=accumulate)
    state, one = train.init(Net(nnx.Rngs(0))), jax.jit(train)
    losses = []
    for _ in range(40):
        state, metrics = one(state, batch())
        losses.append(float(metrics.loss))
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    model = state.model()
    assert isinstance(model, Net)
    assert not np.array_equal(np.asarray(model.norm.mean[...]), np.zeros(16))
    bad = batch() | {"x": jnp.full((8, 6), jnp.nan)}
    after, metrics = one(state, bad)
    assert not bool(metrics.finite)
    for a, b in zip(jax.tree.leaves(after.rest), jax.tree.leaves(state.rest), strict=True):
        raw = jax.random.key_data if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else np.asarray
        np.testing.assert_array_equal(raw(a), raw(b))


class Dense(eqx.Module):
    mlp: eqx.nn.MLP
    calls: jax.Array
    name: str = "dense"


@pytest.mark.parametrize("policy", ["p=bf16,c=bf16", *nightly([None])])
def test_equinox(policy):
    """Functions, names and integer arrays in the module stay what they are."""
    model = Dense(eqx.nn.MLP(6, 2, 16, 1, key=jax.random.key(0)), jnp.int32(3))

    def of_module(m, b):
        return jnp.mean(jnp.square(jax.vmap(m.mlp)(b["x"]) - b["y"]))

    train = step(of_module, optax.adam(3e-2), policy)
    state, one = train.init(model), jax.jit(train)
    first = None
    for _ in range(40):
        state, metrics = one(state, batch())
        first = first if first is not None else float(metrics.loss)
    assert float(metrics.loss) < 0.7 * first
    out = state.model()
    assert isinstance(out, Dense)
    assert (int(out.calls), out.name) == (3, "dense")
    assert out.mlp.activation is model.mlp.activation


test_invalid_arguments_are_errors = refused(
    (lambda: step(loss, optax.sgd(1.0)).init(params() | {"n": jnp.arange(3)}), TypeError,
     r"params\['n'\] is int32\[3\]; expected real float arrays, which are trained"),
    (lambda: step(loss, optax.sgd(1.0)).init({"n": 3}), TypeError, r"\['n'\] is a int"),
    (lambda: step(loss, optax.sgd(1.0)).init({}), TypeError, "nothing to train"),
    (
        lambda: step(loss, optax.sgd(1.0), weights="none"),  # pyright: ignore
        ValueError,
        "weights is 'none'; expected one of 'plain', 'master'",
    ),
    (lambda: step(loss, optax.sgd(1.0), accumulate=0), ValueError, "accumulate is 0"),
    (lambda: step(loss, optax.sgd(1.0), sw.recipes.fp8_delayed).init(params()), TypeError,
     r"delayed scaling begins with a batch: init\(model, batch\)"),
    (
        lambda: step(
            loss,
            optax.sgd(1.0),
            dataclasses.replace(
                sw.recipes.fp8, state=((r"\.mu", sw.Storage(sw.formats.FP16)),)
            ),
        ),
        ValueError,
        r"the recipe has state patterns \('\\\\.mu'\); .* moments=",
    ),
    (lambda: step(loss, optax.sgd(1.0), "c=f4"), ValueError, "'f4' is no dtype to compute in"),
    (lambda: run(step(loss, optax.sgd(1.0), accumulate=3), params()), ValueError,
     r"accumulate=3 splits each array .* into 3 equal parts; one has shape \(8,"),
    (lambda: step(loss, optax.sgd(1.0))(params(), 1.0), TypeError, "expected the TrainState"),
    *(
        (
            lambda out=out, aux=aux: run(
                step(lambda *_: out, optax.sgd(1.0), has_aux=aux), params()
            ),
            TypeError,
            f"step: loss returned .*expected {'a pair of ' if aux else ''}a real scalar",
        )
        for out, aux in [
            *((x, False) for x in (None, 1, 1j, "a", (1.0, 2), jnp.ones(3), [], {})),
            *((x, True) for x in (1.0, (1.0, 2, 3), (1, 2))),
        ]
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        params,
        lambda: Net(nnx.Rngs(0)),
        lambda: Dense(eqx.nn.MLP(6, 2, 16, 1, key=jax.random.key(0)), jnp.int32(3)),
    ],
    ids=["pytree", "nnx", "equinox"],
)
def test_two_states_of_one_model_have_one_structure(make):
    """A program compiled for one serves the other, and a checkpoint of one fits the other."""
    train = step(loss, optax.adam(1e-2))
    a, b = train.init(make()), train.init(make())
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert hash(a.structure) == hash(b.structure)


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"w": jnp.ones((2, 2))},
        lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
        lambda: eqx.nn.Linear(2, 2, key=jax.random.key(0)),
    ],
    ids=["bare", "flax", "equinox"],
)
def test_a_state_can_be_pickled(make):
    state = step(lambda model, batch: 0.0, optax.adam(1e-3), "p=bf16,c=bf16").init(make())
    back = pickle.loads(pickle.dumps(state))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, back, state)
    assert jax.tree.structure(back.model()) == jax.tree.structure(state.model())


def test_a_batch_of_several_arguments():
    def loss(params, inputs, labels):
        return jnp.mean(jnp.square(inputs["x"] @ params - labels))

    x, y = jnp.arange(8.0).reshape(4, 2), jnp.arange(4.0)
    alone = step(lambda w, batch: loss(w, *batch), optax.sgd(0.1))
    several = step(loss, optax.sgd(0.1), sw.recipes.fp8_delayed, accumulate=2)
    state, metrics = several(several.init(jnp.ones(2), {"x": x}, y), {"x": x}, y)
    want, _ = alone(alone.init(jnp.ones(2)), ({"x": x}, y))
    assert metrics.loss > 0
    np.testing.assert_allclose(state.params, want.params, rtol=0.1)
