"""Tuned formats keep the tolerance, also under autocast, and are found in few runs."""

import jax.numpy as jnp
import pytest

import scalewise as sw


def model(w, x):
    h = jnp.tanh(x @ w)
    return jnp.exp(jnp.sum(h * h) / 4.0) * 1e-3


def arguments():
    return jnp.full((8, 4), 0.3), jnp.linspace(0.5, 2.0, 128).reshape(16, 8)


def test_only_the_operation_that_overflows_stays_float32():
    found = sw.tune(model, tol=2e-2, formats=["fp16"])(*arguments())
    lowered = {primitive for _, primitive in found.formats}
    assert "exp" not in lowered  # e^15 is beyond 65504
    assert {"dot_general", "tanh"} <= lowered
    assert float(found.error) <= 2e-2
    assert 0.5 <= found.cost < 0.6
    assert found.runs <= 12
    assert found.policy is None  # autocast would round exp's result where mul reads it


def test_policy_for_autocast():
    def layer(w, x):
        return jnp.sum(jnp.tanh(x @ w), axis=0)

    found = sw.tune(layer, tol=1e-2)(*arguments())
    assert found.cost < 0.6
    got, want = sw.autocast(layer, found.policy)(*arguments()), layer(*arguments())
    assert float(jnp.linalg.norm(got - want)) <= 1e-2 * float(jnp.linalg.norm(want))


def test_a_tight_tolerance_and_two_formats():
    found = sw.tune(model, tol=1e-7, formats=["bf16"])(*arguments())
    assert "dot_general" not in {p for _, p in found.formats}

    def f(x):
        return (x * 1.0) * 2.0 + jnp.sin(x)

    with pytest.warns(DeprecationWarning, match=r"use tune\(f, tol=tolerance\)\(\*args\)"):
        found = sw.tune(f, (jnp.ones(8),), 2e-2, ["e4m3fn", "bf16"])
    assert set(found.formats.values()) <= {"e4m3fn", "bf16"}
    assert found.policy is None or found.policy.compute == jnp.bfloat16


def test_a_tolerance_of_zero_is_rejected():
    with pytest.raises(ValueError, match="tol is 0; expected a positive number"):
        sw.tune(jnp.sin, tol=0)
