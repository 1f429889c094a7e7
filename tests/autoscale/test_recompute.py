"""Residuals are stored once, or computed again from stored arrays."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from arrays import normal
from cases import nightly

W = normal(0, (128, 128)) / 11
X = normal(1, (256, 128))


def layers(activation):
    def loss(w):
        x = X
        for _ in range(3):
            x = activation(x @ w)
        return jnp.mean(jnp.square(x))

    return loss


def temporaries(f, *args):
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes


def stored(f, *args):
    """Shapes that are rounded to FP16 behind a barrier, to wait for the backward pass."""
    program = str(jax.make_jaxpr(f)(*args))
    return program.count("f16[256,128] = optimization_barrier")


@pytest.mark.parametrize(
    "activation", [jax.nn.gelu, *nightly([jax.nn.silu, jnp.tanh, jax.nn.softplus])]
)
def test_gradients_are_float32s(activation):
    loss = layers(activation)
    want = jax.grad(loss)(W)
    for recipe, tolerance in (("fp16", 2e-3), ("fp8", 0.1)):
        got = jax.jit(sw.autoscale(jax.grad(loss), recipe))(W)
        error = jnp.linalg.norm(got - want) / jnp.linalg.norm(want)
        assert error < tolerance, (recipe, float(error))


def test_an_activation_stores_only_its_operand():
    """A GELU stores the product before it, from which its gradient computes the rest again."""
    f = sw.autoscale(jax.grad(layers(jax.nn.gelu)), "fp16")
    # three products; and each layer's output, which is the next product's operand
    assert stored(f, W) <= 6


def test_a_step_takes_less_memory_than_in_float32():
    loss = layers(jax.nn.gelu)
    narrow = sw.autoscale(jax.grad(loss), "fp16")
    assert temporaries(narrow, W) < 0.9 * temporaries(jax.grad(loss), W)


@pytest.mark.parametrize("recipe", ["fp16", "fp8"])
def test_operands_of_backward_products_are_kept_narrow_until_then(recipe):
    """Compiled, not only asked for: XLA on a CPU drops barriers, and widens as early as it can."""
    f = sw.autoscale(jax.grad(layers(jnp.tanh)), recipe)
    text = jax.jit(f).lower(W).compile().as_text()
    dtype = {"fp16": "f16", "fp8": "f8e4m3fn"}[recipe]
    entry = text[text.index("ENTRY") :].splitlines()  # in the order in which it runs
    products = [i for i, line in enumerate(entry) if re.search(r" dot\(|kind=kCustom", line)]
    last_forward = products[2]
    shapes = "256,128|32768"  # narrow copies are made of flat arrays
    names = [re.match(rf" *(%[\w.-]+) = {dtype}\[(?:{shapes})\]", line) for line in entry]
    kept = {name[1] for name in names[:last_forward] if name}
    read = {name for name in kept for line in entry[last_forward + 1 :] if f"{name})" in line}
    assert len(read) >= 2  # outputs of two layers


def test_functions_that_amplify_rounding_are_stored_themselves():
    """exp of a large number: from a rounded operand it would be wrong by that number's own ulps."""

    def loss(w):
        y = X @ w * 8
        return jnp.sum(jnp.exp(y - jnp.max(y, axis=1, keepdims=True)) * jnp.sin(X))

    want = jax.grad(loss)(W)
    got = jax.jit(sw.autoscale(jax.grad(loss), "fp16"))(W)
    assert jnp.linalg.norm(got - want) < 1e-2 * jnp.linalg.norm(want)


def test_a_bfloat16_program_is_not_rounded_again():
    def loss(w):
        w, x = w.astype(jnp.bfloat16), X.astype(jnp.bfloat16)
        return jnp.mean(jnp.square(jax.nn.gelu(x @ w) @ w).astype(jnp.float32))

    exact = sw.Recipe(sw.Products.short(None, None))
    got = jax.jit(sw.autoscale(jax.grad(loss), exact))(W)
    # XLA may keep excess precision of a sum of two gradients, or not
    np.testing.assert_allclose(got, jax.jit(jax.grad(loss))(W), rtol=2**-7, atol=2**-14)


def test_smaller_arrays_are_kept():
    loss = layers(jax.nn.gelu)
    everything = replace(sw.recipes.fp16, min_size=0)
    kept = replace(sw.recipes.fp16, min_size=10**9)
    got = [jax.jit(sw.autoscale(jax.grad(loss), r))(W) for r in (everything, kept)]
    np.testing.assert_allclose(got[0], got[1], rtol=2e-2, atol=1e-5)


def mixed(q, k, v, attention):
    """The gradient of an attention whose queries and keys are rotated in float32."""

    def loss(q, k, v):
        halves = jnp.split(q.astype(jnp.float32), 2, axis=-1)
        q = jnp.concatenate([-halves[1], halves[0]], axis=-1).astype(jnp.bfloat16)
        return jnp.sum(attention(q * 2, k, v * 2).astype(jnp.float32))

    return jax.grad(loss, (0, 1, 2))(q, k, v)


def heads(seed):
    return normal(seed, (2, 128, 4, 128)).astype(jnp.bfloat16)


@pytest.mark.parametrize("implementation", ["xla", "cudnn"])
def test_nothing_of_attention_in_bfloat16_is_stored_anew_for_a_device(implementation, monkeypatch):
    """Neither scores, which the compiler computes again, nor what a kernel returned for another."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda *_: True)

    def attention(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, implementation=implementation)

    recipe = replace(sw.recipes.fp8, device="h100")
    f = sw.autoscale(lambda q, k, v: mixed(q, k, v, attention), recipe)
    with jax.numpy_dtype_promotion("standard"):  # JAX's own code needs it
        program = str(jax.make_jaxpr(f)(heads(0), heads(1), heads(2)))  # a warning is an error
    assert "f16" not in program.replace("bf16", "")


def test_a_value_of_16_bits_is_stored_rather_than_its_rounded_source():
    f = sw.autoscale(lambda q: mixed(q, q, q, lambda q, k, v: jnp.square(q)), "fp8")
    program = str(jax.make_jaxpr(f)(heads(0)))
    assert "f16" not in program.replace("bf16", "")
