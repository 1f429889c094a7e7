"""Recipes against transcriptions of their papers in NumPy, and the properties that they claim."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import scalewise as sw
from arrays import normal
from cases import nightly, refused
from scalewise.autoscaling._keys import hadamard_signs, hadamard_transform
from scalewise.formats import MXFP4, NVFP4
from transcribed import (
    E2M1,
    E4M3,
    E5M2,
    by_rows,
    deepseek,
    exact,
    mx,
    nvidia,
    quest,
    transformed,
    whole,
)

RECIPES = sw.recipes
X, W, G = (np.array(normal(i, s)) for i, s in enumerate([(40, 200), (200, 72), (40, 72)]))
X[:, 7] *= 100  # a channel of outliers


def nearest(recipe):
    """Returns a recipe without its random numbers, which stores nothing between the passes."""
    fields = {
        name: tuple(
            x and dataclasses.replace(x, rounding="nearest_even", signs="fixed")
            for x in getattr(recipe.products, name)
        )
        for name in ("forward", "input_gradient", "weight_gradient")
    }
    return dataclasses.replace(recipe.with_products(**fields), residuals=None)


def with_fourth(recipe):
    change = {"scaling": sw.FourOverSix()}
    forward = tuple(dataclasses.replace(x, **change) for x in recipe.products.forward)
    return recipe.with_products(forward=forward)


def again(first, axis, second):
    """A rounding of what the forward product has rounded along an axis."""
    return lambda x, other: second(first(x, axis), other)


up_448, up_e5m2, floor = mx(E4M3, 8, 448), mx(E5M2, 15, 57344), mx(E4M3, 8)
roomy, rotated = transformed(nvidia(headroom=17 / 16)), transformed(mx(E2M1, 2, 6), 32)
quest_32, quest_back = transformed(quest, 32), transformed(quest, 32, inverse=True)
REFERENCES = {  # roundings of activation and weight, gradient and weight, activation and gradient
    "fp8_rowwise": ((by_rows, by_rows), (by_rows, by_rows), (by_rows, by_rows)),
    "fp8_rowwise_gw_hp": ((by_rows, by_rows), (by_rows, whole), (exact, exact)),
    "fp8_blockwise": (
        (deepseek(1), deepseek(128)), (deepseek(1), deepseek(128)), (deepseek(1), deepseek(1)),
    ),
    "mxfp8": ((up_448, up_448), (up_448, up_448), (up_448, up_448)),
    "mxfp8_floor": ((floor, floor), (floor, floor), (floor, floor)),
    "mxfp8_hybrid": ((up_448, up_448), (up_e5m2, up_448), (up_448, up_e5m2)),
    "nvfp4": (
        (nvidia(), nvidia(16)), (nvidia(), nvidia(16)),
        (transformed(nvidia()), transformed(nvidia())),
    ),
    "fp4_all_the_way": ((nvidia(), nvidia()),) * 3,
    "tetrajet2": (
        (nvidia(), nvidia()), (roomy, again(nvidia(), 0, roomy)),
        (again(nvidia(), 1, roomy), roomy),
    ),
    "quartet": (
        (quest_32, quest_32), (rotated, again(quest_back, 0, rotated)),
        (again(quest_back, 1, rotated), rotated),
    ),
    "nvfp4 4/6": (
        (nvidia(1, True), nvidia(16, True)), (nvidia(), nvidia(16)),
        (transformed(nvidia()), transformed(nvidia())),
    ),
}  # fmt: skip


def layer(x, w, g):
    return jnp.sum((x @ w) * g)


def compare(got, want, ties=False):
    """Compares products; rotating FP4 numbers twice leaves many on ties, which go either way."""
    if ties:
        assert np.linalg.norm(got - want) < 0.04 * np.linalg.norm(want)
    else:
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6 * np.abs(got).max())


@pytest.mark.parametrize("name", nightly(REFERENCES, but=["fp8_blockwise", "nvfp4"]))
def test_each_product_has_the_operands_of_the_paper(name):
    recipe = RECIPES.CATALOGUE[name.split()[0]]
    recipe = nearest(recipe) if recipe.products.short_form is None else recipe
    recipe = with_fourth(recipe) if "4/6" in name else recipe
    forward, of_input, of_weight = REFERENCES[name]
    y = jax.jit(sw.autoscale(jnp.matmul, recipe))(X, W)
    dx, dw = jax.jit(sw.autoscale(jax.grad(layer, (0, 1)), recipe))(X, W, G)
    a, b = (q(z, i) for q, z, i in zip(forward, (X, W), (1, 0), strict=True))
    compare(y, a @ b)
    a, b = (q(z, 1) for q, z in zip(of_input, (G, W), strict=True))
    compare(dx, a @ b.T, ties=name == "quartet")
    a, b = (q(z, 0) for q, z in zip(of_weight, (X, G), strict=True))
    compare(dw, a.T @ b, ties=name == "quartet")


@pytest.mark.parametrize(
    ("fmt", "scaling"),
    [(RECIPES.FP8_BLOCKS, None), (MXFP4, None), (NVFP4, None), (NVFP4, sw.FourOverSix())],
    ids=["fp8_blocks", "mxfp4", "nvfp4", "four_over_six"],
)
def test_blocks_of_zeros_and_of_tiny_numbers_are_finite(fmt, scaling):
    rounded = jax.jit(lambda x: sw.quantize(x, fmt, scaling=scaling).value())
    x = np.zeros((3, 256), np.float32)
    np.testing.assert_array_equal(rounded(x), 0)
    x[1] = 1e-30
    np.testing.assert_allclose(rounded(x), x, rtol=0.3)


def test_the_scale_rounded_up_saturates_nothing():
    x = np.exp2(np.random.default_rng(0).uniform(-9, 9, (64, 32))).astype(np.float32)
    top = np.abs(x).max(1)
    floor, up = (np.abs(sw.quantize(x, "mxfp8_e4m3", scaling=s).value()).max(1)
                 for s in (sw.Mx(), sw.Mx("rceil")))  # fmt: skip
    assert np.mean(floor < top * 0.96) > 0.1  # between 464 and 512 times a power of two
    assert np.all(np.abs(up / top - 1) <= 1 / 16)


def test_four_over_six_has_at_most_the_error_of_six():
    x = np.asarray(normal(5, (64, 256)))
    six = sw.quantize(x, NVFP4).value()
    both = sw.quantize(x, NVFP4, scaling=sw.FourOverSix()).value()
    assert np.mean((both - x) ** 2) < 0.95 * np.mean((six - x) ** 2)
    np.testing.assert_allclose(both, nvidia(1, True)(x, 1), rtol=1e-6)
    tiny = sw.quantize(x * 1e-36, NVFP4, scaling=sw.FourOverSix()).value()
    assert np.mean((tiny / 1e-36 - x) ** 2) < 0.95 * np.mean((six - x) ** 2)


@pytest.mark.parametrize(("size", "length"), [(16, 37), *nightly([(16, 48), (4, 3), (64, 64)])])
def test_a_hadamard_transform_of_both_operands_leaves_their_product(size, length):
    rng = np.random.default_rng(size)
    a, b = (rng.integers(-8, 9, (5, length)).astype(np.float32) for _ in range(2))
    for key in (None, jax.random.key(3)):
        signs = hadamard_signs(size, key)
        x, y = (hadamard_transform(jnp.asarray(z), 1, signs) for z in (a, b))
        assert x.shape == (5, -(-length // size) * size)
        np.testing.assert_array_equal(jnp.matmul(x, y.T, precision="highest"), a @ b.T)
        np.testing.assert_array_equal(jnp.sum(x * x, 1), np.sum(a * a, 1))
        across = hadamard_transform(jnp.asarray(a.T), 0, signs)
        np.testing.assert_array_equal(across, x.T)


def only(operand):
    """A recipe that rounds the left operand of a forward product alone."""
    products = sw.Products((operand, None), (None, None), (None, None))
    return sw.Recipe(products, residuals=None)


@pytest.mark.parametrize("fmt", [NVFP4, "channel", *nightly(["e4m3fn", "bf16", MXFP4])])
def test_stochastic_rounding_is_unbiased_over_10000_keys(fmt):
    operand = sw.Operand(fmt, rounding="stochastic") if fmt != "channel" else sw.Operand(
        "e5m2", per="channel", rounding="stochastic"
    )  # fmt: skip
    if fmt == MXFP4:
        operand = dataclasses.replace(operand, scaling=sw.Mx("rceil"))
    x = np.array(normal(2, (4, 32)), np.float32)
    x[:, ::16] = 6.0  # an E4M3 scale holds it exactly, so that nothing saturates
    f = sw.autoscale(jnp.matmul, only(operand), keyed=True)
    keys = jax.random.split(jax.random.key(0), 10_000)
    drawn = np.asarray(jax.jit(jax.vmap(lambda k: f(k, x, jnp.eye(32))))(keys), np.float64)
    error = drawn.std(0) / math.sqrt(len(keys))
    assert np.mean(error > 0) > 0.7
    assert np.all(np.abs(drawn.mean(0) - x) <= 4 * error + 1e-7)


@pytest.mark.slow
def test_gradients_with_random_signs_are_unbiased():
    x, w, g = (np.asarray(normal(i, s)) for i, s in enumerate([(16, 8), (8, 8), (16, 8)]))
    f = sw.autoscale(jax.grad(layer, (0, 1)), "mxfp4", keyed=True)
    keys = jax.random.split(jax.random.key(1), 10_000)
    drawn = jax.jit(jax.vmap(lambda k: f(k, x, w, g)))(keys)
    for got, want in zip(drawn, (g @ w.T, x.T @ g), strict=True):
        error = np.std(got, 0) / math.sqrt(len(keys))
        assert np.all(np.abs(np.mean(got, 0) - want) <= 4 * error)


def test_keys_decide_what_is_drawn():
    x = jnp.asarray(X)
    plain, keyed = (sw.autoscale(jnp.matmul, only(sw.Operand("e4m3fn", rounding="stochastic")),
                                 keyed=k) for k in (False, True))  # fmt: skip
    same, other = plain(x, W), plain(x.at[0, 0].add(1e-3), W)
    np.testing.assert_array_equal(plain(x, W), same)
    assert np.any(other[1:] != same[1:])  # other bits, another key
    first, second = (keyed(jax.random.key(i), x, W) for i in range(2))
    np.testing.assert_array_equal(jax.jit(keyed)(jax.random.key(0), x, W), first)
    assert np.any(first != second)
    np.testing.assert_array_equal(plain(x, W), first)  # seed 0 where no key is given

    def twice(x, w):
        return lax.scan(lambda c, _: (c, x @ w), 0.0, None, length=2)[1]

    np.testing.assert_array_equal(*sw.autoscale(twice, only(sw.Operand("e4m3fn")))(x, W))


def scales(f, recipe, *arguments):
    rows = sw.explain(f, recipe)(*arguments).rows
    return [(r.direction, r.scale) for r in rows if r.kind == "contraction"]


def test_the_weight_is_the_argument_or_the_right_operand():
    part, tile = "one for 16 elements", "one for 16 x 16 elements"
    right, left = f"{part} x {tile}", f"{tile} x {part}"
    assert scales(jnp.matmul, "nvfp4", X, W) == [("forward", right)]
    assert scales(lambda w, x: w @ jnp.tanh(x), "nvfp4", W.T, X.T) == [("forward", left)]
    kernel = jnp.ones((3, 3, 8, 16))
    dimensions = ("NHWC", "HWIO", "NHWC")

    def convolved(x, k):
        y = lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=dimensions)
        return jnp.sum(y**2)

    found = scales(jax.grad(convolved, (0, 1)), "nvfp4", jnp.ones((8, 6, 6, 8)), kernel)
    random = f"{part}, stochastic"
    assert found[0] == ("forward", right)
    assert ("backward", f"{random} x {tile}") in found
    assert ("backward", f"{part}, hadamard 16 x {part}, hadamard 16, stochastic") in found

    def stacked(ws, x):
        return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0])

    found = scales(jax.grad(stacked), "nvfp4", jnp.ones((3, 32, 32)), jnp.ones((8, 32)))
    assert set(found) == {
        ("forward", right), ("backward", f"{random} x {tile}"),
        ("backward", f"{part}, hadamard 16, stochastic x {part}, hadamard 16"),
    }  # fmt: skip


def test_grouped_convolutions_are_not_transformed():
    x, kernel = normal(0, (8, 6, 8)), normal(1, (3, 4, 16))

    def f(x, k):
        y = lax.conv_general_dilated(
            x, k, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=2
        )
        return jnp.sum(y**2)

    wide = sw.Operand(NVFP4, hadamard=16)
    products = sw.Products((wide, wide), (wide, wide), (wide, wide))
    got = jax.jit(jax.grad(sw.autoscale(f, sw.Recipe(products)), (0, 1)))(x, kernel)
    for a, b in zip(got, jax.grad(f, (0, 1))(x, kernel), strict=True):
        assert np.linalg.norm(a - b) < 0.5 * np.linalg.norm(b)


test_bad_input_is_refused = refused(
    (lambda: sw.Operand("nvfp5"), "nvfp5"),
    (lambda: sw.Operand("e8m0"), "no zero"),
    (lambda: sw.Operand("e4m3fn", tile=16), "tile is for block formats"),
    (lambda: sw.Operand("nvfp4", tile=0), "tile is 0; expected a positive"),
    (lambda: sw.Operand("nvfp4", hadamard=12), "is 12; expected 0 or a power"),
    (lambda: sw.Operand("nvfp4", per="channel"), "has a scale for each block"),
    (lambda: sw.Operand("nvfp4", rounding="random"), "rounding is 'random'"),
    (lambda: sw.Operand("mxfp4", sw.Amax(power_of_two=False, headroom=2)),
     "mxfp4 has powers of two for scales"),
    (lambda: sw.Operand("mxfp4", sw.FourOverSix()), "is for blocks of e2m1fn"),
    (lambda: sw.quantize(X, "mxfp8_e4m3", scaling=sw.FourOverSix()), "for blocks"),
    (lambda: sw.Products((sw.Operand("nvfp4", hadamard=16), None), *[(None, None)] * 2),
     "both operands need the same hadamard and signs"),
    (lambda: only(sw.Operand("e4m3fn", sw.Delayed())), "needs a scale from before"),
    (lambda: RECIPES.nvfp4.with_operands(scaling=sw.Mx()), "operands of more than two kinds"),
    (lambda: sw.autoscale(layer, "fp8", keyed=True), "draws no random numbers"),
    (lambda: sw.autoscale(layer, "nvfp4", keyed=True)(X, W, G), TypeError,
     "the first argument is a JAX random key"),
)  # fmt: skip
