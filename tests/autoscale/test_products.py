"""Where a device multiplies narrow numbers itself, it gets them narrow."""

import functools
import re
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from arrays import normal
from cases import nightly
from scalewise._jax import compiles_gpu_kernels
from scalewise.autoscaling._blocks import block_product, on_device
from scalewise.devices import DEVICES
from scalewise.scaled import quantize

W = normal(0, (16, 16)) / 4
X = normal(1, (8, 16))
IMAGE = normal(1, (2, 6, 6, 4))
KERNEL = normal(2, (3, 3, 4, 8))
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


NVFP4 = sw.Recipe(sw.Products.short("nvfp4", "nvfp4"))


@pytest.mark.filterwarnings("ignore:autoscale.*no matrix units")
@pytest.mark.parametrize(
    ("recipe", "device"),
    [
        ("fp8", "h100"),
        ("mxfp8", "b200"),
        *nightly([("fp8", "v5e"), ("mxfp8", "h100"), (NVFP4, "b200")]),
    ],
)
def test_both_routes_multiply_the_same_numbers(recipe, device, monkeypatch):
    """The route of a device, run on this one, which computes it by other loops."""
    recipe = replace(sw.recipes.recipe(recipe), device=device)
    want = jax.jit(sw.autoscale(jax.value_and_grad(dense), recipe))(W)
    platform = DEVICES[device].platform

    def routed(*operands, default, **routes):
        return routes.get(platform, default)(*operands)

    def as_on_device(function, cpu, options, result, *operands):
        return function(options, *operands)

    monkeypatch.setattr(jax.lax, "platform_dependent", routed)
    monkeypatch.setattr("scalewise.autoscaling._blocks.by_platform", as_on_device)
    got = jax.jit(sw.autoscale(jax.value_and_grad(dense), recipe))(W)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:autoscale.*no matrix units")
@pytest.mark.parametrize(
    "recipe", ["mxfp8", "mxfp4_forward", NVFP4], ids=["mxfp8", "mxfp4_forward", "nvfp4"]
)
def test_blocks_go_to_the_units_of_a_device_that_has_them(recipe):
    recipe = sw.recipes.recipe(recipe)
    mixed = len({*recipe.products.formats()[1]}) > 1  # of MXFP4 by MXFP8, XLA calls no library
    device = replace(recipe, device="b200", narrow="always")
    text = lowered(sw.autoscale(jax.grad(dense), device), W)
    assert ("block_scaled_dot" in text) == (not mixed)
    assert ("stablehlo.dot_general" in text) == mixed


@pytest.mark.skipif(not compiles_gpu_kernels(), reason="from JAX 0.12 Pallas asks a GPU")
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_operands_of_whole_tiles_are_rounded_by_our_kernel_for_a_gpu_with_units(name):
    recipe, w = replace(sw.recipes.recipe(name), narrow="always"), normal(0, (64, 64))
    gradient = jax.grad(lambda w: jnp.mean(jnp.square(w @ w)))
    for device, used in (("b200", True), ("h100", False)):
        with warnings.catch_warnings(action="ignore"):  # an h100 has no units for blocks
            text = lowered(sw.autoscale(gradient, replace(recipe, device=device)), w)
        assert ("__gpu$xla.gpu.triton" in text) == used
        assert ("block_scaled_dot" in text) == used


def test_a_stored_nvfp4_weight_is_multiplied_by_the_units_as_it_is():
    w = quantize(normal(0, (48, 64)), "nvfp4", axis=1)
    recipe = replace(sw.recipes.nvfp4, device="b200", narrow="always")
    text = lowered(sw.autoscale(lambda x, w: x @ w.T, recipe), normal(1, (8, 64)), w)
    assert re.search(
        r"bitcast_convert %\w+ : \(tensor<48x32xui8>\) -> tensor<48x32x2xf4E2M1FN>", text
    )
    assert "stablehlo.dot_general" not in text


def test_batches_of_blocks_go_to_the_units_too():
    def f(x, w):
        return jnp.sum(jnp.square(jnp.einsum("ecd,edf->ecf", x * 2, w)))

    stack = jnp.stack([W, W * 2])
    mxfp8 = replace(sw.recipes.mxfp8, device="b200", narrow="always")
    for g, w in ((f, stack), (jax.vmap(f, (None, 0)), jnp.stack([stack, stack]))):
        text = lowered(sw.autoscale(g, mxfp8), stack, w)
        assert "block_scaled_dot" in text
        assert "stablehlo.dot_general" not in text


def test_blocks_of_several_contracted_axes_are_multiplied_as_they_lie():
    """Axes of 3 and 40, of which blocks lie along the one of 40, one of them short."""
    a = normal(0, (2, 5, 3, 40))
    b = normal(1, (2, 3, 40, 7))
    x, y = (quantize(z, "mxfp8_e4m3", axis=i) for z, i in ((a, 3), (b, 2)))
    dimensions = ((2, 3), (1, 2)), ((0,), (0,))
    got, _ = block_product(dimensions, x, y, functools.partial(on_device, dtype=jnp.float32))
    want = jnp.einsum("nabc,nbcd->nad", x.value(), y.value())
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_fp8_is_multiplied_in_the_format_that_a_tpu_doubles():
    def text(device, recipe=sw.recipes.fp8):
        recipe = replace(recipe, device=device, narrow="always")
        f = jax.jit(sw.autoscale(jax.grad(dense), recipe))
        return operands(f.trace(W).lower(lowering_platforms=("tpu",)).as_text())

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert text("v6e") == {"f8E4M3B11FNUZ f8E4M3B11FNUZ", "bf16 bf16"}
    (message,) = {str(w.message) for w in seen}
    assert "test_products.py" in message
    assert "v6e has no matrix units for e4m3fn x e5m2" in message
    assert text("v6e", sw.recipes.fp8.with_operands(backward="e4m3fn")) == {
        "f8E4M3B11FNUZ f8E4M3B11FNUZ"
    }
    assert text("tpu7x") == {"f8E4M3FN f8E4M3FN", "f8E4M3FN f8E5M2"}


