"""Block formats against exact arithmetic on each block, gfloat's rounding, and hand-made cases."""

import math
from fractions import Fraction
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from arrays import normal
from cases import nightly
from scalewise import formats
from scalewise.formats import BLOCK_FORMATS, MXFP4, MXFP8_E4M3, BlockFormat
from scalewise.scaled import SCALINGS, Mx, round_in_blocks, rounds_in_blocks

EXPONENTS = get_args(get_type_hints(Mx)["exponent"])

MX_FORMATS = [f for f in BLOCK_FORMATS.values() if f.tensor_scale is None]


def reference(block, fmt):
    """The values of one finite block, by float64 and the element's exact encode."""
    amax = np.abs(block).max()
    exponent = -127 if amax == 0 else np.frexp(amax)[1] - 1 - fmt.element.max_exponent
    scale = 2.0 ** np.clip(exponent, -127, 127)
    element = fmt.element
    return element.decode(element.encode(block / scale, saturate=True)) * scale


def wild(shape, seed=0):
    """float32 of all exponents, subnormals among them."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, shape, np.uint32)
    x = bits.view(np.float32)
    return np.where(np.isfinite(x), x, np.float32(1))


@pytest.mark.parametrize("fmt", nightly(MX_FORMATS, but=["mxfp8_e5m2", "mxfp4"]))
@pytest.mark.parametrize("jit", [True, *nightly([False])])
def test_each_block_is_its_exact_rounding(fmt, jit):
    spread = np.float32(2.0) ** np.random.default_rng(1).integers(-12, 13, (64, 32))
    tame = np.random.default_rng(2).standard_normal((64, 32)).astype(np.float32) * spread
    low = (tame * np.float32(2.0**-130)).astype(np.float32)
    f = (lambda x: sw.quantize(x, fmt)) if not jit else jax.jit(lambda x: sw.quantize(x, fmt))
    for x in (wild((64, 32)), tame.astype(np.float32), low, np.zeros((2, 32), np.float32)):
        got = f(jnp.asarray(x))
        data = np.asarray(got.data).astype(np.float64)
        scale = 2.0 ** (np.asarray(got.scale).view(np.uint8).astype(np.float64) - 127)
        want = np.stack([reference(row.astype(np.float64), fmt) for row in x])
        np.testing.assert_array_equal(data * scale, want)


def test_every_code_times_every_power_of_two_is_decoded_exactly():
    """Also those that are subnormal in float32, which XLA's float operations flush on a CPU."""
    for element in (formats.E5M2, formats.E4M3FN, formats.E2M1FN):
        numbers, powers = element.values(), np.arange(255, dtype=np.uint8)
        data = jnp.asarray(np.tile(numbers, (255, 1)), jnp.float32)
        scale = jnp.asarray(powers).view(jnp.float8_e8m0fnu)[:, None]
        with np.errstate(over="ignore", invalid="ignore"):
            want = (numbers * 2.0 ** (powers[:, None] - 127.0)).astype(np.float32)
        np.testing.assert_array_equal(sw.ScaledArray(data, scale).value(), want)


