"""Numbers that other libraries have computed wrong, as their issues report."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from arrays import normal
from cases import nightly
from scalewise.formats import E2M1FN, E4M3FN, BlockFormat

KEY = jax.random.key(0)


@pytest.mark.parametrize("sign", [-1, 1])
def test_float64_is_rounded_once_to_e4m3(sign):
    """ml_dtypes #401: through float32, 431.99999999999994 becomes the tie 432, and that 448."""
    x = np.float64(sign * 431.99999999999994)
    assert np.float32(x) == sign * 432
    assert float(sw.cast(x, "e4m3fn")) == float(sw.round_to(x, "e4m3fn")) == sign * 416
    np.testing.assert_array_equal(
        sw.quantize(np.array([x, 448]), "e4m3fn").value(), [sign * 416, 448]
    )
    with jax.enable_x64(True):
        assert float(jax.jit(lambda y: sw.round_to(y, "e4m3fn"))(x)) == sign * 416


@pytest.mark.parametrize("tensor_scale", [None, sw.format("fp32")], ids=["without", "with"])
def test_blocks_of_small_numbers_are_not_divided_by_zero(tensor_scale):
    """E4M3's smallest number is 2^-9: without a tensor scale 6 x 2^-10 = 0.0059 has the scale 0."""
    fmt = BlockFormat("own", E2M1FN, scale=E4M3FN, size=16, tensor_scale=tensor_scale)
    x = np.asarray(normal(0, (4, 64))) * np.float32(1e-3)
    rounded = np.asarray(jax.jit(lambda x: sw.quantize(x, fmt).value())(x))
    assert np.all(np.isfinite(rounded))
    error = np.linalg.norm(rounded - x) / np.linalg.norm(x)
    assert error < 0.15 if tensor_scale else error < 0.5
    np.testing.assert_array_equal(sw.quantize(x * 0, fmt).value(), 0)


@pytest.mark.parametrize(
    "fmt",
    ["nvfp4", "e5m2", *nightly(["fp16", "bf16", "e4m3fn", "e2m1fn", "mxfp4"])],
)
def test_stochastic_rounding_is_not_accepted_and_ignored(fmt):
    """A quarter of the way between two numbers is rounded up by a quarter of the draws."""
    element = sw.format("e2m1fn" if fmt in ("nvfp4", "mxfp4") else fmt)
    low = 1.0
    x = np.full((64, 64), low + 0.25 * float(element.eps), np.float32)
    x[:, ::16] = 6.0 if element.name == "e2m1fn" else 1.0
    scaling = sw.Mx("rceil") if fmt == "mxfp4" else None

    def rounding(**options):
        if fmt not in ("nvfp4", "mxfp4"):
            return sw.round_to(x, fmt, **options)
        return sw.quantize(x, fmt, scaling=scaling, **options).value()

    plain, rounded = rounding(), rounding(rounding="stochastic", key=KEY)
    drawn = np.delete(np.asarray(rounded), np.s_[::16], 1)
    assert np.all(np.delete(np.asarray(plain), np.s_[::16], 1) == low)
    assert set(np.unique(drawn)) == {low, low + float(element.eps)}
    assert np.mean(drawn > low) == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / drawn.size) ** 0.5)


@pytest.mark.parametrize("scaling", [None, *nightly([sw.FourOverSix()])], ids=repr)
def test_stochastic_nvfp4_is_not_all_zeros(scaling):
    """TransformerEngine #3281: gradients of zeros on GPUs without an instruction for it."""
    x = np.asarray(normal(3, (4, 128)))

    def rounded(key):
        return sw.quantize(x, "nvfp4", scaling=scaling, rounding="stochastic", key=key).value()

    drawn = np.asarray(jax.jit(jax.vmap(rounded))(jax.random.split(KEY, 256)))
    errors = np.linalg.norm(drawn - x, axis=(1, 2)) / np.linalg.norm(x)
    assert np.all(errors < 0.3)
    assert np.linalg.norm(drawn.mean(0) - x) < 0.05 * np.linalg.norm(x)


@pytest.mark.parametrize("name", ["nvfp4", *nightly(["fp4_all_the_way", "quartet2", "tetrajet2"])])
def test_stochastic_gradients_are_not_all_zeros(name):
    x, w = normal(0, (64, 32)), normal(1, (32, 48)) / 6
    f = lambda w: jnp.sum(jnp.tanh(x @ w) ** 2)  # noqa: E731
    got, want = jax.jit(sw.autoscale(jax.grad(f), name))(w), jax.grad(f)(w)
    assert np.sum(got * want) / np.linalg.norm(got) / np.linalg.norm(want) > 0.8


def test_blocks_that_do_not_divide_an_axis_end_in_a_shorter_one():
    x = normal(4, (3, 37))
    whole = sw.quantize(jnp.pad(x, ((0, 0), (0, 11))), "nvfp4").value()[:, :37]
    np.testing.assert_array_equal(sw.quantize(x, "nvfp4").value(), whole)


def test_a_block_format_without_a_format_for_its_scales_is_refused():
    with pytest.raises(TypeError, match=r"BlockFormat: scale is None; expected a Format"):
        BlockFormat("own", E2M1FN, scale=None)  # pyright: ignore
