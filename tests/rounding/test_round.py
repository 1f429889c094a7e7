"""round_to and cast compared with ml_dtypes and exact NumPy codes on hard inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import nightly, refused
from scalewise import formats
from scalewise.formats import CATALOGUE, SATURATE, Format
from scalewise.rounding import cast, round_to

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in (cast|nextafter)")

MINE = Format("e6m9", exponent_bits=6, mantissa_bits=9)
LOW = Format(
    "low", exponent_bits=7, mantissa_bits=6, bias=120
)  # its subnormals are subnormal in float32
FORMATS = [f for f in CATALOGUE.values() if f.bits <= 32] + [MINE, LOW]
NATIVE = [formats.FP16, formats.BF16, formats.E4M3FN, formats.E5M2]


def same(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    np.testing.assert_array_equal(got, want)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[number]), np.signbit(want[number]))


def hard_inputs(fmt: Format) -> np.ndarray:
    """Returns numbers of the format, midpoints, neighbours of both, and random bits."""
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
    """Returns ``x`` rounded by NumPy in float64; NaN stays NaN even in formats without NaN."""
    want = fmt.decode(fmt.encode(x, saturate=saturate))
    return np.where(np.isnan(x), np.nan, want)


# each kind: with and without infinities and NaN, of whole bytes and less, subnormal in float32
KINDS = ["fp16", "bf16", "e4m3fn", "e5m2", "e8m0", "e2m1fn", "dlfloat16", "low"]


@pytest.mark.parametrize("saturate", SATURATE)
@pytest.mark.parametrize("fmt", nightly(FORMATS, but=KINDS))
def test_round_to_matches_the_exact_rounding(fmt, saturate):
    if fmt.mantissa_bits >= 23:
        x = jnp.asarray(hard_inputs(formats.FP16))
        return same(round_to(x, fmt), x)
    x = hard_inputs(fmt)
    got = jax.jit(lambda x: round_to(x, fmt, saturate=saturate))(x)
    same(got, oracle(x, fmt, saturate))


@pytest.mark.parametrize("fmt", nightly(FORMATS, but=["e4m3fn", "bf16"]))
def test_round_to_rounds_float64_once(fmt):
    x = hard_inputs(fmt).astype(np.float64)
    near = x[np.isfinite(x)] * (1 + 2.0**-45)
    x = np.concatenate([x, near])
    with jax.enable_x64(True):
        got = jax.jit(lambda x: round_to(x, fmt))(x)
        assert got.dtype == jnp.float64
        same(got, oracle(x, fmt))
        stored = cast(x, fmt)
    # NumPy's float64 is rounded in the same way while x64 is off
    outside = round_to(x, fmt)
    assert outside.dtype == jnp.float32
    if fmt.name != "fp64":  # its numbers don't fit into float32
        same(outside, got)
        same(cast(x, fmt), stored)


def test_subnormals_false_flushes_to_zero():
    x = jnp.array([2.0**-14, 2.0**-15, -(2.0**-24), 1.0])
    got = round_to(x, "fp16", subnormals=False)
    same(got, [2.0**-14, 0, -0.0, 1])
    assert cast(x, "fp16", subnormals=False).tolist() == [2.0**-14, 0, 0, 1]


@pytest.mark.parametrize("fmt", NATIVE, ids=lambda f: f.name)
def test_cast_matches_ml_dtypes(fmt):
    x = hard_inputs(fmt)
    with np.errstate(over="ignore", invalid="ignore"):
        want = x.astype(fmt.dtype)
    got = jax.jit(lambda x: cast(x, fmt))(x)
    assert got.dtype == fmt.dtype
    same(np.asarray(got).astype(np.float64), want.astype(np.float64))
    same(round_to(x, fmt), want.astype(np.float64))


@pytest.mark.parametrize("fmt", nightly([f for f in FORMATS if f.bits <= 16], but=KINDS))
def test_cast_returns_codes_of_rounded_values(fmt):
    x = hard_inputs(fmt)
    x = x[~np.isnan(x)]
    got = np.asarray(jax.jit(lambda x: cast(x, fmt))(x))
    codes = got if got.dtype.kind == "u" else got.view(fmt.code_dtype)
    same(fmt.decode(codes), oracle(x, fmt))


@pytest.mark.parametrize("fmt", ["e4m3fn", "fp16", MINE])
def test_round_to_under_jit_vmap_and_map(fmt):
    x = jnp.asarray(hard_inputs(formats.E5M2)[:512])
    want = round_to(x, fmt)
    same(jax.jit(lambda x: round_to(x, fmt))(x), want)
    same(jax.vmap(lambda x: round_to(x, fmt))(x), want)
    same(jax.lax.map(lambda x: round_to(x, fmt), x), want)


INTEGERS = [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64]


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("rounding", ["nearest_even", *nightly(["toward_zero"])])
def test_integers_are_rounded_once_from_all_their_bits(dtype, rounding):
    limits, rng = np.iinfo(dtype), np.random.default_rng(0)
    x = rng.integers(limits.min, limits.max, 500, dtype=dtype, endpoint=True)
    # the number halfway between two neighbours of 8 and of 24 digits, and the two beside it
    halves = [
        sign * ((digits << width - 8 | 1) << shift) + beside
        for width in (9, 25) for digits in (128, 129, 255) for shift in range(55)
        for sign in (1, -1) for beside in (-1, 0, 1)
    ]  # fmt: skip
    near = [limits.min, limits.max, *(n for n in halves if limits.min <= n <= limits.max)]
    x = np.concatenate([x, np.array(near, dtype)])

    def expected(number, digits):  # in Python's integers
        k = max(abs(number).bit_length() - digits, 0)
        whole, rest = divmod(abs(number), 1 << k)
        up = 2 * rest + whole % 2 > 1 << k and rounding == "nearest_even"
        return float((-1 if number < 0 else 1) * (whole + up << k))

    for fmt in ("bf16", "fp32"):
        digits = formats.format(fmt).mantissa_bits + 1
        want = [expected(int(number), digits) for number in x]
        same(round_to(x, fmt, rounding=rounding), want)
        given = jnp.asarray(x) if limits.bits < 64 else x  # JAX has int64 with x64 alone
        same(cast(given, fmt, rounding=rounding), want)
    assert cast(7, "e4m3fn") == 7


def test_gradient_is_straight_through_and_not_rounded():
    x = jnp.array([1.05, 1e3, -1e9])
    _, pull = jax.vjp(lambda x: round_to(x, "e4m3fn", saturate=True), x)
    assert pull(jnp.full(3, 1e6))[0].tolist() == [1e6] * 3
    _, pull = jax.vjp(lambda x: round_to(x, "e4m3fn", saturate=True, gradient="clipped"), x)
    assert pull(jnp.full(3, 1e6))[0].tolist() == [1e6, 0, 0]
    assert jax.jvp(lambda x: round_to(x, "e4m3fn"), (x,), (x,))[1].tolist() == x.tolist()


test_invalid_arguments_are_rejected = refused(
    (lambda: round_to(jnp.ones(2), "fp8"), "'fp8' is a recipe, not a format"),
    (lambda: cast(jnp.ones(2), "e4m3fm"), "did you mean 'e4m3fn'.* expected one"),
    (lambda: round_to(jnp.ones(2, bool), "fp16"), TypeError, "round_to takes real .* not bool"),
    (lambda: cast(np.ones(2, int), "fp64"), TypeError, "integers of at most 32 bits, not int64"),
    (lambda: cast(jnp.ones(2, complex), "fp16"), TypeError, "cast takes real .* not complex64"),
    (lambda: round_to(jnp.ones(2), "fp16", rounding="up"), "rounding is 'up'; expected"),
    (lambda: round_to(jnp.ones(2), "fp16", rounding="stochastic"),
     "expected either key, a JAX random key, or bits, uint32 of shape"),
    (lambda: round_to(jnp.ones(2), "fp16", rounding="stochastic", bits=jnp.ones(2)),
     r"bits is float32 of shape \(2,\); expected uint32"),
    (lambda: round_to(jnp.ones(2), "fp16", key=jax.random.key(0)),
     "key or bits is given; expected neither for rounding='nearest_even'"),
    (lambda: cast(jnp.ones(2), "fp16", saturate=3), TypeError, "saturate is 3; expected"),
    (lambda: round_to(jnp.ones(2), "fp16", gradient="x"), "gradient is 'x'; expected"),
    (lambda: round_to(jnp.ones(2), Format("wide", 11, 4)),
     "float32 doesn't represent all numbers of wide; pass x as float64"),
)  # fmt: skip


@pytest.mark.parametrize("saturate", SATURATE)
@pytest.mark.parametrize("rounding", ["nearest_even", *nightly(["toward_zero"])])
@pytest.mark.parametrize("name", ["e4m3fn", "fp16", *nightly(["e5m2", "e4m3fnuz", "bf16"])])
def test_cast_has_a_straight_through_derivative(name, rounding, saturate):
    def f(x):
        return jnp.sum(cast(x, name, rounding=rounding, saturate=saturate).astype(x.dtype) * 2)

    np.testing.assert_array_equal(jax.grad(f)(jnp.array([0.3, -1.1, 2.0])), [2, 2, 2])
