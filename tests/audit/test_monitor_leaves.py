"""A monitor reads leaves of every kind: stored arrays, narrow and empty ones, and skips others."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import scalewise as sw
from arrays import normal
from cases import nightly
from scalewise import training
from scalewise.auditing import Monitor, exponents, readings

PARAMS = {"w": jnp.ones((64, 64))}
GRADIENTS = {"w": normal(0, (64, 64)) * 1e-4}
STORED = {"fp16": {"mu": "fp16"}, "blocks": {"mu": "mxfp8_e4m3", "nu": "bf16"}, **training.STATES}


@pytest.mark.parametrize("name", nightly(STORED, but=[*STORED][:3]))
def test_a_stored_state_is_read_by_its_values(name, users_promotion):
    optimizer = training.store_state(optax.adam(1e-3), STORED[name])
    _, state = optimizer.update(GRADIENTS, optimizer.init(PARAMS), PARAMS)
    tree, wide = {"opt": state}, {"opt": training.widen(state)}
    for groups in (1, 3, {"first": r"\.mu", "second": r"\.nu"}):
        got, want = (Monitor("fp16", every=1, groups=groups).numbers(0, x) for x in (tree, wide))
        assert got == want
    assert 0 < readings(tree)["opt/mu"].amax < 1e-4
    counts = [exponents(x)["opt/mu"].bins() for x in (tree, wide)]
    assert counts[0] == counts[1]


def test_a_scaled_array_is_read_by_its_values():
    x = sw.quantize(jnp.full((4, 64), 1e-6), "fp16")
    assert exponents({"w": x})["w"].bins() == {-20: 256}
    assert readings({"w": x})["w"].amax == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"])
def test_arrays_of_8_bits(dtype):
    tree = {"w": jnp.array([0.0, 0.5, -3.0, 3.0], dtype)}
    found = readings(tree, "fp16")["w"]
    assert (float(found.amax), float(found.nonfinite)) == (3, 0)
    assert exponents(tree)["w"].bins() == {-1: 1, 1: 2}


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_empty_arrays_count_as_no_numbers(shape):
    empty, x = jnp.zeros(shape), jnp.array([1e5, 0.0])
    both, alone = readings({"g": [empty, x]}), readings({"g": [x]})
    assert jax.tree.map(float, both) == jax.tree.map(float, alone)
    found = readings({"e": empty})["e"]
    assert not any(map(float, jax.tree.leaves(found)))
    assert exponents({"e": empty})["e"].bins() == {}


@pytest.mark.parametrize("kind", [int, np.int64, np.int32, jnp.int32])
def test_a_step_is_an_integer_of_any_kind(tmp_path, kind):
    with Monitor("fp16", every=2, out=tmp_path) as monitor:
        for step in range(4):
            monitor(kind(step), PARAMS)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 2]
    assert monitor.numbers(kind(2), PARAMS)["w/amax"] == 1


def test_leaves_that_are_no_arrays_are_left_out():
    tree = {"w": jnp.ones(3), "act": jax.nn.relu, "name": "relu", "rate": 0.5, "n": np.arange(3),
            "key": jax.random.key(0), "text": np.array(["a"]), "none": None}  # fmt: skip
    assert list(readings(tree)) == ["w"]
    monitor = Monitor("fp16", every=1)
    assert {name.split("/")[0] for name in monitor.numbers(0, tree)} == {"w"}
    monitor(0, tree)
    monitor.close()


def test_a_second_monitor_keeps_the_lines_of_earlier_steps(tmp_path):
    for steps in (range(4), range(2, 5)):
        with Monitor("fp16", every=1, out=tmp_path) as monitor:
            for step in steps:
                monitor(step, {"w": jnp.full(2, float(steps.start))})
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [(x["step"], x["w/amax"]) for x in lines] == [(0, 0), (1, 0), (2, 2), (3, 2), (4, 2)]