def test_only_a_gpu_is_told_how_a_copy_lies():
    """A TPU's attention would get the layout, too, and copy all scores for it."""
    f = jax.jit(sw.autoscale(jax.grad(dense), "fp8")).trace(W)
    found = {
        platform: "LayoutConstraint" in f.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cuda", "tpu", "cpu")
    }
    assert found == {"cuda": True, "tpu": False, "cpu": False}


def test_a_device_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match=r"no device is called 'h10'; did you mean 'h100'"):
        sw.Recipe(device="h10")


def test_a_recipe_without_units_for_it_warns_once():
    recipe = replace(sw.recipes.mxfp8, device="h100")
    with pytest.warns(UserWarning, match="h100 has no matrix units for mxfp8_e4m3") as seen:
        jax.make_jaxpr(sw.autoscale(jax.grad(dense), recipe))(W)
    assert len(seen) == 1


def test_fp8_numbers_are_widened_from_their_codes_where_xla_would_leave_out_both_converts():
    text = lowered(sw.autoscale(convolution, "fp8"), KERNEL)
    assert not re.search(r"stablehlo.convert.*f8E4M3FN>\) -> tensor<[^>]*f(16|32)>", text)


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


def test_an_operand_of_a_bfloat16_algorithm_is_written_in_bfloat16():
    """XLA on a GPU would write a float32 operand, and round it for each product."""
    algorithm = jax.lax.DotAlgorithmPreset.BF16_BF16_F32

    def f(x, w):
        return jnp.matmul(x, w, precision=algorithm, preferred_element_type=jnp.float32)

    left_alone = sw.autoscale(f, sw.Recipe(sw.Products.short(None, None)))
    assert operands(lowered(left_alone, X, W.astype(jnp.bfloat16))) == {"bf16 bf16"}


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
    qkv = [normal(i, (2, 8, 16)) for i in range(3)]
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
    x = normal(0, (4, 8, 16))
    experts = normal(1, (4, 16, 16)) / 4

    def f(w):
        y = jax.nn.relu(jnp.einsum("ecd,edf->ecf", x * 2, w))
        return jnp.sum(jnp.square(jnp.einsum("ecd,edf->ecf", y, w)))

    assert operands(lowered(sw.autoscale(jax.grad(f), "fp8"), experts)) <= {
        "f8E4M3FN f8E4M3FN", "f8E4M3FN f8E5M2"
    }  # fmt: skip


def test_experts_of_grouped_products_are_narrow_on_a_gpu():
    x, experts, sizes = normal(0, (16, 16)), normal(1, (4, 16, 16)) / 4, jnp.array([3, 0, 9, 4])

    def f(w):
        return jnp.sum(jnp.square(jax.lax.ragged_dot(x * 2, w, sizes)))

    always = replace(sw.recipes.fp8, device="h100", narrow="always")
    text = lowered(sw.autoscale(jax.value_and_grad(f), always), experts)
    lines = [line for line in text.splitlines() if "chlo.ragged_dot" in line]
    assert [re.findall("f8E4M3FN|f8E5M2", line) for line in lines] == [
        ["f8E4M3FN", "f8E4M3FN"], ["f8E4M3FN", "f8E5M2"],
    ]  # fmt: skip
    tpu = replace(sw.recipes.fp8, device="tpu7x")  # nobody has compiled one there
    with pytest.warns(UserWarning, match="tpu7x has no matrix units for .* in ragged_dot"):
        text = lowered(sw.autoscale(jax.value_and_grad(f), tpu), experts)
    assert "f8E4M3FN" not in "".join(s for s in text.splitlines() if "chlo.ragged_dot" in s)


def routed(w, x, sizes, grouped):
    """Two experts for each half of the tokens, grouped or one by one."""
    if grouped:
        return jax.lax.ragged_dot(jax.nn.relu(jax.lax.ragged_dot(x, w, sizes)), w, sizes)
    x = x.reshape(2, 8, 16)
    return jnp.einsum("ecf,efd->ecd", jax.nn.relu(jnp.einsum("ecd,edf->ecf", x, w)), w)


@pytest.mark.filterwarnings("ignore:autoscale")
@pytest.mark.parametrize("grouped", [True, *nightly([False])])
def test_experts_run_under_every_recipe(grouped):
    w, x, sizes = normal(1, (2, 16, 16)) / 4, normal(0, (16, 16)), jnp.array([8, 8])

    def gradients(w, x):
        return jax.grad(lambda w: jnp.sum(jnp.square(routed(w, x, sizes, grouped))))(w)

    for name in sw.recipes.CATALOGUE:
        f = sw.autoscale(gradients, name)
        assert jax.eval_shape(f, w, x).shape == w.shape, name
    want = gradients(w, x)
    got = jax.jit(sw.autoscale(gradients, "fp8"))(w, x)
    assert jnp.linalg.norm(got - want) < 0.1 * jnp.linalg.norm(want)
