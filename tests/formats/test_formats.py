"""Formats compared with ml_dtypes, gfloat and published tables, over all codes."""

import dataclasses
import itertools
from fractions import Fraction

import gfloat
import gfloat.formats
import numpy as np
import pytest
from ml_dtypes import finfo
from proofs.oracle import DETERMINISTIC, NAN, edges

from cases import refused
from scalewise import formats
from scalewise.formats import CATALOGUE, SATURATE, Format

STORED = [f for f in CATALOGUE.values() if f.dtype is not None and f.bits <= 16]
GFLOAT = {
    "fp16": gfloat.formats.format_info_binary16,
    "bf16": gfloat.formats.format_info_bfloat16,
    "e4m3fn": gfloat.formats.format_info_ocp_e4m3,
    "e5m2": gfloat.formats.format_info_ocp_e5m2,
    "e2m3fn": gfloat.formats.format_info_ocp_e2m3,
    "e3m2fn": gfloat.formats.format_info_ocp_e3m2,
    "e2m1fn": gfloat.formats.format_info_ocp_e2m1,
    "e8m0": gfloat.formats.format_info_ocp_e8m0,
}


def as_stored(fmt: Format) -> np.ndarray:
    """Returns the numbers of all codes according to ml_dtypes or NumPy."""
    codes = np.arange(2**fmt.bits, dtype=np.uint32).astype(fmt.code_dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return codes.view(fmt.dtype).astype(np.float64)


@pytest.mark.parametrize("fmt", STORED, ids=lambda f: f.name)
def test_decode_matches_ml_dtypes_for_every_code(fmt):
    got, want = fmt.values(), as_stored(fmt)
    np.testing.assert_array_equal(got, want)
    finite = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[finite]), np.signbit(want[finite]))


@pytest.mark.parametrize("name", [n for n in GFLOAT if CATALOGUE[n].bits <= 8])
def test_decode_matches_gfloat_for_every_code(name):
    want = [gfloat.decode_float(GFLOAT[name], i).fval for i in range(2 ** CATALOGUE[name].bits)]
    np.testing.assert_array_equal(CATALOGUE[name].values(), want)


@pytest.mark.parametrize("name", GFLOAT)
def test_derived_constants_match_gfloat(name):
    ours, theirs = CATALOGUE[name], GFLOAT[name]
    assert float(ours.max) == theirs.max
    assert float(ours.smallest) == theirs.smallest
    assert ours.bits == theirs.k
    assert ours.precision == theirs.precision


@pytest.mark.parametrize(
    "fmt", [f for f in CATALOGUE.values() if f.bits <= 19], ids=lambda f: f.name
)
def test_encode_inverts_decode(fmt):
    codes = np.arange(2 ** min(fmt.bits, 19), dtype=np.uint32)
    values = fmt.decode(codes)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(fmt.encode(values)[number], codes[number])
    if fmt.nan_code is not None:
        assert np.isnan(fmt.decode(fmt.encode(np.nan)))


@pytest.mark.parametrize("fmt", [f for f in STORED if f.signed], ids=lambda f: f.name)
def test_encode_matches_ml_dtypes_around_midpoints(fmt):
    values = fmt.values()
    values = np.unique(values[np.isfinite(values)])
    mid = (values[1:] + values[:-1]) / 2
    x = np.concatenate([mid, np.nextafter(mid, np.inf), np.nextafter(mid, -np.inf), -mid])
    x = x.astype(np.float32)  # ml_dtypes rounds float64 twice
    np.testing.assert_array_equal(fmt.decode(fmt.encode(x)), x.astype(fmt.dtype).astype(np.float64))


def test_published_constants():
    """ONNX's float8 page; IEEE 754 for FP16; IBM's DLFloat16 paper (ARITH 2019)."""
    f = formats
    assert (f.E4M3FN.bias, float(f.E4M3FN.max), f.E4M3FN.smallest) == (7, 448, Fraction(1, 2**9))
    assert (f.E4M3FNUZ.bias, float(f.E4M3FNUZ.max)) == (8, 240)
    assert f.E4M3FNUZ.smallest == Fraction(1, 2**10)
    assert (f.E5M2.bias, float(f.E5M2.max), f.E5M2.smallest) == (15, 57344, Fraction(1, 2**16))
    assert (f.E5M2FNUZ.bias, float(f.E5M2FNUZ.max)) == (16, 57344)
    assert f.E5M2FNUZ.smallest == Fraction(1, 2**17)
    assert (f.E8M0.max, f.E8M0.smallest) == (Fraction(2) ** 127, Fraction(1, 2**127))
    assert (f.FP16.max, f.FP16.smallest) == (65504, Fraction(1, 2**24))
    assert f.DLFLOAT16.max == 2**33 - 2**24
    assert f.DLFLOAT16.smallest == Fraction(1, 2**31) + Fraction(1, 2**40)


