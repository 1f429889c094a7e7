"""Where a device multiplies narrow numbers itself, it gets them narrow."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from scalewise.autoscale import _products

W = jax.random.normal(jax.random.key(0), (16, 16)) / 4
X = jax.random.normal(jax.random.key(1), (8, 16))
IMAGE = jax.random.normal(jax.random.key(1), (2, 6, 6, 4))
KERNEL = jax.random.normal(jax.random.key(2), (3, 3, 4, 8))
NUMBERS = ("NHWC", "HWIO", "NHWC")


def dense(w):
    return jnp.mean(jnp.square(X @ w @ w))


def convolution(k):
    y = jax.lax.conv_general_dilated(IMAGE, k, (1, 1), "SAME", dimension_numbers=NUMBERS)
    return jnp.mean(jnp.square(y))


# recipe: the operands of products forward, and of those with a gradient
OPERANDS = {
    "fp16": ("f16 f16", "f16 f16"),
    "bf16": ("bf16 bf16", "bf16 bf16"),
    "fp8": ("f8E4M3FN f8E4M3FN", "f8E5M2 f8E4M3FN"),
    "unit_scaling": ("f8E4M3FN f8E4M3FN", "f8E5M2 f8E4M3FN"),
    "mxfp8": ("bf16 bf16", "bf16 bf16"),  # exact: FP8 numbers times powers of two
    "fp16_every_op": ("f16 f16", "f16 f16"),
}


def operands(text):
    """Operand types of each contraction in a StableHLO text."""
    lines = [s for s in text.splitlines() if re.search(r"stablehlo\.(dot_general|convolution)", s)]
    types = [s[s.rindex(" : (") :].split("->")[0] for s in lines]
    return {" ".join(re.findall(r"x([a-z][A-Z0-9a-wyz]*)>", s)) for s in types}


@pytest.mark.parametrize("recipe", OPERANDS)
def test_narrow_products(recipe, monkeypatch):
    f = sw.autoscale(jax.value_and_grad(dense), recipe)
    want = jax.jit(f)(W)
    monkeypatch.setattr(_products, "has_narrow_units", lambda: True)
    again = sw.autoscale(jax.value_and_grad(dense), recipe)
    lowered = jax.jit(again).trace(W).lower(lowering_platforms=("cuda",))
    assert operands(lowered.as_text()) == set(OPERANDS[recipe])
    for got, y in zip(jax.jit(again)(W), want, strict=True):
        np.testing.assert_allclose(got, y, rtol=1e-6, atol=1e-7)


def test_convolutions_have_no_narrower_units_than_fp16(monkeypatch):
    monkeypatch.setattr(_products, "has_narrow_units", lambda: True)
    f = jax.jit(sw.autoscale(jax.value_and_grad(convolution), "fp8"))
    lowered = f.trace(KERNEL).lower(lowering_platforms=("cuda",))
    assert operands(lowered.as_text()) == {"f16 f16"}
