"""Audits of programs whose products a device's matrix units add up."""

import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw


def uniform(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).random(shape), jnp.float32)


def pooled(x, w):
    return (x @ w) / 4096.0


def pooled_arguments(terms=1024):
    return uniform(4, terms), uniform(terms, 4, seed=1)


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
    with pytest.raises(ValueError, match="needs a recipe as low"):
        sw.audit(pooled, "fp16", device="h100")
    with pytest.raises(ValueError, match="no matrix units are known of 'h1000'"):
        sw.audit(pooled, "fp8", device="h1000")
