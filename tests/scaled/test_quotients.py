"""Casts with scales that are no powers of two, beside exact rational arithmetic."""

from bisect import bisect_right
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from cases import nightly
from scalewise.formats import BlockFormat
from scalewise.scaled._power import quotient

FORMATS = ["e4m3fn", "e5m2", "e4m3fnuz", "e2m3fn", "e3m2fn", "e2m1fn", "fp16"]
ROUNDINGS = ["nearest_even", "nearest_away", "toward_zero", "toward_positive", "to_odd"]


def numbers(fmt):
    return sorted({Fraction(float(v)) for v in fmt.values() if np.isfinite(float(v))})


def rounded(exact, values, rounding):
    """Rounds a Fraction to one of sorted values, the middle one 0; numbers beyond them saturate."""
    if exact <= values[0] or exact >= values[-1]:
        return values[0] if exact < 0 else values[-1]
    i = bisect_right(values, exact) - 1
    low, high = values[i], values[i + 1]
    if exact == low:
        return low
    near, far = (low, high) if abs(low) < abs(high) else (high, low)  # of magnitude
    even = i - len(values) // 2
    match rounding:
        case "toward_zero":
            return near
        case "toward_positive":
            return high
        case "to_odd":
            return low if even % 2 else high
    if exact - low != high - exact:
        return low if exact - low < high - exact else high
    return far if rounding == "nearest_away" else (high if even % 2 else low)


def quotients_near_boundaries(fmt, count, seed):
    """Returns numbers within two units of a divisor times a number or midpoint of the format."""
    rng = np.random.default_rng(seed)
    divisors = (rng.integers(2**23, 2**24, count) * np.exp2(rng.integers(-60, 40, count))).astype(
        np.float32
    )
    divisors[::7] = np.float32(1e-3) / 7
    values = [float(v) for v in numbers(fmt)]
    boundaries = np.sort(np.r_[values, (np.array(values[1:]) + values[:-1]) / 2])
    chosen = rng.choice(boundaries[boundaries != 0], count)
    x = (chosen * divisors.astype(np.float64)).astype(np.float32)
    for _ in range(2):
        x = np.where(rng.random(count) < 0.4, np.nextafter(x, np.float32(np.inf)), x)
        x = np.where(rng.random(count) < 0.4, np.nextafter(x, np.float32(-np.inf)), x)
    return x, divisors


@pytest.mark.parametrize("name", nightly(FORMATS, but=["e4m3fn", "e2m1fn"]))
def test_quotients_are_rounded_once(name):
    fmt = sw.format(name)
    x, divisors = quotients_near_boundaries(fmt, 2000, 0)
    near = jax.jit(quotient)(x, divisors)
    values = numbers(fmt)
    exact = [Fraction(float(a)) / Fraction(float(b)) for a, b in zip(x, divisors, strict=True)]
    for rounding in ROUNDINGS:
        got = sw.round_to(near, fmt, rounding=rounding, saturate=True)
        want = [float(rounded(q, values, rounding)) for q in exact]
        np.testing.assert_array_equal(np.asarray(got, np.float64), want, err_msg=rounding)


def test_plain_division_would_miss_some_of_these():
    fmt = sw.format("e4m3fn")
    x, divisors = quotients_near_boundaries(fmt, 4000, 0)
    values = numbers(fmt)
    got = np.asarray(sw.round_to(x / divisors, fmt, saturate=True), np.float64)
    exact = [Fraction(float(a)) / Fraction(float(b)) for a, b in zip(x, divisors, strict=True)]
    want = [float(rounded(q, values, "nearest_even")) for q in exact]
    assert np.any(got != want)


def test_four_over_six_takes_six_where_both_errors_are_equal():
    """Blocks of integers with the exact scales 2 and 3, times numbers that make scales inexact."""
    rng = np.random.default_rng(0)
    x = rng.integers(-12, 13, (4000, 16)) * np.where(np.arange(16) < 3, 1, rng.random(16) < 0.2)
    x[:, 0] = 12
    element = sw.format("e2m1fn")
    errors = [np.sum((element.decode(element.encode(x / s)) * s - x) ** 2, 1) for s in (2.0, 3.0)]
    ties, four = errors[0] == errors[1], errors[1] < errors[0]
    assert np.sum(ties) > 50
    for factor in (1, 0.1, 1 / 3, 7e-5):
        a = sw.quantize(jnp.float32(x * factor), "nvfp4", scaling=sw.FourOverSix())
        chosen = np.asarray(a.scale.data.astype(jnp.float32))[:, 0]
        np.testing.assert_array_equal(chosen == 384, four)


