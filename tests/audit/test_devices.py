"""Audits of programs whose products a device's matrix units add up."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from scalewise import recipes
from scalewise.devices import MatrixUnits


def uniform(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).random(shape), jnp.float32)


def pooled(x, w):
    return (x @ w) / 4096.0


def weight_gradient(w, x, g):
    def loss(w):
        return jnp.sum((x @ w) * g) / 8192.0

    return jax.grad(loss)(w)


def pooled_arguments(terms=1024):
    return uniform(4, terms), uniform(terms, 4, seed=1)


CASES = {
    "long K": (pooled, recipes.fp8, "h100", pooled_arguments()),
    "gradient sum": (
        weight_gradient,
        recipes.fp8,
        "h100",
        (uniform(8, 4) - 0.5, uniform(1024, 8, seed=1), uniform(1024, 4, seed=2)),
    ),
    "split K": (pooled, recipes.fp8, MatrixUnits("h100", splits=4), pooled_arguments(4096)),
    "FP16 accumulator": (
        pooled,
        dataclasses.replace(recipes.fp16, scaling=sw.Unit()),
        MatrixUnits("h100", result="fp16"),
        pooled_arguments(),
    ),
}


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", CASES)
def test_a_failing_accumulator_is_found_with_a_fix(name):
    f, recipe, device, args = CASES[name]
    report = sw.audit(f, recipe, device=device)(*args)
    worst = report.findings[0]
    assert worst.kind == "accumulation"
    assert worst.source.lstrip().startswith("return ")
    assert worst.primitive == "dot_general"
    assert float(report.error_fixed) < 0.25 * float(report.error)
    on_device = dataclasses.replace(recipe, emulate=device)
    repaired = sw.autoscale(f, worst.fix.apply(on_device))(*args)
    plain = sw.autoscale(f, on_device)(*args)
    right = np.asarray(f(*args), np.float64)
    error, before = (np.linalg.norm(y - right) / np.linalg.norm(right) for y in (repaired, plain))
    assert before == pytest.approx(float(report.error), rel=0.01)
    assert error == pytest.approx(float(report.error_fixed), rel=0.01)


def test_products_that_lose_by_their_operands_are_no_accumulation():
    x, w = pooled_arguments()
    assert not sw.audit(pooled, "fp8", device="b200")(x, w).findings
    few = sw.audit(pooled, "fp8", device="h100")(x[:, :64], w[:64])
    assert not few.findings


def test_the_report_names_the_device():
    report = sw.audit(pooled, "fp8", device="h100", trials=0)(*pooled_arguments(256))
    assert report.low == "autoscale fp8 on h100"
    assert "matrix units" in report.semantics


def test_a_device_needs_a_recipe():
    with pytest.raises(ValueError, match="expected low to be a recipe"):
        sw.audit(pooled, "fp16", device="h100")
    with pytest.raises(ValueError, match="no matrix units are known of 'h1000'"):
        sw.audit(pooled, "fp8", device="h1000")
