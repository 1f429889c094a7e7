"""Readings equal the effect of rounding; a monitor writes them every so many steps."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from scalewise.audit import Monitor, readings


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
    assert list((tmp_path / "tensorboard").iterdir())
    assert monitor.numbers(4, w) == {}
    assert monitor.numbers(6, {"w": w})["w/amax"] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="every is 0; expected 1 or more"):
        Monitor(every=0)
