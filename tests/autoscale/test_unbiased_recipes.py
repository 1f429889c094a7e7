"""MS-EDEN, unbiased stochastic rounding, and backward products of the forward product's numbers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import scalewise as sw
from arrays import normal
from cases import nightly, refused
from scalewise.autoscaling._keys import hadamard_signs, hadamard_transform
from scalewise.formats import NVFP4
from transcribed import E2M1, nvidia, quest, transformed

DRAWS = 10_000
ROOMY = sw.Amax(power_of_two=False, headroom=17 / 16)


def rotated(key, x, scaling, rounding="nearest_even"):
    """x after a Hadamard transform with random signs, a rounding to NVFP4 and the way back."""
    signs, rest = jax.random.split(key)
    signs = hadamard_signs(128, signs)
    y = hadamard_transform(x, 1, signs)
    z = sw.quantize(y, NVFP4, scaling=scaling, rounding=rounding, key=rest).value()
    return hadamard_transform(z, 1, signs, inverse=True)


def draws(x, *options):
    """Mean, standard error of the mean, and mean squared error over 10,000 draws."""

    @jax.jit
    def statistics(keys):
        found = jax.lax.map(lambda k: rotated(k, x, *options), keys, batch_size=500)
        return found.mean(0), found.std(0), jnp.mean(jnp.square(found - x[None]))

    mean, deviation, error = statistics(jax.random.split(jax.random.key(0), DRAWS))
    return np.asarray(mean), np.asarray(deviation) / math.sqrt(DRAWS), float(error)


@pytest.fixture(scope="module")
def ms_eden():
    x = normal(2, (1, 128))
    return x, *draws(x, sw.MsEden())


@pytest.mark.slow
def test_ms_eden_is_unbiased_over_10000_draws(ms_eden):
    x, mean, error, _ = ms_eden
    assert np.all(np.abs(mean - x) <= 4 * error)


@pytest.mark.slow
def test_ms_eden_has_less_than_half_the_squared_error_of_stochastic_rounding(ms_eden):
    x, *_, squared = ms_eden
    mean, error, stochastic = draws(x, ROOMY, "stochastic")
    assert np.all(np.abs(mean - x) <= 4 * error)
    assert squared < 0.5 * stochastic


@pytest.mark.slow
def test_the_mean_of_ms_eden_is_within_2_percent_of_an_outlier():
    x = normal(2, (1, 128)).at[:, 5].mul(100)
    mean, *_ = draws(x, sw.MsEden())
    assert np.max(np.abs(mean - x)) < 0.02 * np.max(np.abs(x))


def test_ms_eden_rounds_to_nearest_and_scales_to_a_neighbour_of_the_correction():
    x = np.asarray(normal(3, (16, 128)), np.float32)
    stored = jax.vmap(lambda k: sw.quantize(x, NVFP4, scaling=sw.MsEden(), key=k))(
        jax.random.split(jax.random.key(1), 400)
    )
    blocks = x.reshape(16, 8, 16).astype(np.float64)
    override = 17 / 16 * 0.93
    amax = np.abs(blocks).max(-1) * override / 6
    tensor = amax.max() / 256
    first = (amax / tensor).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    y = blocks / (first * tensor)[..., None]
    q = np.clip(y, -6, 6).astype(np.float32).astype(E2M1).astype(np.float64)
    want = first * np.sum(y * y, -1) / np.sum(y * q, -1)
    scales = np.asarray(stored.scale.data, np.float64)
    np.testing.assert_allclose(stored.scale.scale, tensor, rtol=1e-6)
    np.testing.assert_array_equal(
        np.asarray(stored.data.astype(jnp.float32))[0].reshape(q.shape), q
    )
    unit = 2.0 ** (np.floor(np.log2(want)) - 3)
    assert np.all(np.abs(scales - want) < unit * 1.0001)
    spread = np.maximum(scales.std(0), unit / 20) / math.sqrt(400)
    assert np.all(np.abs(scales.mean(0) - want) < 4.5 * spread)
    assert np.mean(want / first) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(("exponent", "error"), [("nearest", 0.0135), ("floor", 0.0226)])
def test_quests_error_of_normal_numbers(exponent, error):
    """The authors' kernels round scales down, with the larger error."""
    x = normal(5, (4096, 32)) * 2.0 ** np.linspace(0, 1, 4096, endpoint=False)[:, None]
    x = x.astype(np.float32)
    got = np.asarray(sw.quantize(x, "mxfp4", scaling=sw.Quest(exponent=exponent)).value())
    whole = np.round if exponent == "nearest" else np.floor
    np.testing.assert_array_equal(got, quest(x, 1, whole))
    ratios = np.mean((got - x) ** 2, 1) / np.mean(x**2, 1)
    assert np.mean(ratios) == pytest.approx(error, rel=0.03)