def test_quotients_to_float32_and_from_float64():
    rng = np.random.default_rng(1)
    x = rng.standard_normal(1 << 16).astype(np.float32)
    s = np.float32(np.exp(rng.standard_normal(1 << 16) * 10))
    np.testing.assert_allclose(jax.jit(quotient)(x, s), x / s, rtol=2.0**-23)
    for odd in (3, 7, 15):  # E2M1's largest is 6, E4M3's 448, E4M3FNUZ's 240
        np.testing.assert_array_equal(jax.jit(quotient)(x, jnp.float32(odd)), x / np.float32(odd))
    with jax.enable_x64(True):
        wide, t = rng.standard_normal((2, 2000))
        t, boundary = abs(t), 1 + np.arange(2000) % 64 / 64.0
        wide = np.nextafter(boundary * t, np.where(wide > 0, 9, -9))
        got = sw.round_to(jax.jit(quotient)(wide, t), "e4m3fn", rounding="toward_zero")
        values = numbers(sw.format("e4m3fn"))
        exact = [Fraction(a) / Fraction(b) for a, b in zip(wide, t, strict=True)]
        want = [float(rounded(q, values, "toward_zero")) for q in exact]
        np.testing.assert_array_equal(got, want)
    special = np.float32([np.inf, -np.inf, np.nan, 0.0, -0.0])
    np.testing.assert_array_equal(quotient(special, jnp.float32(3)), special / 3)
    assert np.signbit(quotient(special, jnp.float32(3))).tolist()[3:] == [False, True]


BLOCKS = {
    "fp8": BlockFormat("fp8", sw.format("e4m3fn"), scale=sw.format("fp32"), size=128),
    "fp6": BlockFormat("fp6", sw.format("e2m3fn"), scale=sw.format("fp32"), size=32),
    "fp4": BlockFormat("fp4", sw.format("e2m1fn"), scale=sw.format("e4m3fn"), size=16),
    "nvfp4": sw.formats.NVFP4,
}


@pytest.mark.parametrize("name", nightly(sorted(BLOCKS), but=["fp8", "nvfp4"]))
@pytest.mark.parametrize("rounding", ["nearest_even", *nightly(["toward_positive"])])
def test_codes_of_blocks_are_the_nearest(name, rounding):
    fmt = BLOCKS[name]
    x = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float16).astype(np.float32)
    x = x[:24] if name != "fp8" else x[30:40]
    a = sw.quantize(x, fmt, rounding=rounding)
    scale = a.scale.value() if isinstance(a.scale, sw.ScaledArray) else a.scale
    scale = np.repeat(np.asarray(scale.astype(jnp.float32)), fmt.size, 1)
    values = numbers(fmt.element)
    pairs = zip(x.ravel(), scale.ravel(), strict=True)
    want = [
        float(rounded(Fraction(float(v)) / Fraction(float(s)), values, rounding)) for v, s in pairs
    ]
    np.testing.assert_array_equal(np.asarray(a.data.astype(jnp.float32)).ravel(), want)
    if name == "fp8":  # DeepSeek-V3's scales: the largest magnitude over 448, rounded once
        largest = np.abs(x).reshape(10, 2, 128).max(-1)
        np.testing.assert_array_equal(a.scale, largest / np.float32(448))


def test_a_divisor_that_is_known_gives_the_quotients_of_a_traced_one():
    draws = np.random.default_rng(0)
    x = np.ldexp(draws.standard_normal(4096), draws.integers(-100, 100, 4096)).astype(np.float32)
    x[:4] = 0, -0.0, np.inf, np.nan
    for divisor in np.float32([6, 448, 57344, 2.0**-3, *np.exp2(draws.uniform(-20, 20, 8))]):
        known = np.asarray(jax.jit(lambda x, divisor=divisor: quotient(x, divisor))(x))
        traced = np.asarray(jax.jit(quotient)(x, np.full_like(x, divisor)))
        np.testing.assert_array_equal(np.isnan(known), np.isnan(traced))
        promised = ~(np.abs(traced) < 2.0**-100)  # below, results are what a backend flushes
        np.testing.assert_array_equal(known[promised], traced[promised])
