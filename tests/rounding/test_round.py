"""Rounding against ml_dtypes and against the exact NumPy codes, on hard inputs of every binade."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalewise import formats
from scalewise.formats import CATALOGUE, Format
from scalewise.rounding import cast, round_to

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in (cast|nextafter)")

MINE = Format("e6m9", exponent_bits=6, mantissa_bits=9)
LOW = Format("low", exponent_bits=7, mantissa_bits=6, bias=120)  # its subnormals lie in float32's
FORMATS = [f for f in CATALOGUE.values() if f.bits <= 32] + [MINE, LOW]
NATIVE = [formats.FP16, formats.BF16, formats.E4M3FN, formats.E5M2]


def same(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    np.testing.assert_array_equal(got, want)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[number]), np.signbit(want[number]))


def hard_inputs(fmt: Format) -> np.ndarray:
    """Numbers of the format, midpoints, their neighbours, and random bits of every binade."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, fmt.max_code + 1, 4000).astype(np.uint64)
    codes = np.concatenate([codes, np.arange(min(fmt.max_code, 300)), [fmt.max_code]])
    values = np.unique(fmt.decode(codes.astype(np.uint64)))
    step = np.concatenate([np.diff(values), [values[-1] / 2]])
    mids = values + np.minimum(step, np.spacing(values) * 2.0**52 * 2.0 ** -(fmt.mantissa_bits + 1))
    x = np.concatenate([values, mids, values + step / 2]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(0))])
    noise = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    special = np.array([0, np.inf, np.nan, 1e-45, 2.0**-126, 2.0**-127, 3.4e38], np.float32)
    x = np.concatenate([x, noise, special])
    return np.concatenate([x, -x])


def oracle(x: np.ndarray, fmt: Format, saturate=False) -> np.ndarray:
    """The exact route: NumPy codes in float64. NaN survives in formats without one."""
    want = fmt.decode(fmt.encode(x, saturate=saturate))
    return np.where(np.isnan(x), np.nan, want)


@pytest.mark.parametrize("saturate", [False, True, "finite"])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_round_to_is_the_exact_rounding(fmt, saturate):
    if fmt.mantissa_bits >= 23:
        x = jnp.asarray(hard_inputs(formats.FP16))
        return same(round_to(x, fmt), x)
    x = hard_inputs(fmt)
    got = jax.jit(lambda x: round_to(x, fmt, saturate=saturate))(x)
    same(got, oracle(x, fmt, saturate))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_the_same_from_float64_with_one_rounding(fmt):
    x = hard_inputs(fmt).astype(np.float64)
    near = x[np.isfinite(x)] * (1 + 2.0**-45)
    x = np.concatenate([x, near])
    with jax.enable_x64(True):
        got = jax.jit(lambda x: round_to(x, fmt))(x)
        assert got.dtype == jnp.float64
        same(got, oracle(x, fmt))


def test_published_double_roundings_round_once():
    """facts.md section 6."""
    with jax.enable_x64(True):
        assert float(round_to(jnp.float64(1.0625 + 2.0**-40), "e4m3fn")) == 1.125
        assert float(round_to(jnp.float64(1.0625 - 2.0**-40), "e4m3fn")) == 1.0
        assert float(round_to(jnp.float64(1 + 2.0**-8 + 2.0**-40), "bf16")) == 1.0078125


@pytest.mark.parametrize("fmt", NATIVE, ids=lambda f: f.name)
def test_cast_is_ml_dtypes_cast(fmt):
    x = hard_inputs(fmt)
    with np.errstate(over="ignore", invalid="ignore"):
        want = x.astype(fmt.dtype)
    got = jax.jit(lambda x: cast(x, fmt))(x)
    assert got.dtype == fmt.dtype
    same(np.asarray(got).astype(np.float64), want.astype(np.float64))
    same(round_to(x, fmt), want.astype(np.float64))


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.bits <= 16], ids=lambda f: f.name)
def test_cast_gives_the_code_of_the_rounded_value(fmt):
    x = hard_inputs(fmt)
    x = x[~np.isnan(x)]
    got = np.asarray(jax.jit(lambda x: cast(x, fmt))(x))
    codes = got if got.dtype.kind == "u" else got.view(fmt.code_dtype)
    same(fmt.decode(codes), oracle(x, fmt))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_narrow_inputs(dtype):
    x = jnp.asarray(hard_inputs(formats.FP16)[:2000]).astype(dtype)
    got = round_to(x, "e5m2")
    assert got.dtype == dtype
    same(got.astype(jnp.float32), round_to(x.astype(jnp.float32), "e5m2"))


@pytest.mark.parametrize("fmt", ["e4m3fn", "fp16", MINE])
def test_transformations(fmt):
    x = jnp.asarray(hard_inputs(formats.E5M2)[:512])
    want = round_to(x, fmt)
    same(jax.jit(lambda x: round_to(x, fmt))(x), want)
    same(jax.vmap(lambda x: round_to(x, fmt))(x), want)
    same(jax.lax.map(lambda x: round_to(x, fmt), x), want)


def test_gradient_is_straight_through_and_not_rounded():
    x = jnp.array([1.05, 1e3, -1e9])
    _, pull = jax.vjp(lambda x: round_to(x, "e4m3fn", saturate=True), x)
    assert pull(jnp.full(3, 1e6))[0].tolist() == [1e6] * 3
    _, pull = jax.vjp(lambda x: round_to(x, "e4m3fn", saturate=True, gradient="clipped"), x)
    assert pull(jnp.full(3, 1e6))[0].tolist() == [1e6, 0, 0]
    assert jax.jvp(lambda x: round_to(x, "e4m3fn"), (x,), (x,))[1].tolist() == x.tolist()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: round_to(jnp.ones(2), "fp8"),
            ValueError,
            r"no format is called 'fp8'\. There are",
        ),
        (lambda: round_to(jnp.arange(2), "fp16"), TypeError, "round_to takes real .* not int32"),
        (lambda: cast(jnp.ones(2, complex), "fp16"), TypeError, "cast takes real .* not complex64"),
        (lambda: round_to(jnp.ones(2), "fp16", rounding="up"), ValueError, "rounding is 'up'; acc"),
        (lambda: cast(jnp.ones(2), "fp16", saturate=3), ValueError, "saturate is 3; accepted"),
        (lambda: round_to(jnp.ones(2), "fp16", gradient="x"), ValueError, "gradient is 'x'; acc"),
        (
            lambda: round_to(jnp.ones(2), Format("wide", 11, 4)),
            ValueError,
            "wide has numbers that float32 doesn't; pass x as float64",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