@pytest.mark.parametrize("scale", nightly([None, *EXPONENTS], but=[None, "rceil"]))
@pytest.mark.parametrize(
    "name",
    nightly(["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4"], but=["mxfp8_e4m3"]),
)
def test_rounding_without_codes_gives_the_values_of_quantize(name, scale):
    fmt, shape = BLOCK_FORMATS[name], (12, 50, 7)
    scaling = scale and Mx(scale)
    assert rounds_in_blocks(fmt, scaling)

    @jax.jit
    def rounded(x):
        wanted = sw.quantize(x, fmt, axis=1, scaling=scaling).value()
        return round_in_blocks(x, fmt, scaling), wanted

    rng = np.random.default_rng(4)
    center = rng.integers(-149, 120, (12, 1, 7)) + rng.integers(-12, 1, shape)
    near = np.ldexp(rng.standard_normal(shape), center).astype(np.float32)
    low = rng.integers(0, 2**24, shape, np.uint32).view(np.float32)
    special = np.float32([np.inf, -np.inf, np.nan, 0, -0.0])
    for x in (wild(shape), near, -low, np.zeros(shape, np.float32)):
        x[:, :, 0] = np.where(
            rng.random((12, 50)) < 0.02, rng.choice(special, (12, 50)), x[:, :, 0]
        )
        got, want = map(np.asarray, rounded(x))
        subnormal = np.abs(want) < np.finfo(np.float32).smallest_normal
        want = np.where(subnormal, np.copysign(0, want), want)
        np.testing.assert_array_equal(got, want)
        finite = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got)[finite], np.signbit(want)[finite])


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_any_axis_and_a_last_block_that_isnt_full(axis):
    x = np.random.default_rng(3).standard_normal((70, 45)).astype(np.float32)
    got = sw.quantize(jnp.asarray(x), "mxfp8_e4m3", axis=axis)
    assert got.data.shape == x.shape
    assert got.scale.shape == ((3, 45) if axis == 0 else (70, 2))
    rows = x.T if axis == 0 else x
    blocks = [
        np.concatenate(
            [reference(r[i : i + 32].astype(np.float64), MXFP8_E4M3) for i in range(0, len(r), 32)]
        )
        for r in rows
    ]
    want = np.stack(blocks)
    np.testing.assert_array_equal(got.value(), want.T if axis == 0 else want)


@pytest.mark.parametrize("exponent", nightly(EXPONENTS, but=["floor", "up"]))
def test_the_largest_numbers_stay_finite(exponent):
    x = jnp.full((1, 32), float(jnp.finfo(jnp.float32).max)).at[0, 1].set(3e38)
    for name in ("mxfp4", "mxfp6_e2m3", "mxfp8_e4m3", "mxfp8_e5m2"):
        stored = sw.quantize(x, name, scaling=Mx(exponent))
        assert np.isfinite(stored.value()).all()
        assert np.isfinite(np.asarray(stored.scale, np.float32)).all()


def test_ceil_never_saturates():
    x = jnp.array([500.0, 1.0])
    assert sw.quantize(x, "mxfp8_e4m3").value()[0] == 448
    assert sw.quantize(x, "mxfp8_e4m3", scaling=Mx("ceil")).value()[0] == 512


def chosen_exponent(amax: Fraction, element, scale: str) -> int:
    """The definitions, in rational numbers."""

    def floor_log2(q: Fraction) -> int:
        n = q.numerator.bit_length() - q.denominator.bit_length()
        return n if Fraction(2) ** n <= q else n - 1

    def ceil_log2(q: Fraction) -> int:
        return -floor_log2(1 / q)

    if scale in ("rceil", "up"):
        return ceil_log2(amax / element.max)
    if scale in ("down", "nearest"):
        quotient = amax / element.max
        below = floor_log2(quotient)
        return below + (scale == "nearest" and quotient >= Fraction(3, 2) * Fraction(2) ** below)
    if scale == "ceil":
        return ceil_log2(amax) - element.max_exponent
    if scale == "even":
        unit = Fraction(2) ** (floor_log2(amax) - element.mantissa_bits)
        amax = math.floor(amax / unit + Fraction(1, 2)) * unit
    return floor_log2(amax) - element.max_exponent


@pytest.mark.parametrize("scale", EXPONENTS)
@pytest.mark.parametrize("fmt", nightly(MX_FORMATS, but=["mxfp8_e4m3"]))
def test_the_scales_by_name(fmt, scale):
    top = float(fmt.element.max)
    edges = [top, 1.0, 1.5, 1.75, 1.875, 1.9375, 1.99, 2.0, 3.0, 5.0, 7.0, 440.0, 480.0, 496.0]
    edges += [*np.exp2(np.random.default_rng(0).uniform(-110, 120, 200))]
    amax = np.float32([f(v) for v in edges for f in (lower, np.float32, upper)])
    rows = np.zeros((len(amax), 32), np.float32)
    rows[:, 3] = -amax
    got = sw.quantize(jnp.asarray(rows), fmt, scaling=Mx(scale))
    codes = np.asarray(got.scale).view(np.uint8)[:, 0].astype(int)
    want = [127 + chosen_exponent(Fraction(float(a)), fmt.element, scale) for a in amax]
    np.testing.assert_array_equal(codes, want)