@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("name", ["fp16", "e4m3fnuz", "e5m2", "e8m0", "e2m1fn", "dlfloat16"])
def test_encode_matches_thresholds_in_every_rounding(name, rounding):
    """Compares with the oracle of ``proofs.casts`` on both sides of each threshold."""
    fmt = formats.format(name)
    for saturate in SATURATE:
        for bits, want in edges(fmt, rounding, saturate):
            codes = fmt.encode(bits.view(np.float32), rounding=rounding, saturate=saturate)
            got = fmt.decode(codes).astype(np.float32)
            if fmt.nan_code is None:  # NaN has become code 0
                got = np.where(np.isnan(bits.view(np.float32)), np.float32(np.nan), got)
            same = got.view(np.uint32) == want
            assert (same | (np.isnan(got) & (want == NAN))).all()


def test_stochastic_encode_rounds_up_with_exact_probability():
    bits = np.arange(1 << 16, dtype=np.uint32) << np.uint32(
        16
    )  # every value of the 16 highest bits once
    x = np.full(bits.shape, 1 + 2.0**-10 * 0.3125)
    up = formats.FP16.encode(x, rounding="stochastic", bits=bits) == 0x3C01
    assert up.sum() == round(0.3125 * 2**16)
    tiny = np.full(bits.shape, 2.0**-26)
    up = formats.FP16.encode(tiny, rounding="stochastic", bits=bits) == 1
    assert up.sum() == 2**14


@pytest.mark.parametrize(
    ("rounding", "saturate", "want"),
    [  # ONNX's table for E8M0: 0, infinity, over the largest, under the smallest number
        ("up", True, [2.0**-127, 2.0**127, 2.0**127, 2.0**-127]),
        ("nearest", False, [np.nan] * 4),
        ("down", False, [np.nan, np.nan, 2.0**127, np.nan]),
    ],
)
def test_e8m0_matches_onnx(rounding, saturate, want):
    x = np.float32([0, np.inf, 1.75 * 2.0**127, 2.0**-129])
    codes = formats.E8M0.encode(x, rounding=rounding, saturate=saturate)
    np.testing.assert_array_equal(formats.E8M0.decode(codes), want)


def test_signed_format_without_zero():
    fmt = Format("s", 3, 2, subnormals=False, nan="all_ones", zero=False)
    codes, values = np.arange(64), fmt.values()
    number = ~np.isnan(values)
    assert len(np.unique(values[number])) == number.sum()  # no number, and so no zero, occurs twice
    np.testing.assert_array_equal(fmt.encode(values)[number], codes[number])


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3fn", "e5m2", "e4m3fnuz"])
def test_unsigned_variant_has_the_same_width_and_all_positive_numbers(name):
    signed = formats.format(name)
    fmt = signed.unsigned()
    assert (fmt.bits, fmt.precision) == (signed.bits, signed.precision + 1)
    values = signed.values()
    positive = values[np.isfinite(values) & ~np.signbit(values)]
    assert np.isin(positive, fmt.values()).all()
    assert np.isnan(fmt.decode(fmt.encode(-1.0)))


@pytest.mark.parametrize(
    ("fmt", "saturate", "want"),
    [
        ("e4m3fn", True, [448, -448, 448]), ("e4m3fn", False, [np.nan, np.nan, np.nan]),
        ("e4m3fn", "finite", [np.nan, np.nan, 448]), ("e4m3fnuz", True, [240, -240, 240]),
        ("e4m3fnuz", "finite", [np.nan, np.nan, 240]), ("e5m2", True, [57344, -57344, 57344]),
        ("e5m2", False, [np.inf, -np.inf, np.inf]), ("e5m2", "finite", [np.inf, -np.inf, 57344]),
        ("e2m1fn", False, [6, -6, 6]),
    ],
)  # fmt: skip
def test_infinities_and_overflow(fmt, saturate, want):
    fmt = formats.format(fmt)
    codes = fmt.encode(np.array([np.inf, -np.inf, 1e6]), saturate=saturate)
    np.testing.assert_array_equal(fmt.decode(codes), want)


def test_p3109_binary8p3():
    fmt = formats.p3109(8, 3)
    assert (fmt.bias, float(fmt.max), fmt.smallest) == (16, 49152.0, Fraction(1, 2**17))
    assert np.isnan(fmt.decode(0x80))
    assert fmt.decode(0x7F) == np.inf
    assert float(formats.p3109(8, 3, extended=False).max) == 57344.0


def test_every_p3109_format_that_float64_represents():
    """Widths of 3 to 16 bits, exponent fields of 1 to 11 bits, signed or not, extended or not."""
    family = []
    for bits, signed, extended in itertools.product(range(3, 17), (True, False), (True, False)):
        for precision in range(1, bits + (not signed)):
            if bits - precision + (not signed) <= 11:
                family.append((bits, precision, signed, extended))
    assert len(family) == 454
    for member in family:
        fmt = formats.p3109(*member)
        codes, values = np.arange(2**fmt.bits), fmt.values()
        assert fmt.bits == member[0]
        assert fmt.precision == member[1]
        assert np.isnan(values).sum() == 1
        assert np.isposinf(values).sum() == member[3]
        number = ~np.isnan(values)
        np.testing.assert_array_equal(fmt.encode(values)[number], codes[number])


