"""Where a device multiplies narrow numbers itself, it gets them narrow."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw

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
    "fp8": ("f8E4M3FN f8E4M3FN", "f8E4M3FN f8E5M2"),
    "unit_scaling": ("f8E4M3FN f8E4M3FN", "f8E4M3FN f8E5M2"),
    "mxfp8": ("bf16 bf16", "bf16 bf16"),  # exact: FP8 numbers times powers of two
    "fp16_every_op": ("f16 f16", "f16 f16"),
}


def operands(text):
    """Operand types of each contraction in a StableHLO text, whichever comes first."""
    lines = [s for s in text.splitlines() if re.search(r"stablehlo\.(dot_general|convolution)", s)]
    types = [s[s.rindex(" : (") :].split("->")[0] for s in lines]
    return {" ".join(sorted(re.findall(r"x([a-z][A-Z0-9a-wyz]*)>", s))) for s in types}


def lowered(f, *args):
    """StableHLO of a function for CUDA, on a machine that has none."""
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("recipe", OPERANDS)
def test_products_for_a_gpu_are_narrow(recipe):
    f = sw.autoscale(jax.value_and_grad(dense), recipe)
    assert operands(lowered(f, W)) == set(OPERANDS[recipe])


def test_convolutions_have_no_narrower_units_than_fp16():
    f = sw.autoscale(jax.value_and_grad(convolution), "fp8")
    assert operands(lowered(f, KERNEL)) == {"f16 f16"}


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8"])
def test_both_routes_multiply_the_same_numbers(recipe, monkeypatch):
    """The route of a device, run on this one, which computes it by other loops."""
    f = sw.autoscale(jax.value_and_grad(dense), recipe)
    want = jax.jit(f)(W)

    def device(*operands, cpu, default):
        return default(*operands)

    monkeypatch.setattr(jax.lax, "platform_dependent", device)
    for got, y in zip(
        jax.jit(sw.autoscale(jax.value_and_grad(dense), recipe))(W), want, strict=True
    ):
        np.testing.assert_allclose(got, y, rtol=1e-6, atol=1e-7)


def test_backward_products_accumulate_exactly():
    text = lowered(sw.autoscale(jax.value_and_grad(dense), "fp8"), W)
    lines = [s for s in text.splitlines() if "stablehlo.dot_general" in s]
    exact = {"HIGHEST" in s for s in lines if "f8E5M2" in s}
    fast = {"HIGHEST" in s for s in lines if "f8E5M2" not in s}
    assert (exact, fast) == ({True}, {False})


def test_a_product_keeps_the_programs_own_precision():
    def f(w):
        return jnp.sum(jnp.matmul(X, w, precision="highest"))

    assert "HIGHEST" in lowered(sw.autoscale(f, "fp8"), W)


def half(w):
    """In bfloat16 but for its parameters, as mixed-precision programs are written."""
    w, x = w.astype(jnp.bfloat16), X.astype(jnp.bfloat16)
    return jnp.mean(jnp.square(jax.nn.gelu(x @ w) @ w))


@pytest.mark.parametrize("recipe", ["fp8", "bf16", "fp16"])
def test_a_bfloat16_program_stays_in_bfloat16(recipe):
    text = lowered(sw.autoscale(jax.value_and_grad(half), recipe), W)
    results = {
        re.findall(r"x([a-z][A-Z0-9a-z]*)>", s)[-1]
        for s in text.splitlines()
        if "stablehlo.dot_general" in s
    }
    assert results == {"bf16"}
    wide = sw.autoscale(jax.value_and_grad(half), replace(sw.recipes.fp8, flight="float32"))
    assert "-> tensor<8x16xf32>" in lowered(wide, W)


def test_sixteen_bit_recipes_leave_a_bfloat16_program_as_it_is():
    for recipe in ("bf16", "fp16"):
        got = jax.jit(sw.autoscale(jax.value_and_grad(half), recipe))(W)
        for y, want in zip(got, jax.jit(jax.value_and_grad(half))(W), strict=True):
            np.testing.assert_allclose(y, want, rtol=2e-2, atol=1e-4)


def attention(q, k, v, w):
    q, k, v = (x @ w for x in (q, k, v))
    p = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
    return jnp.sum(jnp.square(jnp.einsum("bqk,bkd->bqd", p, v) @ w))


def test_attention_stays_in_the_storage_format():
    qkv = [jax.random.normal(jax.random.key(i), (2, 8, 16)) for i in range(3)]
    gradient = jax.grad(attention, argnums=3)
    text = lowered(sw.autoscale(gradient, "fp8"), *qkv, W)
    batched = [s for s in text.splitlines() if "batching_dims" in s]
    assert operands("\n".join(batched)) == {"f16 f16"}
    assert "f8E4M3FN f8E4M3FN" in operands(text)
    kept = replace(sw.recipes.fp8, keep={"dot_general": "e4m3fn"})
    text = lowered(sw.autoscale(gradient, kept), *qkv, W)
    batched = [s for s in text.splitlines() if "batching_dims" in s]
    assert operands("\n".join(batched)) == {"f8E4M3FN f8E4M3FN"}


def test_experts_products_are_narrow_both_ways():
    """A batch of matrices that are weights is no attention, backward neither."""
    x = jax.random.normal(jax.random.key(0), (4, 8, 16))
    experts = jax.random.normal(jax.random.key(1), (4, 16, 16)) / 4

    def f(w):
        y = jax.nn.relu(jnp.einsum("ecd,edf->ecf", x * 2, w))
        return jnp.sum(jnp.square(jnp.einsum("ecd,edf->ecf", y, w)))

    assert operands(lowered(sw.autoscale(jax.grad(f), "fp8"), experts)) <= {
        "f8E4M3FN f8E4M3FN", "f8E4M3FN f8E5M2"
    }  # fmt: skip
