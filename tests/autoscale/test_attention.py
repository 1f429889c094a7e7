"""``Recipe.attention``: the bits of attention's products, against a composition by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import scalewise as sw
from arrays import normal
from scalewise.autoscaling._keys import hadamard_signs, hadamard_transform
from scalewise.autoscaling.recipes import FP8_BLOCKS

WIDE = sw.Recipe(sw.Products.short(None, None))  # all but attention stays in float32
PER_TENSOR = sw.Attention()
FLASH_3 = sw.Attention(sw.Operand(FP8_BLOCKS, tile=128, hadamard=32), gradients=None)
ALL = "bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"


def rounded(x, operand):
    return sw.quantize(x, operand.format, scaling=operand.scaling).value()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4, 5))
def product(spec, a, b, left, right, gradient):
    return jnp.einsum(spec, rounded(a, left), rounded(b, right))


def _forward(spec, a, b, left, right, gradient):
    return product(spec, a, b, left, right, gradient), (a, b)


def _backward(spec, left, right, gradient, operands, dy):
    a, b = (rounded(x, own) for x, own in zip(operands, (left, right), strict=True))
    return jax.vjp(functools.partial(jnp.einsum, spec), a, b)[1](rounded(dy, gradient))


product.defvjp(_forward, _backward)


def projected(weights, x):
    return [jnp.einsum("btd,dhe->bthe", x, weights[n], precision="highest") for n in "qkv"]


def scores_masked(scores):
    return jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)


def attention(weights, x, multiply=lambda spec, a, b, *_: jnp.einsum(spec, a, b)):
    own = PER_TENSOR
    q, k, v = projected(weights, x)
    scores = multiply(ALL[0], q, k, own.operands, own.operands, own.gradients)
    shares = jax.nn.softmax(scores_masked(scores * 8**-0.5))
    return multiply(ALL[1], shares, v, own.probabilities, own.operands, own.gradients)


def loss(attend):
    return lambda weights, x: jnp.sum(jnp.sin(attend(weights, x)))


def given(time, heads=2):
    weights = {n: jnp.asarray(normal(i, (16, heads, 16))) / 4 for i, n in enumerate("qkv")}
    return weights, jnp.asarray(normal(3, (2, time, 16)))


@pytest.mark.parametrize("time", [8, 72])  # of 72 tokens the backward pass reads FP16 scores
def test_the_bits_are_those_of_a_composition_by_hand(time):
    recipe = dataclasses.replace(WIDE, attention=PER_TENSOR, residuals=None)
    recipe = recipe if time == 8 else dataclasses.replace(recipe, residuals="fp16")
    by_hand = functools.partial(attention, multiply=product)
    here = jax.jit(sw.autoscale(jax.value_and_grad(loss(attention)), recipe))(*given(time))
    there = jax.jit(jax.value_and_grad(loss(by_hand)))(*given(time))
    assert here[0] == there[0]
    exact = jax.jit(jax.value_and_grad(loss(attention)))(*given(time))
    assert here[0] != exact[0]
    for name in "qkv":
        a, b, wide = (np.asarray(x[1][name]) for x in (here, there, exact))
        if name == "v" or time == 8:
            np.testing.assert_array_equal(a, b)
        # FP16 scores move a few of the scores' gradients to another number of E5M2
        assert np.linalg.norm(a - b) < 0.1 * np.linalg.norm(b - wide)


def test_blocks_and_rotations_are_flash_attention_3s():
    q, k, v = (jnp.asarray(normal(i, (2, 256, 2, 64))) for i in range(3))
    recipe = dataclasses.replace(WIDE, attention=FLASH_3)

    def attend(q, k, v):
        q, k, v = q * 2, k * 2, v * 2  # computed, as attention's operands are
        scores = jnp.einsum(ALL[0], q, k) / 8
        return scores, jnp.einsum(ALL[1], jax.nn.softmax(scores), v)

    scores, out = jax.jit(sw.autoscale(attend, recipe))(q, k, v)
    signs = hadamard_signs(32, None)
    turned = [hadamard_transform(2 * x, 3, signs) for x in (q, k)]

    def in_blocks(x):  # one scale for each 128 tokens of a head
        tiles = x.reshape(2, 2, 128, 2, 64)
        scale = jnp.abs(tiles).max((2, 4), keepdims=True) / 448
        return (sw.round_to(tiles / scale, "e4m3fn") * scale).reshape(x.shape)

    expected = jnp.einsum(ALL[0], *map(in_blocks, turned)) / 8
    np.testing.assert_allclose(scores, expected, rtol=0, atol=2e-5 * float(abs(expected).max()))
    shares = rounded(jax.nn.softmax(scores), FLASH_3.probabilities)
    np.testing.assert_allclose(out, jnp.einsum(ALL[1], shares, in_blocks(2 * v)), atol=2e-5)


def explained(f, recipe, *args):
    rows = sw.explain(f, recipe)(*args).rows
    found = [(r.direction, r.format, r.scale) for r in rows if r.kind == "contraction"]
    return [x for x in found if x[1] != "fp32 x fp32"]


def library(weights, x):
    q, k, v = projected(weights, x)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def in_a_loop(weights, x):
    def layer(x, _):
        with jax.named_scope("layer"):
            return x + attention(weights, x).mean(2), None

    return lax.scan(jax.checkpoint(layer), x, None, length=2)[0]


@pytest.mark.parametrize("attend", [attention, library, in_a_loop])
def test_explain_shows_each_product_with_the_probabilities_constant_scale(attend):
    recipe = dataclasses.replace(WIDE, attention=PER_TENSOR)
    own = explained(jax.grad(loss(attend)), recipe, *given(32))
    forward = [x for x in own if x[0] == "forward" or x[1] == "e4m3fn x e4m3fn"]
    assert {x[1] for x in forward} == {"e4m3fn x e4m3fn"}
    assert {x[2] for x in forward} == {"amax", "amax x fixed"}
    backward = [x for x in own if x not in forward]
    assert len(backward) == 4
    assert {x[1] for x in backward} == {"e5m2 x e4m3fn"}
    assert sorted(x[2] for x in backward) == ["amax", "amax", "amax", "amax x fixed"]


def test_without_a_setting_for_gradients_the_backward_products_are_as_before():
    recipe = dataclasses.replace(sw.recipes.fp8, attention=FLASH_3)
    own = explained(jax.grad(loss(attention)), recipe, *given(32))
    assert [x[1] for x in own if x[0] == "backward"][:4] == ["fp16 x fp16"] * 4
    assert own[3][1:] == (
        "e4m3fn_blocks_of_128 x e4m3fn_blocks_of_128",
        "one for 128 x 128 elements, hadamard 32",
    )


def test_keep_is_stronger():
    recipe = dataclasses.replace(WIDE, attention=PER_TENSOR, keep={"layer": "fp32"})
    assert explained(jax.grad(loss(in_a_loop)), recipe, *given(32)) == []


def test_delayed_scales_have_a_history_and_constant_ones_none():
    late = sw.Delayed()
    own = sw.Attention(sw.Operand("e4m3fn", late), gradients=sw.Operand("e5m2", late))
    recipe = dataclasses.replace(sw.recipes.fp8_delayed, attention=own)
    f = sw.autoscale(jax.value_and_grad(loss(attention)), recipe)
    weights, x = given(32)
    history = f.init(weights, x)
    other = jax.eval_shape(sw.autoscale(f.f, sw.recipes.fp8_delayed).init, weights, x)
    assert len(other.operand_ids) - len(history.operand_ids) == 2  # the probabilities, twice
    (value, _), _ = jax.jit(f.step)(history, weights, x)
    assert value == jax.jit(f)(weights, x)[0]
    (late_value, _), _ = jax.jit(f.step)(history, weights, 2.0**20 * x)  # everything saturates
    assert abs(late_value) < 1e3 * abs(value)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: sw.Attention("e4m3fx"), "Attention.operands is 'e4m3fx': .*did you mean 'e4m3fn'"),
        (lambda: sw.Attention(probabilities=None), "Attention: probabilities is None; expected"),
        (lambda: sw.Recipe(attention="fp8"), "Recipe: attention is 'fp8'; expected an Attention"),
        (
            lambda: sw.Recipe(attention=sw.Attention(sw.Operand("e4m3fn", sw.Delayed()))),
            "Recipe.attention has delayed scaling, products has not; use it for both",
        ),
    ],
)
def test_bad_settings_are_refused(make, error):
    with pytest.raises((TypeError, ValueError), match=error):
        make()


def test_settings_are_data():
    recipe = dataclasses.replace(sw.recipes.mxfp8, attention=FLASH_3)
    assert sw.recipes.from_dict(sw.recipes.to_dict(recipe)) == recipe
    assert eval(repr(PER_TENSOR), vars(sw)) == PER_TENSOR