@pytest.mark.slow
def test_quest_keeps_blocks_whose_mean_exceeds_their_deviation():
    """The transform of a row that is zero but for its first element has equal numbers."""
    offsets = np.float32([[0], [1], [3], [-100], [1e-30]])
    x = np.ones((5, 32), np.float32) * 5 + offsets * np.asarray(normal(3, (5, 32)))
    x = np.concatenate([x, x[:1] * 1e20, np.abs(normal(4, (3, 32))) + 1])
    got = np.asarray(sw.quantize(x, "mxfp4", scaling=sw.Quest()).value(), np.float64)
    ratios = np.mean((got - x) ** 2, 1) / np.mean(np.float64(x) ** 2, 1)
    assert np.all(ratios < 0.06)
    one_hot = np.zeros((3, 64), np.float32)
    one_hot[[0, 1, 2], [0, 32, 5]] = 3
    product = sw.autoscale(lambda x: x @ np.eye(64, dtype=np.float32), "quartet")(one_hot)
    np.testing.assert_allclose(product, one_hot, atol=0.6)


@pytest.mark.parametrize(
    ("fmt", "scaling"),
    [
        ("mxfp4", sw.Quest()),
        *nightly([("nvfp4", sw.MsEden()), ("nvfp4", sw.FourOverSix()), ("nvfp4", ROOMY)]),
    ],
    ids=repr,
)
def test_float64_is_rounded_to_the_same_blocks(fmt, scaling):
    x = np.asarray(normal(4, (4, 64)))
    key = jax.random.key(2) if scaling.draws else None
    want = np.asarray(sw.quantize(x, fmt, scaling=scaling, key=key).value())
    with jax.enable_x64(True):
        wide = jnp.asarray(x, jnp.float64)
        got = jax.jit(lambda x: sw.quantize(x, fmt, scaling=scaling, key=key).value())(wide)
        np.testing.assert_allclose(got, want, rtol=1e-6)


def layer(x, w, g):
    return jnp.sum((x @ w) * g)


X, W, G = (np.asarray(normal(i, s)) for i, s in enumerate([(64, 128), (128, 64), (64, 64)]))
# whether the mean of a recipe's gradients is the gradient for the forward product's numbers
UNBIASED = {"tetrajet2": True, "quartet2": True, "nvfp4": False, "mxfp4_forward": False}


@pytest.mark.parametrize("name", nightly(UNBIASED))
def test_the_error_of_averaged_gradients_falls_for_unbiased_recipes_alone(name):
    recipe = dataclasses.replace(sw.recipes.recipe(name), residuals=None)
    rounded = (X, W)
    if UNBIASED[name]:
        fourth = name == "quartet2"
        rounded = [nvidia(1, fourth)(z, a) for z, a in ((X, 1), (W, 0))]
    want = [G @ rounded[1].T, rounded[0].T @ G]
    keyed = recipe.products.is_random
    f = sw.autoscale(jax.grad(layer, (0, 1)), recipe, keyed=keyed)
    count = 64
    keys = jax.random.split(jax.random.key(0), count)
    every = jax.jit(jax.vmap(lambda k: f(*([k] if keyed else []), X, W, G)))(keys)
    for found, exact in zip(every, want, strict=True):
        found = np.asarray(found, np.float64)
        one, mean = (np.sqrt(np.mean((y - exact) ** 2)) for y in (found, found.mean(0)))
        falls = mean < 1.5 * one / math.sqrt(count)
        assert falls == UNBIASED[name], (name, one, mean)


def test_a_stored_activation_is_loaded_after_scales_of_two_levels():
    """Of ``min_size`` elements the activation waits in FP16 for the weight's gradient."""
    w, x = normal(0, (128, 128)) / 11, normal(1, (128, 128))

    def loss(w):
        return jnp.mean(jnp.square(jnp.tanh(x @ w) @ w))

    found = jax.jit(sw.autoscale(jax.grad(loss), "fp4_all_the_way"))(w)
    exact = jax.grad(loss)(w)
    assert np.linalg.norm(found - exact) < 0.4 * np.linalg.norm(exact)


