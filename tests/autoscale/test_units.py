"""Recipes whose products a device's matrix units add, on any platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import scalewise as sw
from cases import nightly
from scalewise.devices import MatrixUnits, matrix_unit

K = 512
X = jax.random.uniform(jax.random.key(0), (3, K))
W = jax.random.uniform(jax.random.key(1), (K, 5))


def product(x, w):
    return x @ w


def rounded(x, fmt):
    """Returns numbers of a format and their scale, a power of two, found independently."""
    largest = float(sw.format(fmt).max)
    scale = 2.0 ** np.ceil(np.log2(float(jnp.max(jnp.abs(x))) / largest))
    return sw.round_to(x / scale, fmt), scale


PROMOTED = MatrixUnits("h100", promote=128)


@pytest.mark.parametrize("units", [PROMOTED, *nightly(["h100", "b200", "cdna3"])], ids=str)
def test_products_of_fp8_are_added_as_the_device_adds_them(units):
    found = sw.autoscale(product, "fp8", emulate=units)(X, W)
    device = units if isinstance(units, MatrixUnits) else MatrixUnits(units)
    (x, s), (w, t) = rounded(X, "e4m3fn"), rounded(W, "e4m3fn")
    unit = device.unit("e4m3fn", "e4m3fn") or device.unit("fp16", "fp16")  # no E4M3FN on CDNA 3
    np.testing.assert_array_equal(found, sw.ops.matmul(x, w, accumulator=unit) * (s * t))


def test_hoppers_fp8_units_lose_digits_that_promotion_keeps():
    plain = sw.autoscale(product, "fp8")(X, W)

    def error(units):
        found = sw.autoscale(product, "fp8", emulate=units)(X, W)
        return float(jnp.max(jnp.abs(found / plain - 1)))

    fast, promoted, newer = map(error, ("h100", PROMOTED, "b200"))
    assert fast > 5 * promoted > 50 * newer


@pytest.mark.parametrize("recipe", ["nvfp4", *nightly(["mxfp8"])])
def test_blocks_with_scales_go_to_units_for_them(recipe):
    found = jax.jit(sw.autoscale(product, recipe, emulate="b200"))(X, W)
    operand = sw.recipes.CATALOGUE[recipe].products
    plain = jax.jit(sw.autoscale(product, recipe))(X, W)
    np.testing.assert_allclose(found, plain, rtol=1e-5)
    assert operand is None or not np.array_equal(found, plain)


@pytest.mark.parametrize("recipe", ["mxfp8", *nightly(["nvfp4"])])
def test_gradients_of_blocks_have_their_own_shapes(recipe):
    """JAX exchanges the operands of a weight's gradient, whose sides differ here."""
    x = jnp.tile(X, (16, 1))
    gradient = jax.grad(lambda w: jnp.sum(jnp.square(product(x, w))))
    found = jax.jit(sw.autoscale(gradient, recipe, emulate="b200"))(W)
    plain = jax.jit(sw.autoscale(gradient, recipe))(
        W
    )  # other draws, where the forward pass differs
    assert found.shape == W.shape
    assert np.linalg.norm(found - plain) < 0.1 * np.linalg.norm(plain)


def test_a_microscaled_product_is_that_of_its_elements_and_scales():
    up = sw.Mx(exponent="rceil")  # as the recipe has it
    q = [sw.quantize(z, "mxfp8_e4m3", scaling=up, axis=a) for z, a in ((X, 1), (W, 0))]
    x, w = (z.data.astype(jnp.float32) for z in q)
    scales = tuple(z.scale.astype(jnp.float32) for z in q)
    unit = matrix_unit("b200", "mxfp8_e4m3")
    expected = sw.ops.matmul(x, w, accumulator=unit, scales=scales)
    found = sw.autoscale(product, "mxfp8", emulate="b200")(X, W)
    np.testing.assert_array_equal(found, expected)


def loss(w, x):
    def layer(y, _):
        return jnp.tanh(y @ w[:, :3] @ jnp.ones((3, K)) / K), None

    return jnp.mean(lax.scan(layer, x, None, length=2)[0] ** 2)


@pytest.mark.slow
def test_steps_run_forward_backward_in_loops_jitted_and_mapped():
    step = sw.autoscale(jax.value_and_grad(loss), "fp8", emulate="h100")
    eager, jitted = step(W, X), jax.jit(step)(W, X)
    jax.tree.map(np.testing.assert_array_equal, eager, jitted)
    mapped = jax.vmap(step, (None, 0))(W, X[:, None])
    assert mapped[1].shape == (3, *W.shape)
    assert np.isfinite(mapped[1]).all()


@pytest.mark.slow
def test_convolutions_are_added_by_units_too():
    x, w = X.reshape(3, 8, 8, 8), jax.random.uniform(jax.random.key(2), (3, 3, 8, 4))

    def convolve(x, w):
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    plain = sw.autoscale(convolve, "fp8")(x, w)
    found = sw.autoscale(convolve, "fp8", emulate="h100")(x, w)
    np.testing.assert_allclose(found, plain, rtol=0.03)
    assert not np.array_equal(found, plain)


@pytest.mark.parametrize(("units", "recipe", "message"), [
    ("v5e", "fp8", "nobody has published"), ("h10", "fp8", "did you mean 'h100'"),
    ("h100", "fp16_every_op", "emulate is for recipes of products"),
])  # fmt: skip
def test_a_wrong_device_is_refused(units, recipe, message):
    with pytest.raises(ValueError, match=message):
        sw.autoscale(product, recipe, emulate=units)
    with pytest.raises(ValueError, match="promote is 0"):
        MatrixUnits("h100", promote=0)
