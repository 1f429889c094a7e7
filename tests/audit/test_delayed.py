"""Delayed scaling in an audit: each step's scales come from the steps before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import scalewise as sw
from arrays import normal
from cases import nightly

W = 0.3 * normal(0, (16, 8))
BATCHES = [normal(seed, (32, 16)) for seed in range(1, 5)]
BATCHES[2] = BATCHES[2].at[3].multiply(100.0)


def step(w, x):
    return w - 0.1 * x.T @ jnp.tanh(x @ w) / len(x)


def deep(w, x):
    """Layers in a loop, whose products have one history for all iterations."""
    return w + 0.01 * lax.scan(lambda h, _: (jnp.tanh(h @ w @ w.T), None), x, None, 3)[0].T @ x @ w


def trained(f, recipe=None):
    """Returns the weights after a step on each batch."""
    scaled, w = sw.autoscale(f, recipe) if recipe else None, W
    history = scaled.init(w, BATCHES[0]) if scaled else None
    for x in BATCHES:
        if scaled:
            w, history = jax.jit(scaled.step)(history, w, x)
        else:
            w = f(w, x)
    return np.asarray(w, np.float64)


@pytest.mark.parametrize("f", [step, *nightly([deep])])
def test_each_step_rounds_with_the_scales_of_autoscale(f):
    report = sw.audit(f, "fp8_delayed", steps=4, batches=BATCHES, trials=0)(W)
    low, want = trained(f, "fp8_delayed"), trained(f)
    error = np.linalg.norm(low - want) / np.linalg.norm(want)
    assert report.error.relative == pytest.approx(error, rel=1e-3)
    assert "magnitudes of the steps before" in report.semantics


def test_an_outlier_beyond_the_history_saturates_at_its_step():
    report = sw.audit(step, "fp8_delayed", steps=4, batches=BATCHES, trials=6)(W)
    worst = report.findings[0]
    assert (worst.kind, worst.primitive, worst.iteration) == ("saturation", "dot_general", 2)
    assert str(worst.fix) == "scaling=Amax() of products in the recipe"
    assert report.error_fixed.relative < 0.3 * report.error.relative


def test_the_first_step_has_no_history():
    report = sw.audit(step, "fp8_delayed", trials=0)(W, BATCHES[2])
    assert "delayed scaling at its first step" in report.semantics
    assert not any(e["operands_saturated"] for e in report.equations)