def lower(x):
    return np.nextafter(np.float32(x), np.float32(0))


def upper(x):
    return np.nextafter(np.float32(x), np.float32(np.inf))


def nvfp4(x, size=16):
    """Two levels in float32, as arXiv 2509.25149, appendix C, has them; exact encodes elsewhere."""
    e4m3, e2m1 = sw.formats.E4M3FN, sw.formats.E2M1FN
    x = x.reshape(-1, size)
    amax = np.abs(x).max(1)
    whole = np.float32((amax * np.float32(1 / 6)).max() * np.float32(1 / 448))
    scale = np.maximum(amax * np.float32(1 / 6) / whole, np.float32(2.0**-9))
    scale = e4m3.decode(e4m3.encode(scale, saturate=True)).astype(np.float32) * whole
    return e2m1.decode(e2m1.encode(x / scale[:, None], saturate=True)) * scale[:, None]


@pytest.mark.parametrize("k", [-100, 0, 100])
def test_nvfp4_has_two_levels_of_scales(k):
    spread = np.float32(2.0) ** np.random.default_rng(1).integers(-6, 7, (8, 1))
    x = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32) * spread
    x = x * np.float32(2.0**k)
    x[3, :16] = 0
    a = jax.jit(lambda x: sw.quantize(x, "nvfp4"))(x)
    assert a.scale.data.dtype == jnp.float8_e4m3fn
    assert a.scale.shape == (8, 4)
    assert float(a.scale.data.astype(jnp.float32).max()) == 448
    # XLA may join the two factors of the scale: its last bit is open, the elements are not
    np.testing.assert_allclose(a.value(), nvfp4(x).reshape(8, 64), rtol=3e-7)
    # 4.5 bits an element and one float32 for all
    assert a.nbytes == x.size // 2 + x.size // 16 + 4


@pytest.mark.parametrize("tensor_scale", [None, sw.format("fp32")], ids=["without", "with"])
def test_blocks_of_small_numbers_are_not_divided_by_zero(tensor_scale):
    """E4M3's smallest number is 2^-9: without a tensor scale 6 x 2^-10 = 0.0059 has the scale 0."""
    e2m1, e4m3 = sw.format("e2m1fn"), sw.format("e4m3fn")
    fmt = BlockFormat("own", e2m1, scale=e4m3, size=16, tensor_scale=tensor_scale)
    x = np.asarray(normal(0, (4, 64))) * np.float32(1e-3)
    rounded = np.asarray(jax.jit(lambda x: sw.quantize(x, fmt).value())(x))
    assert np.all(np.isfinite(rounded))
    error = np.linalg.norm(rounded - x) / np.linalg.norm(x)
    assert error < 0.15 if tensor_scale else error < 0.5
    np.testing.assert_array_equal(sw.quantize(x * 0, fmt).value(), 0)


def test_blocks_of_float64_are_rounded_once():
    with jax.enable_x64(True):
        x = jnp.array([1.0625 + 2.0**-40, 448.0, 1e300])
        got = sw.quantize(x[:2], "mxfp8_e4m3").value()
        np.testing.assert_array_equal(got, [1.125, 448])
        beyond = sw.quantize(x[2:], "mxfp8_e4m3")  # the scale ends at 2^127
        assert float(beyond.data.astype(jnp.float64)[0]) == 448
        assert float(beyond.scale.astype(jnp.float64)[0]) == 2.0**127


def test_blocks_behind_other_choices_of_scale():
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    for scaling in (sw.LeastSquares(), sw.Unit(), sw.Amax()):
        a = sw.quantize(x, "mxfp6_e2m3", scaling=scaling)
        assert a.scale.dtype == jnp.float8_e8m0fnu
        np.testing.assert_allclose(a.value(), x, atol=0.3)
    best, usual = (
        np.square(sw.quantize(x, "mxfp4", scaling=s).value() - x).sum()
        for s in (sw.LeastSquares(), sw.Mx("rceil"))
    )
    assert best < usual
    user = BlockFormat("e4m3 behind ue5m3", sw.formats.E4M3FN, sw.formats.UE5M3, 8)
    np.testing.assert_allclose(sw.quantize(x, user).value(), x, rtol=0.07, atol=1e-3)


