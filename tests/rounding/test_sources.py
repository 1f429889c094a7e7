"""Rounding from half precision, float8 and float64: values, result dtypes and derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from proofs.halves import check

from scalewise import cast, round_to
from scalewise.formats import BF16, CATALOGUE, DLFLOAT16, E4M3FN, E8M0, FP16, Format

GAPPED = Format("gapped", 8, 2, subnormals=False)  # its smallest number is subnormal in float32
WIDE = Format("wide", 11, 4)  # beyond float32


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize(
    ("fmt", "rounding", "saturate"),
    [
        (FP16, "nearest_even", True),
        (BF16, "nearest_even", False),
        (DLFLOAT16, "toward_negative", False),
        (E8M0, "up", True),
        (E4M3FN, "to_odd", "finite"),
        (GAPPED, "nearest_even", False),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_every_half_precision_value_rounds_as_in_encode(fmt, rounding, saturate, dtype):
    """Checks a sample of the formats, roundings and saturations that `make prove` compares."""
    compared, wrong = check(fmt, rounding, saturate, dtype)
    assert not wrong
    assert compared == 2 * (1 << 16)


def test_results_beyond_the_input_dtype():
    assert float(cast(jnp.bfloat16(1e6), "fp16", saturate=True)) == 65504
    assert float(round_to(jnp.bfloat16(1e6), "fp16", saturate=True)) == 65504
    assert DLFLOAT16.decode(np.asarray(cast(jnp.float16(65504), DLFLOAT16))) == 65536
    assert float(cast(jnp.float16(0), "e8m0", rounding="up", saturate=True)) == 2.0**-127


@pytest.mark.parametrize(
    ("dtype", "fmt", "saturate", "want"),
    [
        (jnp.float16, "e5m2", False, jnp.float16),
        (jnp.bfloat16, "e4m3fn", True, jnp.bfloat16),
        (jnp.float16, "fp32", False, jnp.float16),
        (jnp.float16, "fp32", True, jnp.float32),  # infinity becomes float32's largest number
        (jnp.bfloat16, "fp16", False, jnp.float32),
        (jnp.float16, "bf16", False, jnp.float32),
        (jnp.float16, "e8m0", False, jnp.float32),
        (jnp.float8_e4m3fn, "e4m3fn", False, jnp.float8_e4m3fn),
        (jnp.float8_e4m3fn, "e2m1fn", False, jnp.float8_e4m3fn),
        (jnp.float8_e4m3fn, "e5m2", False, jnp.float32),
        (jnp.float8_e5m2, "e5m2fnuz", False, jnp.float8_e5m2),  # it represents every result
        (jnp.float32, "fp64", False, jnp.float32),
    ],
)
def test_dtype_of_the_result(dtype, fmt, saturate, want):
    def rounded(x):
        return round_to(x, fmt, saturate=saturate)

    x = jax.ShapeDtypeStruct((2,), dtype)
    assert jax.eval_shape(rounded, x).dtype == want
    gradient = jax.grad(lambda x: rounded(x).astype(jnp.float32).sum())
    assert jax.eval_shape(gradient, x).dtype == dtype


@pytest.mark.parametrize("name", ["e5m2fnuz", "e8m0"])
def test_every_float8_value_rounds_as_in_encode(name):
    values = np.arange(256, dtype=np.uint8).view(CATALOGUE[name].dtype)
    for fmt in (E4M3FN, E8M0, CATALOGUE["e2m1fn"]):
        got = np.asarray(cast(jnp.asarray(values), fmt, saturate=True)).view(np.uint8)
        want = fmt.encode(values, saturate=True)
        nan = np.isnan(fmt.decode(got)) & np.isnan(fmt.decode(want))
        np.testing.assert_array_equal(np.where(nan, 0, got), np.where(nan, 0, want))


def test_normal_numbers_that_are_subnormal_in_float32_are_kept():
    for fmt in (GAPPED, Format("flat", 8, 0, bias=130, subnormals=False, nan="all_ones")):
        values = fmt.values()
        values = values[np.isfinite(values)].astype(np.float32)
        got = np.asarray(round_to(jnp.asarray(values), fmt))
        np.testing.assert_array_equal(got.view(np.uint32), values.view(np.uint32))
        codes = np.asarray(cast(jnp.asarray(values), fmt))
        np.testing.assert_array_equal(codes, fmt.encode(values))


def test_format_wider_than_float32():
    x = np.array([1e300, -1e-310, 3.3, np.inf, -0.0, 5e-320, np.nan])
    with jax.enable_x64(True):
        np.testing.assert_array_equal(np.asarray(cast(x, WIDE)), WIDE.encode(x))
        assert round_to(jnp.float32(1.03), WIDE).dtype == jnp.float64
        tiny = cast(jnp.float32(1e-45), "fp64")  # a subnormal
        assert tiny.dtype == jnp.float64
        assert float(tiny) == 2.0**-149
    with pytest.raises(ValueError, match="all numbers of wide; enable JAX's x64"):
        round_to(x, WIDE)
    with pytest.raises(ValueError, match="numbers of fp64; pass x as float64"):
        round_to(jnp.float32(1), "fp64", saturate=True)


def test_cotangent_of_a_float8_cast_is_not_rounded():
    weights = jnp.array([0.1, 1e6, -3e-30])
    x = jnp.array([0.3, 1.1, 2.0])

    def f(x, name="e4m3fn"):
        return jnp.sum(cast(x, name).astype(jnp.float32) * weights)

    for name in ("e4m3fn", "e8m0"):
        np.testing.assert_array_equal(jax.jit(jax.grad(f), static_argnums=1)(x, name), weights)
    np.testing.assert_array_equal(jax.grad(jax.checkpoint(f))(x), weights)
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.grad(f)))(x[None])[0], weights)
    assert jax.jvp(f, (x,), (jnp.array([0.0, 0.0, 1.0]),))[1] == weights[2]


def test_cotangent_passes_through_products_and_scans():
    x = jnp.array([[0.3, 1.1], [2.0, 0.7]])
    ones = jnp.ones((2, 1), jnp.float8_e4m3fn)

    def product(x):
        y = jnp.matmul(cast(x, "e4m3fn").T, ones, preferred_element_type=jnp.float32)
        return jnp.sum(y * 0.1)

    def scanned(x):
        def step(total, row):
            return total + cast(row, "e4m3fn").astype(jnp.float32) * 0.1, None

        return jnp.sum(jax.lax.scan(step, jnp.zeros(2), x)[0])

    for f in (product, scanned):
        np.testing.assert_array_equal(jax.jit(jax.grad(f))(x), jnp.full((2, 2), 0.1))


def test_vmap_of_batched_and_unbatched_casts():
    x, y = jnp.ones((3, 2)), jnp.full(2, 0.1)
    got = jax.vmap(
        lambda x, y: cast(x, "e4m3fn").astype(jnp.float32) + cast(y, "e5m2").astype(jnp.float32),
        in_axes=(0, None),
    )(x, y)
    np.testing.assert_array_equal(got, jnp.full((3, 2), 1.09375))
