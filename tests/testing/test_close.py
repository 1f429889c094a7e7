"""assert_allclose: what passes, what fails, and what the message says."""

import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from cases import refused
from scalewise.testing import ULPS, assert_allclose, ulps_between

FORMATS = [f for f in sw.formats.CATALOGUE.values() if f.signed and f.zero and f.bits <= 16]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_one_rounding_passes_and_the_number_beside_it_fails(fmt):
    codes = np.arange(2 ** min(fmt.bits, 12)) * 2 ** max(fmt.bits - 12, 0)
    numbers = fmt.decode(codes)
    numbers = numbers[np.isfinite(numbers) & (np.abs(numbers) < float(fmt.max) / 2)]
    unit = np.array([sw.formats.ulp(fmt, x) for x in numbers])
    exact = numbers + np.random.default_rng(0).uniform(-0.5, 0.5, unit.shape) * unit
    rounded = fmt.decode(fmt.encode(exact))
    assert_allclose(rounded, exact, format=fmt)
    wrong = np.nonzero(np.abs(exact) > 0.6 * unit)[0][-1]
    other = rounded.copy()
    other[wrong] = sw.formats.next_up(fmt, rounded[wrong])
    with pytest.raises(AssertionError, match=rf"1 of {len(numbers)} results.*at \[{wrong}\]"):
        assert_allclose(other, exact, format=fmt, ulps=0.5)


def test_the_format_is_that_of_the_dtype_and_so_is_the_tolerance():
    exact = np.linspace(1, 2, 100)
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float32):
        assert_allclose(jnp.asarray(exact).astype(dtype), exact)
    with pytest.raises(AssertionError, match="ulps of bf16"):
        assert_allclose(jnp.asarray(exact).astype(jnp.float8_e4m3fn).astype(jnp.bfloat16), exact)
    assert ULPS["fp32"] == 4


def test_an_overflow_is_right_where_the_exact_number_rounds_to_it():
    assert_allclose(np.float16([np.inf, 65504]), [65521.0, 65519.0])
    with pytest.raises(AssertionError):
        assert_allclose(np.float16([np.inf]), [65480.0])
    with pytest.raises(AssertionError):
        assert_allclose(np.float16([65504]), [7e4])
    assert_allclose(np.float16([65504]), [7e4], saturate=True)
    assert_allclose([np.nan, 448.0], [500.0, 450.0], format="e4m3fn")  # without infinities


@pytest.mark.parametrize("got", [np.nan, np.inf, -3.0, 0.0])
def test_a_result_of_another_kind_fails(got):
    with pytest.raises(AssertionError, match="1 of 2"):
        assert_allclose(np.float16([1, got]), [1.0, 3.0])
    assert_allclose(np.float16([np.nan, -np.inf]), [np.nan, -np.inf])
    with pytest.raises(AssertionError):
        assert_allclose(np.float16([1.0]), [np.nan])


def test_subnormals_are_compared_in_their_own_spacing():
    assert_allclose(np.float16([0.0, 2.0**-24]), [2.0**-25.5, 2.0**-24.4])
    assert ulps_between([2.0**-24], [0.0], "fp16") == 1


def test_sums_that_cancel_are_compared_at_the_size_of_their_terms():
    a = np.float16([1, 2.0**-10, -1]) + np.float16(0)
    exact = np.float64(2.0**-11)  # a product that was rounded before it was added
    with pytest.raises(AssertionError):
        assert_allclose(a.sum(dtype=np.float16), exact)
    assert_allclose(a.sum(dtype=np.float16), exact, magnitude=2.0, ulps=1)


test_what_can_not_be_compared_is_an_error = refused(
    (lambda: assert_allclose(np.float16([1]), np.float16([1])), TypeError, "no wider than fp16"),
    (lambda: assert_allclose(np.float16([1, 2]), [1.0, 2.0, 3.0]), r"shape \(3,\)"),
    (lambda: assert_allclose(np.array([1j]), [1.0], format="fp16"), TypeError, "real numbers"),
    (lambda: assert_allclose(np.float16([1]), [1.0], ulps=-1.0), "at least 0"),
    (lambda: assert_allclose([1.0], [1.0], format="fp17"), "fp17"),
)  # fmt: skip


def test_stored_arrays_are_results_too():
    x = jnp.array([1.0, 3.3, -0.2])
    assert_allclose(sw.rounding.encode(x, "e2m3fn"), np.asarray(x, np.float64))
    assert_allclose(sw.quantize(x, "e4m3fn"), np.asarray(x, np.float64), format="e4m3fn", ulps=1)
