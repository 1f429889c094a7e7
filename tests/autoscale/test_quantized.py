"""Quantized arguments are multiplied as they are stored; ``quantize_params`` makes them."""

import dataclasses
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import scalewise as sw
from arrays import normal
from cases import nightly

W = normal(0, (64, 96)) * 0.1
W16 = W.astype(jnp.bfloat16)
X = jax.random.normal(jax.random.key(1), (32, 64), jnp.bfloat16)
RECIPES = ("fp8", "fp8_rowwise", "mxfp8", "nvfp4", "fp8_blockwise")


def equations(jaxpr):
    """All equations of a jaxpr, also of its inner ones."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def largest_by_primitive(f, *args):
    found = [e for e in equations(jax.make_jaxpr(f)(*args).jaxpr) if e.outvars]
    return {e.primitive.name: e.outvars[0].aval.shape for e in found}


def test_leaves_of_a_model_that_are_no_arrays_stay():
    model = eqx.nn.MLP(64, 4, 32, 2, jnp.tanh, key=jax.random.key(0))
    stored = sw.quantize_params(model, "fp8", axis=-1)
    assert isinstance(stored.layers[1].weight, sw.ScaledArray)
    assert stored.activation is model.activation
    f = sw.autoscale(lambda m, x: jax.vmap(m)(x), "fp8")
    x = X.astype(jnp.float32)
    np.testing.assert_allclose(f(stored, x), f(model, x), atol=1e-6)
    with pytest.raises(TypeError, match=r"params is <function .* expected a pytree of arrays"):
        sw.quantize_params(lambda x: x, "fp8")


@pytest.mark.parametrize("recipe", nightly(RECIPES, but=["fp8", "nvfp4"]))
def test_stored_weights_give_the_result_of_weights_that_are_rounded_in_the_call(recipe):
    f = sw.autoscale(lambda p, x: jax.nn.gelu(x @ p["w"]) @ p["u"], recipe)
    params = {"w": W.astype(jnp.bfloat16), "u": W.T.astype(jnp.bfloat16)}
    got = f(sw.quantize_params(params, recipe), X)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, f(params, X))


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("transposed", [False, True])
def test_scales_of_tensors_rows_and_columns_multiply_the_numbers(axis, transposed):
    stored = sw.quantize(W16, "e4m3fn", axis=axis)
    f = (lambda w, x: x @ w.T) if transposed else (lambda w, x: x @ w)
    x = X[:, :1].repeat(96, 1) if transposed else X
    keep = sw.recipes.fp8.with_operands(forward="bf16")  # activations as they are
    got = sw.autoscale(f, keep)(stored, x)
    want = f(stored.astype(jnp.float32), x.astype(jnp.float32))
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-7)


def test_a_weight_is_neither_measured_nor_rounded_nor_written():
    stored = sw.quantize_params({"w": W16}, "fp8")
    found = largest_by_primitive(sw.autoscale(lambda p, x: x @ p["w"], "fp8"), stored, X)
    assert found["reduce_max"] == ()
    rounded = [
        e
        for e in equations(
            jax.make_jaxpr(sw.autoscale(lambda p, x: x @ p["w"], "fp8"))(stored, X).jaxpr
        )
        if e.primitive.name == "stored_copy"
    ]
    assert [e.outvars[0].aval.shape for e in rounded] == [X.shape]

    def on_device(p, x):
        return sw.autoscale(lambda p, x: x @ p["w"], "fp8")(p, x)

    text = jax.jit(on_device).trace(stored, X).lower(lowering_platforms=("cuda",)).as_text()
    (product,) = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert "tensor<64x96xf8E4M3FN>" in product
    assert product.rstrip().endswith("tensor<32x96xbf16>")
    assert "-> tensor<64x96xf" not in text.replace("-> tensor<64x96xf8", "")


def test_stacked_weights_keep_their_numbers_in_a_scan():
    stack = jnp.stack([W16[:, :64], -W16[:, :64]])

    def f(w, x):
        return lax.scan(lambda c, v: (jnp.tanh(c @ v), None), x, w)[0]

    for recipe, error in (("fp8", 0.02), ("mxfp8", 0.02), ("nvfp4", 0.15)):
        stored = sw.quantize_params({"w": stack}, recipe)["w"]
        got = sw.autoscale(f, recipe)(stored, X)
        want = X
        for i in range(2):
            one = sw.autoscale(lambda w, x: jnp.tanh(x @ w), recipe)
            want = one(stored.value()[i].astype(jnp.bfloat16), want)
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), atol=error)
        assert got.dtype == jnp.bfloat16


def test_gradients_reach_adapters_through_a_frozen_quantized_base():
    base = sw.quantize_params({"w": W}, "fp8")
    a, b = jnp.ones((64, 4)) * 0.01, jnp.ones((4, 96)) * 0.01

    def loss(adapters, base, x):
        a, b = adapters
        y = x @ base["w"] + (x @ a) @ b
        return jnp.mean(jnp.square(jnp.tanh(y) @ base["w"].T))

    wide, x = {"w": base["w"].value()}, X.astype(jnp.float32)
    want = jax.jit(jax.grad(loss))((a, b), wide, x)
    for f in (sw.autoscale(jax.grad(loss), "fp8"), jax.grad(sw.autoscale(loss, "fp8"))):
        got = jax.jit(f)((a, b), base, x)
        for g, w in zip(got, want, strict=True):
            assert float(jnp.linalg.norm(g - w) / jnp.linalg.norm(w)) < 0.1


def test_an_argument_that_is_returned_stays_quantized():
    stored = sw.quantize_params({"w": W16}, "fp8")
    same, y = sw.autoscale(lambda p, x: (p, x @ p["w"]), "fp8")(stored, X)
    assert same["w"].data.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(same["w"].value(), stored["w"].value())
    assert y.shape == (32, 96)


@pytest.mark.parametrize("recipe", ["mxfp8", *nightly(["fp8", "nvfp4"])])
def test_weights_that_were_made_together_are_those_of_each(recipe):
    """Of experts, as many as each has inputs, so that no axis is told by its length."""
    experts = normal(3, (32, 32, 48))
    experts = experts * jnp.exp2(jnp.arange(32.0) % 12)[:, None, None]
    x = normal(4, (32, 4, 32))
    one = sw.autoscale(lambda w, x: (w, x @ w), recipe)
    stored = jax.vmap(lambda w: sw.quantize_params(w, recipe))(experts)
    want = jnp.stack([jnp.matmul(a, w.value()) for a, w in zip(x, stored, strict=True)])
    size = jnp.linalg.norm(want, axis=(1, 2))
    whole = sw.autoscale(lambda w, x: (w, jnp.einsum("eio,ebi->ebo", w, x)), recipe)
    looped = lambda w, x: lax.map(lambda pair: one(*pair), (w, x))  # noqa: E731
    for together in (jax.vmap(one), looped, whole):
        kept, y = jax.jit(together)(stored, x)
        assert float(jnp.max(jnp.linalg.norm(y - want, axis=(1, 2)) / size)) < 0.13
        assert jax.tree.structure(kept) == jax.tree.structure(stored)
        np.testing.assert_array_equal(kept.value(), stored.value())


def test_other_operations_compute_with_the_value():
    stored = sw.quantize(W, "e4m3fn")
    got = sw.autoscale(lambda w: jnp.sum(jnp.square(w), axis=0), "fp8")(stored)
    np.testing.assert_allclose(got, jnp.sum(jnp.square(stored.value()), axis=0), rtol=1e-6)


def test_patterns_and_axes_say_what_is_quantized():
    tree = {"embedding": W, "norm": W, "query": W[None], "bias": W[0], "n": jnp.int32(1)}
    stored = sw.quantize_params(tree, "mxfp8", axis={"query": 1})
    assert isinstance(stored["query"], sw.ScaledArray)
    assert stored["query"].block == (-2, 32)
    for name in ("embedding", "norm", "bias", "n"):
        assert not isinstance(stored[name], sw.ScaledArray)
    everything = sw.quantize_params(tree, "fp8", wide=())
    assert isinstance(everything["embedding"], sw.ScaledArray)
    with pytest.raises(ValueError, match=r"\['query'\] of shape \(1, 64, 96\) has no axis 3"):
        sw.quantize_params(tree, "fp8", axis={"query": 3})
    with pytest.raises(ValueError, match="16 bits or more"):
        sw.quantize_params(tree, "fp16")
    with pytest.raises(ValueError, match="Hadamard"):
        sw.quantize_params(tree, "quartet")


def tokens_model(p, tokens):
    x = p["emb_in"][tokens] + p["places"][None, : tokens.shape[1]]
    x = x @ p["emb_to_hidden"]
    x, _ = lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["layers"])
    x = jnp.einsum("btd,bdf->btf", x, p["experts"][tokens[:, 0]])
    x = x * jax.nn.softmax(x @ p["router"])[..., :1]
    return x @ p["output"].T + jnp.mean(p["output"][tokens])


def tokens_params(dtype):
    shapes = {
        "emb_in": (50, 16), "places": (8, 16), "emb_to_hidden": (16, 32), "layers": (2, 32, 32),
        "experts": (50, 32, 16), "router": (16, 4), "output": (50, 16), "unread": (16, 16),
    }  # fmt: skip
    keys = jax.random.split(jax.random.key(2), len(shapes))
    return {
        name: jax.random.normal(k, shape, dtype)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def test_what_reads_an_array_says_whether_it_is_an_embedding():
    tokens = jnp.zeros((2, 8), jnp.int32)
    params = tokens_params(jnp.bfloat16)

    def kept(**given):
        stored = sw.quantize_params(params, "fp8", **given)
        return {n for n, x in stored.items() if not isinstance(x, sw.ScaledArray)}

    assert kept() == {"emb_in", "emb_to_hidden", "router"}  # by their names
    by_use = {"emb_in", "places", "output"}
    program = lambda p: tokens_model(p, tokens)  # noqa: E731
    assert kept(program=program) == by_use | {"router"}
    assert kept(program=program, wide=()) == by_use
    assert kept(program=lambda p: jax.jit(jax.checkpoint(program))(p), wide=()) == by_use
    for token in (3, jnp.int32(3)):  # of a decoding step, which slices the array
        step = lambda p, i=token: tokens_model(p | {"emb_in": p["emb_in"][i][None]}, tokens * 0)  # noqa: E731
        assert kept(program=step, wide=()) == by_use
    with pytest.raises(TypeError, match="program is 'fp8'; expected a function or None"):
        kept(program="fp8")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, *nightly([jnp.float16, jnp.float32])])
def test_types_in_a_program_dont_change_when_its_weights_are_quantized(dtype):
    params, tokens = tokens_params(dtype), jnp.zeros((2, 8), jnp.int32)

    def step(p, cache, t):
        y = tokens_model(p, t)
        k = y[:, :1, :16] + p["emb_in"][t[:, :1]]
        return y, lax.dynamic_update_slice(cache, k, (0, 3, 0)), jax.tree.map(jnp.sin, p)

    cache = jnp.zeros((2, 8, 16), dtype)
    want = jax.eval_shape(step, params, cache, tokens)
    for recipe in RECIPES:
        stored = jax.eval_shape(lambda p, r=recipe: sw.quantize_params(p, r, wide=()), params)
        assert jax.tree.map(lambda x: x.dtype, want[2]) == {k: x.dtype for k, x in stored.items()}
        got = jax.eval_shape(sw.autoscale(step, recipe), stored, cache, tokens)
        assert got == want


# -- products that a device computes faster as they are --------------------------------------------


def formats(f, recipe, *args, device="h100"):
    recipe = dataclasses.replace(sw.recipes.CATALOGUE[recipe], device=device)
    rows = sw.explain(f, recipe)(*args).rows
    return [(row.format, row.scale) for row in rows if row.kind == "contraction"]


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


def loss(w, x):
    return jnp.sum(jnp.square(x @ w))


def test_a_recipe_leaves_small_products_alone_on_a_known_device():
    step = jax.grad(loss)
    assert formats(step, "fp8", shape(8192, 8192), shape(8192, 8192))[0][0] == "e4m3fn x e4m3fn"
    small = formats(step, "fp8", shape(256, 256), shape(256, 256))
    assert {text for text, _ in small} == {"bf16 x bf16"}
    assert {scale for _, scale in small} == {"left alone: converting costs more"}
    # a CPU shows what the formats do
    here = formats(step, "fp8", shape(256, 256), shape(256, 256), device="cpu")
    assert here[0][0] == "e4m3fn x e4m3fn"
    always = dataclasses.replace(sw.recipes.fp8, device="h100", narrow="always")
    row = sw.explain(step, always)(shape(256, 256), shape(256, 256)).rows[0]
    assert row.format == "e4m3fn x e4m3fn"


@pytest.mark.filterwarnings("ignore:autoscale.*no matrix units")
def test_a_recipe_leaves_convolutions_alone_on_a_known_device():
    def f(w, x):
        return jnp.sum(lax.conv_general_dilated(x, w, (1, 1), "SAME"))

    found = formats(jax.grad(f), "fp8", shape(256, 256, 3, 3), shape(64, 256, 32, 32))
    assert set(found) == {("bf16 x bf16", "left alone: no units")}


def test_weights_that_cost_more_to_quantize_than_they_save_are_warned_of():
    def f(w, x):
        return x @ w

    with pytest.warns(UserWarning, match=r"test_quantized.py.*quantize_params"):
        found = formats(f, "fp8", shape(4096, 4096), shape(8, 4096))
    assert found == [("bf16 x bf16", "left alone: converting costs more")]
    stored = sw.quantize_params({"w": jnp.zeros((4096, 4096), jnp.bfloat16)}, "fp8")["w"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = formats(f, "fp8", stored, shape(8, 4096))
    assert found == [("e4m3fn x e4m3fn", "amax x stored")]
