"""Readings equal the effect of rounding; a monitor writes them every so many steps."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import scalewise as sw
from scalewise.auditing import Monitor, readings


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3fn", "e5m2"])
def test_readings_equal_the_effect_of_rounding(name):
    fmt = sw.format(name)
    random = np.random.default_rng(0)
    x = random.normal(size=(7, 11, 13)) * 2.0 ** random.integers(-40, 20, (7, 11, 13))
    x = x.astype(np.float32)
    tie = float(fmt.smallest) / 2 if name != "bf16" else 0.0  # XLA flushes float32's subnormals
    x[0, 0, :4] = [np.inf, np.nan, 0.0, tie]
    (found,) = jax.jit(lambda t: readings(t, fmt))({"x": jnp.asarray(x)}).values()
    rounded = np.asarray(sw.round_to(jnp.asarray(x), fmt))
    finite = np.isfinite(x)
    assert found.amax == np.abs(x[finite]).max()
    assert found.nonfinite == 2
    flushed = ((rounded == 0) & (x != 0)).sum() / (x != 0).sum()
    np.testing.assert_allclose(found.flushed, flushed, rtol=1e-6)
    beyond = (~(np.abs(x) < float(fmt.max))).sum() / x.size
    np.testing.assert_allclose(found.saturated, beyond, rtol=1e-6)


def test_groups_by_depth_and_by_name():
    tree = {"params": [{"w": jnp.ones(2)}, {"w": 2 * jnp.ones((2, 2))}], "step": jnp.int32(3),
            "mu": jnp.float32(4.0)}  # fmt: skip
    assert {k: float(r.amax) for k, r in readings(tree).items()} == {"params": 2, "mu": 4}
    assert list(readings(tree, groups=2)) == ["mu", "params/0", "params/1"]
    named = readings(tree, groups={"first": r"\[0\]", "rest": "params"})
    assert {k: float(r.amax) for k, r in named.items()} == {"first": 1, "rest": 2}
    with pytest.raises(ValueError, match=r"the group 'gone' \('nu'\) holds no float array"):
        readings(tree, groups={"gone": "nu"})
    with pytest.raises(ValueError, match="the tree holds no float array"):
        readings({"n": jnp.arange(3)})


def test_a_monitor_in_a_training_loop(tmp_path):
    @jax.jit
    def step(w):
        gradient = jax.grad(lambda w: jnp.sum(w**2) * 1e-9)(w)
        return w - 0.1 * gradient, gradient

    w = jnp.ones((4, 4))
    with Monitor("fp16", every=3, out=tmp_path) as monitor:
        for n in range(1, 8):
            w, gradient = step(w)
            monitor(n, {"weights": w, "gradients": gradient})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 6]
    assert rows[0]["gradients/flushed"] == 1.0  # 2e-9
    assert rows[0]["weights/flushed"] == rows[0]["weights/nonfinite"] == 0.0
    assert monitor.numbers(4, w) == {}
    assert monitor.numbers(6, {"w": w})["w/amax"] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="every is 0; expected a positive integer"):
        Monitor(every=0)


def test_moments_are_kept_apart():
    params = {"dense": {"w": jnp.ones(2)}}
    state = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)).init(params)
    tree = {"params": params, "opt_state": state}
    assert list(readings(tree)) == ["opt_state/mu", "opt_state/nu", "params"]
    assert list(readings(state)) == ["1/mu", "1/nu"]
    assert list(readings({"m": {"v": jnp.ones(2)}})) == ["m"]  # a parameter of this name
    assert list(readings(tree, groups={"all": "."})) == ["all"]


def test_groups_close_to_overflowing(tmp_path):
    with Monitor("fp16", every=1, out=tmp_path) as monitor:
        for step, top in enumerate((2.0**13, 2.0**15, 2.0**12), 1):
            monitor(step, {"x": jnp.array([top, 1.0]), "y": jnp.ones(3)})
        assert monitor.latent == (
            "x: largest value 2^15.0, within a factor of 4 of FP16's maximum (step 2)",
        )
    alone = Monitor("fp16", every=1)
    alone(1, {"x": jnp.array([1e30])})
    assert alone.latent == ()  # it overflows


def test_exponents_are_those_of_frexp_for_every_dtype_and_group():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=999) * 2.0 ** rng.integers(-120, 120, 999)).astype(np.float32)
    x[:5] = [0, -0.0, np.inf, 1.0, 2.0**-126]
    tree = {"a": jnp.asarray(x), "b": {"w": jnp.float16([2.0**-24, 65504.0]), "n": jnp.arange(3)}}
    found = jax.jit(sw.auditing.exponents)(tree)
    powers = np.frexp(x[(x != 0) & np.isfinite(x)])[1] - 1
    assert found["a"].bins() == dict(zip(*np.unique(powers, return_counts=True), strict=True))
    assert int(found["a"].zeros) == 2
    assert found["b"].bins() == {-24: 1, 15: 1}
    assert found["b"].flushed("e4m3fn") == 0.5
    assert found["b"].flushed("e4m3fn", scale=2.0**20) == 0
    with pytest.raises(ValueError, match="exponents: the tree holds no float array"):
        sw.auditing.exponents({"n": jnp.arange(3)})