def test_format_accepts_name_alias_dtype_and_format():
    for spec in ("fp16", "FP16", "half", "float16", np.float16, np.dtype("float16"), formats.FP16):
        assert formats.format(spec) is formats.FP16
    assert formats.format("float8_e4m3fn") is formats.E4M3FN


def test_user_defined_format_matches_ieee_754():
    e5m10 = Format("mine", exponent_bits=5, mantissa_bits=10)
    np.testing.assert_array_equal(e5m10.values(), formats.FP16.values())
    assert e5m10.dtype is None
    assert hash(e5m10) == hash(dataclasses.replace(e5m10))


test_invalid_arguments_are_rejected = refused(
    (lambda: formats.format("e4m3fm"), r"no format is called 'e4m3fm'; did you mean 'e4m3fn'"),
    (lambda: formats.format("fp8"), "not a format; did you mean 'e4m3fn' or 'e5m2'"),
    (lambda: formats.format("mxfp6_e2m3"), "'mxfp6_e2m3' is a block format, not a format"),
    (lambda: formats.format("to_odd"), "'to_odd' is a rounding mode, not a format"),
    (lambda: formats.format(np.dtype("int32")), r"dtype\('int32'\) is a dtype of integers"),
    (lambda: formats.format(None), "expected a format, or the name or dtype of one, not None"),
    (lambda: formats.format(int), "<class .int.> is a dtype of integers"),
    (lambda: formats.block_format("fp16"), "'fp16' is a format, not a block format; expected"),
    (lambda: formats.block_format("mxfp9"), "called 'mxfp9'; did you mean 'mxfp4'.* expected"),
    (lambda: Format("x", 0, 3), r"exponent_bits is 0; expected an integer from 1 to 11"),
    (lambda: Format("x", 4, 60), r"mantissa_bits is 60; expected an integer from 0 to 52"),
    (lambda: Format("x", 4, 3, bias=5000), r"bias is 5000; expected -1009 to 1072, with"),
    (lambda: Format("x", 11, 4, bias=0), r"bias is 0; expected 1023 to 1071, with which floa"),
    (lambda: Format("x", 7, 0), r"nan is 'ieee'; expected 'all_ones', 'negative_zero' or 'n"),
    (lambda: Format("x", 4, 3, zero=False), r"zero is False; expected True where there are"),
    (lambda: formats.p3109(2, 1), "bits is 2; expected 3 to 16"),
    (lambda: formats.FP16.decode([70000]),
     "codes of fp16 are from 70000 to 70000; expected 0 to 65535"),
    (lambda: formats.FP16.encode([1.0], saturate="yes"),
     "saturate is 'yes'; expected one of False"),
    (lambda: formats.FP16.encode([1.0], rounding="up"), "rounding is 'up'; expected one of 'nea"),
    (lambda: formats.FP16.encode([1.0], rounding="stochastic"), "bits is .*; expected uint32 or"),
    (lambda: formats.FP16.encode([1.0], bits=[1]), "bits is given; expected None for"),
    (lambda: formats.p3109(16, 1), "precision is 1; expected 5 to 15 .below, float64 itself"),
    (lambda: formats.p3109(8, 9, False), "precision is 9; expected 1 to 8"),
    (lambda: formats.E8M0.unsigned(), "e8m0 is unsigned; expected a signed"),
)  # fmt: skip


@pytest.mark.parametrize(
    "call", [lambda: formats.FP16.decode([1.5]), lambda: formats.FP16.encode([1j])]
)
def test_wrong_types_are_rejected(call):
    with pytest.raises(TypeError, match=r"are (float64|complex128); expected"):
        call()


def test_decimal_digits_are_those_of_numpy_and_c():
    for name, digits in (("fp16", 3.31), ("bf16", 2.41), ("fp32", 7.22), ("fp64", 15.95)):
        assert round(formats.format(name).decimal_digits, 2) == digits
    for name in ("fp16", "bf16", "fp32", "fp64"):
        fmt = formats.format(name)
        assert fmt.round_trip_digits[0] == finfo(fmt.dtype).precision
    assert [formats.format(n).round_trip_digits[1] for n in ("fp16", "fp32", "fp64")] == [5, 9, 17]


def test_tiny_numbers_round_up_in_a_format_of_large_ones():
    f = Format("large", 4, 3, bias=-108, subnormals=False, nan="none")
    tiny = np.array([5e-324, 1e-310, 1e-300])
    for mode, want in (("toward_positive", f.smallest), ("to_odd", f.smallest), ("toward_zero", 0)):
        np.testing.assert_array_equal(f.decode(f.encode(tiny, rounding=mode)), float(want))
