"""Loss scaling against Flax's DynamicScale, exact arithmetic, and the published failures."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

from cases import nightly, refused
from scalewise.training import (
    DynamicLossScale,
    LossScaleState,
    StaticLossScale,
    all_finite,
    loss_scale_of,
    loss_scaled,
    scale_loss,
    unscale,
)


def bits(tree):
    return [np.asarray(raw(x)).tobytes() for x in jax.tree.leaves(tree)]


def raw(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32"]
)
@pytest.mark.parametrize("bad", [-np.inf, *nightly([np.nan, np.inf])])
def test_a_non_finite_number_anywhere_is_found(dtype, bad):
    good = {"a": jnp.full((3, 5), 448.0, dtype), "n": jnp.int32(2), "k": jax.random.key(0)}
    assert bool(all_finite(good))
    assert bool(jax.jit(all_finite)(good))
    wrong = good | {"a": good["a"].at[2, 4].set(jnp.asarray(bad, dtype))}
    assert not bool(all_finite(wrong))
    assert not bool(jax.jit(all_finite)(wrong))


def test_a_tree_without_floats_is_finite():
    assert bool(all_finite({}))
    assert bool(all_finite({"n": jnp.arange(3), "empty": jnp.zeros((0, 4))}))
    assert bool(all_finite(jnp.full(4, jnp.finfo(jnp.float32).max)))  # no sum that overflows


def test_all_devices_of_a_mapped_axis_agree():
    xs = jnp.array([[1.0, 2.0], [3.0, jnp.inf]])
    got = jax.vmap(lambda x: all_finite(x, axis_name="data"), axis_name="data")(xs)
    assert got.tolist() == [False, False]


def pattern(n):
    return np.random.default_rng(0).random(n) > 0.2


def test_the_scale_follows_flax(users_promotion):
    """Flax counts from a step later on: its interval is one more than the steps it waits."""
    ours = DynamicLossScale(initial=2.0**6, interval=4, min_scale=2.0**-3)
    theirs = DynamicScale(scale=2.0**6, growth_interval=3, minimum_scale=2.0**-3)
    state = ours.init()
    update = jax.jit(ours.update)
    for good in pattern(200):
        x = jnp.float32(1 if good else jnp.inf)
        theirs, is_finite, _, _ = theirs.value_and_grad(lambda w, x=x: w * x)(jnp.float32(1))
        assert bool(is_finite) == good
        state = update(state, jnp.asarray(good))
        assert float(state.scale) == float(theirs.scale)
    assert int(state.skipped) == int((~pattern(200)).sum())


def test_the_scale_follows_its_definition():
    scaling = DynamicLossScale(initial=4.0, growth=2.0, backoff=0.25, interval=2, max_scale=8.0)
    state, seen = scaling.init(), []
    for good in [1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0]:
        state = scaling.update(state, jnp.asarray(bool(good)))
        seen.append((float(state.scale), int(state.good_steps), int(state.skipped)))
    assert seen == [
        (4, 1, 0), (8, 0, 0), (8, 1, 0), (8, 0, 0),  # grows after two, up to the bound
        (2, 0, 1), (0.5, 0, 2), (0.125, 0, 3),  # and may fall below 1
        (0.125, 1, 3), (0.25, 0, 3), (0.25, 1, 3), (0.0625, 0, 4),
    ]  # fmt: skip


def test_a_static_scale_stays():
    state = StaticLossScale(8.0).init()
    for good in (True, False, True):
        state = StaticLossScale(8.0).update(state, jnp.asarray(good))
    assert (float(state.scale), int(state.good_steps), int(state.skipped)) == (8, 1, 1)


def test_unscaling_is_in_float32_and_exact():
    state = DynamicLossScale(initial=2.0**20).init()
    g = jnp.asarray([2.0**-24, 1.5, 65504, -0.0], jnp.float16)
    got = unscale({"g": g, "n": jnp.int32(3)}, state)
    assert got["g"].dtype == jnp.float32
    assert got["n"] == 3
    np.testing.assert_array_equal(np.asarray(got["g"]), np.asarray(g, np.float64) / 2.0**20)


def test_scaling_keeps_gradients_that_fp16_flushes():
    """arXiv 1710.03740, figure 3: [2^-27, 2^-24) has to be kept, and a scale of 8 keeps it."""
    tiny = jnp.asarray([2.0**-27, 2.0**-26, 2.0**-25.5], jnp.float32)

    def loss(w):  # the weight's gradient passes through FP16, as a narrow backward pass makes it
        return jnp.sum(w.astype(jnp.float16).astype(jnp.float32) * tiny)

    w = jnp.ones(3)
    assert np.all(np.asarray(jax.grad(loss)(w))[:2] == 0)
    state = StaticLossScale(8.0).init()
    scaled = unscale(jax.grad(lambda w: scale_loss(loss(w), state))(w), state)
    np.testing.assert_allclose(np.asarray(scaled), np.asarray(tiny), rtol=1 / 3)
    assert scaled[0] == 2.0**-27


OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "noise": optax.noisy_sgd(0.1, key=jax.random.key(0)),
}


@pytest.mark.parametrize("name", nightly(OPTIMIZERS, but=["clipped", "noise"]))
class TestWrapper:
    def test_a_power_of_two_changes_no_bit(self, name, users_promotion):
        params = {"w": jax.random.normal(jax.random.key(0), (5, 3)), "b": jnp.ones(3)}
        plain, wrapped = OPTIMIZERS[name], loss_scaled(OPTIMIZERS[name], StaticLossScale(2.0**10))
        a, b = plain.init(params), wrapped.init(params)
        for step in range(3):
            g = jax.tree.map(lambda x, s=step: jnp.sin(x + s), params)
            scaled = jax.tree.map(lambda x: x * 2.0**10, g)
            ua, a = plain.update(g, a, params)  # eagerly: two programs fuse differently
            ub, b = wrapped.update(scaled, b, params)
            assert bits(ua) == bits(ub)
            assert bits(a) == bits(b.inner)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_a_bad_step_leaves_everything_as_it_was(self, name, bad, users_promotion):
        params = {"w": jnp.ones((5, 3)), "b": jnp.ones(3)}
        optimizer = loss_scaled(OPTIMIZERS[name])
        state = optimizer.init(params)
        _, state = optimizer.update(params, state, params)
        g = params | {"b": params["b"].at[1].set(bad)}
        updates, after = jax.jit(optimizer.update)(g, state, params)
        assert all(np.all(np.asarray(u) == 0) for u in jax.tree.leaves(updates))
        assert bits(after.inner) == bits(state.inner)
        assert float(loss_scale_of(after).scale) == 2.0**15
        assert int(loss_scale_of(after).skipped) == 1


def test_optax_clips_the_unscaled_gradient(users_promotion):
    """Clipped before unscaling, the update would be 1024 times too small."""
    optimizer = loss_scaled(
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), StaticLossScale(1024.0)
    )
    w = jnp.array([3.0, 4.0])
    updates, _ = optimizer.update(w * 1024, optimizer.init(w), w)
    np.testing.assert_allclose(np.asarray(updates), [-0.6, -0.8], rtol=1e-6)


@pytest.mark.parametrize("clip", [0.5, 1e4])
def test_clip_equals_its_definition(clip, users_promotion):
    optimizer = loss_scaled(optax.sgd(1.0), StaticLossScale(2.0**10), clip=clip)
    g = {"a": jnp.linspace(-3, 3, 64, dtype=jnp.float16), "b": jnp.full((3, 5), 1e3)}
    updates, _ = optimizer.update(g, optimizer.init(g))
    wide = {k: np.asarray(v, np.float64) / 2.0**10 for k, v in g.items()}
    norm = np.sqrt(sum(np.sum(v**2) for v in wide.values()))
    for name, v in wide.items():
        np.testing.assert_allclose(updates[name], -v * min(1, clip / norm), rtol=1e-6)


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan, 1e30])
def test_a_norm_that_is_not_finite_leaves_the_step_out(wrong, users_promotion):
    optimizer = loss_scaled(optax.sgd(1.0, momentum=0.9), DynamicLossScale(initial=8.0), clip=1.0)
    g = jnp.ones(5).at[3].set(wrong)
    before = optimizer.init(g)
    updates, after = optimizer.update(g, before)
    assert not updates.any()
    assert (float(after.loss_scale.scale), int(after.loss_scale.skipped)) == (4.0, 1)
    np.testing.assert_array_equal(after.inner[0].trace, before.inner[0].trace)


def bytes_moved(optimizer):
    """By a step on one array, a number: as XLA counts what its fusions read and write."""
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)

    def step(w, state, g):
        updates, state = optimizer.update(g, state, w)
        return optax.apply_updates(w, updates), state

    compiled = jax.jit(step).lower(x, jax.eval_shape(optimizer.init, x), x).compile()
    return compiled.cost_analysis()["bytes accessed"] / 1024**2


def test_it_adds_one_read_of_the_gradient(users_promotion):
    """Unscaling, the choice and clipping are fused into what the optimizer reads and writes."""
    adam = optax.adamw(1e-3)
    bare = bytes_moved(adam)
    assert bytes_moved(loss_scaled(adam)) <= bare + 4.01
    assert bytes_moved(loss_scaled(adam, clip=1.0)) <= bare + 4.01
    assert bytes_moved(optax.chain(optax.clip_by_global_norm(1.0), adam)) > bare + 4.01


def test_the_scale_settles_in_a_program_that_needs_one(users_promotion):
    """Gradients of 2^20 in FP16: only scales of 2^-5 and less keep them finite."""
    optimizer = loss_scaled(optax.sgd(1e-9), DynamicLossScale(initial=2.0**4, interval=5))
    w = jnp.float32(1)
    state = optimizer.init(w)

    def step(w, state):
        def loss(w):
            y = w.astype(jnp.float16).astype(jnp.float32) * 2.0**20
            return scale_loss(y, loss_scale_of(state))

        updates, state = optimizer.update(jax.grad(loss)(w), state, w)
        return optax.apply_updates(w, updates), state

    step = jax.jit(step)
    for _ in range(18):
        w, state = step(w, state)
    assert int(loss_scale_of(state).skipped) == 10  # 2^4 to 2^-5: nine; it grows once too far
    assert float(loss_scale_of(state).scale) == 2.0**-5
    assert np.isfinite(float(w))


def test_the_state_is_found_under_wrappers():
    optimizer = optax.chain(optax.identity(), loss_scaled(optax.sgd(1.0), StaticLossScale(2.0)))
    assert float(loss_scale_of({"a": optimizer.init(jnp.ones(2)), "b": 1}).scale) == 2
    with pytest.raises(ValueError, match="loss_scale_of: 0 loss scales in this tree; expected"):
        loss_scale_of({"a": 1})
    assert isinstance(loss_scale_of(optimizer.init(jnp.ones(2))), LossScaleState)


test_invalid_arguments_are_errors = refused(
    (lambda: DynamicLossScale(max_scale=2.0), ValueError, "initial 65536.0 isn't between"),
    # pyright: ignore
)  # fmt: skip
