"""Plans as settings of other tools, and the matrix of trainers and rollouts."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import scalewise as sw
from arrays import normal
from scalewise.autoscaling import Operand
from scalewise.planning import _result as _exports

LAYERS = [
    ("blocks.0.up", Operand("nvfp4"), None),
    ("blocks.0.down", Operand("nvfp4"), Operand("nvfp4")),
    ("blocks.1.up", Operand("mxfp8_e4m3"), Operand("mxfp8_e4m3")),
    ("head", Operand("bf16"), None),
]


@pytest.mark.parametrize(("path", "name"), [
    ("[0]['blocks'][1]['qkv']", "blocks.1.qkv"), ("[0]['h.0.attn.weight']", "h.0.attn"),
    ("[0].layers[2].weight", "layers.2"), ("['params']['dense']['kernel']", "params.dense"),
])  # fmt: skip
def test_an_argument_is_named_as_its_module(path, name):
    assert _exports.module_name(path) == name


def test_compressed_tensors_has_a_group_for_each_pair_of_formats():
    config = _exports.compressed_tensors(LAYERS, lambda name: f"model.{name}")
    groups = list(config["config_groups"].values())
    assert [g["targets"] for g in groups] == [
        ["re:^model\\.blocks\\.0\\.up$"], ["re:^model\\.blocks\\.0\\.down$"],
        ["re:^model\\.blocks\\.1\\.up$"],
    ]  # fmt: skip
    assert [g["weights"]["num_bits"] for g in groups] == [4, 4, 8]
    assert groups[0]["input_activations"] is None
    assert groups[1]["input_activations"]["dynamic"] == "local"
    assert groups[2]["input_activations"]["group_size"] == 32
    assert (config["ignore"], config["format"]) == (["model.head"], "mixed-precision")


def policy(w, x):
    return jnp.tanh(x @ w) @ w.T


@pytest.mark.slow
def test_equal_formats_are_on_policy_and_narrower_rollouts_are_farther():
    w, x = normal(0, (32, 48)) / 2, normal(1, (64, 32))
    plan = sw.plan(policy, 8.25, objective="kl")(w, x)
    found = sw.rollouts(policy, [None, "bf16"], {"bf16": "bf16", "fp8": "fp8", "plan": plan})(w, x)
    assert found["bf16", "bf16"].kl == found["bf16", "bf16"].largest == 0
    assert found["bf16", "bf16"].ratio == 1
    assert 0 < found["as written", "bf16"].kl < found["as written", "fp8"].kl
    assert found["as written", "plan"].mean > 0
    assert not found["bf16", "bf16"].comparison.causes
    (cause,) = found["as written", "fp8"].comparison.causes
    assert cause.kind == "quantised"
    assert "test_exports.py" in cause.where[0]
    assert f"as written and fp8: {cause}" in str(found)
    assert "KL(rollout || trainer)" in str(found)
    assert "&lt;table&gt;" in found._repr_html_()
    with pytest.raises(KeyError, match="no pair"):
        found["fp8", "fp8"]


def test_a_divergence_is_exact_for_small_differences():
    """Against float64; the difference of two logarithms in float32 would be noise."""
    z, d = normal(0, (16, 64)), 1e-4 * normal(1, (16, 64))
    from scalewise.auditing import kl

    with jax.enable_x64(True):
        a, b = (jnp.asarray(v, jnp.float64) for v in (z, z + d))
        p, q = jax.nn.log_softmax(a), jax.nn.log_softmax(b)
        expected = float(jnp.sum(jnp.exp(p) * (p - q), -1).mean())
    assert float(kl(z, z + d).mean()) == pytest.approx(expected, rel=1e-3)


def test_what_returns_no_logits_is_refused():
    with pytest.raises(ValueError, match=r"one array, rows of logits .* returns \(4,\), \(4,\)"):
        sw.rollouts(lambda x: (x, x))(jnp.ones(4))
    with pytest.raises(ValueError, match=r"returns \(\)"):
        sw.rollouts(jnp.sum)(jnp.ones(4))
    with pytest.raises(TypeError, match="trainers is 'fp8'; expected a sequence"):
        sw.rollouts(policy, "fp8")
    with pytest.raises(ValueError, match="a sequence of at least one"):
        sw.rollouts(policy, [])


@pytest.mark.slow
def test_two_plans_of_one_name_are_refused():
    w, x = normal(0, (32, 48)) / 2, normal(1, (64, 32))
    plan = sw.plan(policy, 8.25, objective="kl")(w, x)
    other = dataclasses.replace(plan, recipe=sw.Recipe())
    with pytest.raises(ValueError, match="several formats are called 'plan of 8"):
        sw.rollouts(policy, [plan, other])