def test_stochastic_and_directed_roundings_of_blocks():
    x = jnp.full((1 << 18,), 1.05).at[::32].set(1.75)
    a = sw.quantize(x, "mxfp8_e4m3", rounding="stochastic", key=jax.random.key(0)).value()
    assert set(np.unique(a)) == {1.0, 1.125, 1.75}
    assert abs(float(a.mean()) - float(x.mean())) < 5e-4  # four standard deviations
    tiny = jnp.array([2.0**-140, 1.0])
    away = sw.quantize(tiny, "mxfp8_e4m3", rounding="away_from_zero")
    assert float(away.data[0].astype(jnp.float32)) == 2.0**-9


def test_empty_and_scale_at_the_lowest():
    assert sw.quantize(jnp.zeros((0, 5)), "mxfp4", axis=1).shape == (0, 5)
    tiny = jnp.asarray(np.float32(2.0**-130))[None]
    a = sw.quantize(tiny, "mxfp8_e4m3")
    assert np.asarray(a.data).astype(np.float32)[0] == 0.125
    assert np.asarray(a.scale).view(np.uint8)[0] == 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sw.quantize(jnp.ones(3), "mxfp8_e4m3", axis=1), ValueError, "axis is 1, but x"),
        (lambda: sw.quantize(jnp.ones(3), MXFP4, axis=(0,)), ValueError,
         "blocks lie along one axis; axis is (0,)"),
        (lambda: sw.quantize(jnp.ones(3), "mxfp9"), ValueError,
         "called 'mxfp9'; did you mean 'mxfp4'"),
        (lambda: sw.quantize(jnp.ones(3), MXFP4, scaling=Mx("upward")), ValueError,
         "Mx: exponent is 'upward'; expected"),
        (lambda: sw.quantize(jnp.arange(3), MXFP4), TypeError, "not int32"),
        (lambda: sw.quantize(jnp.ones(3), MXFP4, scaling=sw.Amax(power_of_two=False)), ValueError,
         "mxfp4 has powers of two for scales, Amax(power_of_two=False, headroom=1.0) has others"),
        (lambda: BlockFormat("b", MXFP4.element, tensor_scale=sw.formats.FP16), ValueError,
         "tensor_scale is fp16; expected FP32 or None"),
        (lambda: BlockFormat("b", MXFP4.element, size=0), ValueError,
         "size is 0; expected a positive"),
        (lambda: BlockFormat("b", MXFP4.element, scale=None), TypeError, "scale is None; expected"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_rejected(call, error, message):
    with pytest.raises(error, match=None) as caught:
        call()
    assert message in str(caught.value)


OWN = (
    BlockFormat("own_ue5m3", sw.formats.E2M1FN, scale=sw.formats.UE5M3, size=8),
    BlockFormat("own_bf16", sw.formats.E4M3FN, scale=sw.formats.BF16, size=16),
    BlockFormat("own_fp32", sw.formats.E5M2, scale=sw.formats.FP32, size=128),
)


@pytest.mark.parametrize(
    "fmt", nightly([*BLOCK_FORMATS.values(), *OWN], but=["nvfp4", "mxfp4", "own_bf16"])
)
def test_each_strategy_scales_blocks_of_each_format_or_says_why_not(fmt):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32))
    powers = fmt.scale.mantissa_bits == 0
    refused = {"delayed"} | (set() if powers else {"quest"})
    if powers or fmt.element is not sw.formats.E2M1FN:
        refused |= {"four_over_six", "ms_eden"}  # for blocks of NVFP4
    for name, strategy in SCALINGS.items():
        scaling = strategy()
        key = jax.random.key(0) if scaling.draws else None
        if name in refused:
            with pytest.raises(ValueError, match=fmt.name):
                sw.quantize(x, fmt, scaling=scaling, key=key)
            continue
        stored = sw.quantize(x, fmt, scaling=scaling, key=key)
        assert np.abs(stored.value() - x).max() <= 1.0, name