def override(recipe, how):
    """TransformerEngine's ``backward_override``: high_precision or dequantized."""
    return recipe.with_products(
        input_gradient=(None, None),
        weight_gradient=(None, None),
        backward_from="forward" if how == "dequantized" else "original",
    )


@pytest.mark.parametrize("how", ["dequantized", *nightly(["high_precision"])])
@pytest.mark.parametrize("name", ["nvfp4", *nightly(["quartet"])])
def test_backward_products_in_high_precision(name, how):
    recipe = sw.recipes.recipe(name)
    recipe = dataclasses.replace(override(recipe, how), residuals=None)
    dx, dw = sw.autoscale(jax.grad(layer, (0, 1)), recipe)(X, W, G)
    x, w = X, W
    if how == "dequantized":
        back = transformed(quest, 32, inverse=True)
        x, w = (back(X, 1), back(W, 0)) if name == "quartet" else (nvidia()(X, 1), nvidia(16)(W, 0))
    np.testing.assert_allclose(dx, G @ w.T, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dw, x.T @ G, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_loops_round_from_the_forward_products_numbers_too():
    """Stacked layers in a scan have the gradients of the same layers written out."""
    recipe, wide = (override(sw.recipes.nvfp4, h) for h in ("dequantized", "high_precision"))
    ws = jnp.stack([normal(i, (32, 32)) / 6 for i in range(3)])
    x = normal(7, (16, 32))

    def looped(ws):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)

    def written(ws):
        y = x
        for i in range(3):
            y = jnp.tanh(y @ ws[i])
        return jnp.sum(y**2)

    a, b = (jax.jit(sw.autoscale(jax.grad(f), recipe))(ws) for f in (looped, written))
    c = jax.jit(sw.autoscale(jax.grad(looped), wide))(ws)
    same = np.linalg.norm(a - b) / np.linalg.norm(b)
    other = np.linalg.norm(a - c) / np.linalg.norm(c)
    assert same < 0.02 < other


WITH_PRODUCTS = [
    name
    for name, r in sw.recipes.CATALOGUE.items()
    if isinstance(r, sw.Recipe) and r.products.short_form is None
]


@pytest.mark.filterwarnings("ignore:autoscale.*no matrix units")
@pytest.mark.parametrize(
    ("name", "device"),
    nightly([(n, d) for n in WITH_PRODUCTS for d in ("b200", "v6e")], but=[("nvfp4", "b200")]),
)
def test_recipes_of_products_lower_for_gpus_and_tpus(name, device):
    recipe = dataclasses.replace(sw.recipes.recipe(name), device=device, narrow="always")
    platform = sw.devices.DEVICES[device].platform
    f = jax.jit(sw.autoscale(jax.grad(layer, (0, 1)), recipe))
    lowered = f.trace(X, W, G).lower(lowering_platforms=(platform,)).as_text()
    # the products of FP4 blocks go to the units that a B200 has, all others to 16 bits
    native = device == "b200" and recipe.products.formats()[0][0] == NVFP4
    assert ("block_scaled_dot" in lowered) == native


test_bad_input_is_refused = refused(
    (lambda: sw.Operand("mxfp4", sw.MsEden()), "MsEden is for blocks of e2m1fn"),
    (lambda: sw.Operand("nvfp4", sw.MsEden(), tile=16), "leave tile and rounding out"),
    (lambda: sw.Operand("nvfp4", sw.MsEden(), rounding="stochastic"), "leave tile and"),
    (lambda: sw.Operand("nvfp4", sw.Quest()), "Quest is for blocks with powers of two"),
    (lambda: sw.MsEden(clip=0), "clip is 0; expected a number in"),
    (lambda: sw.Quest(0), "sigmas is 0; expected a positive"),
    (lambda: sw.Amax(headroom=-1), "headroom is -1; expected a positive"),
    (lambda: sw.quantize(X, "nvfp4", scaling=sw.MsEden()), "expected key, a JAX random key"),
    (
        lambda: dataclasses.replace(
            sw.recipes.mxfp4.products,
            forward=(sw.Operand("nvfp4", sw.MsEden()), None),
            backward_from="forward",
        ),
        "the forward product's operands are random",
    ),
)  # fmt: skip
