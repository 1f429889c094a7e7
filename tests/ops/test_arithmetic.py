"""``Arithmetic``: each operation is the exact result rounded once, by rational arithmetic."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from proofs.arithmetic import IN_FLOAT64, TestFloat, expected

from cases import nightly
from scalewise.formats import Format
from scalewise.formats import format as format_
from scalewise.ops import Arithmetic, accumulate

FORMATS = ["e4m3", "e5m2", "fp16", "bf16", "dlfloat16", "tf32", "fp32"]


def numbers(fmt, count, seed=0):
    """Random finite numbers of a format, by random codes: every magnitude alike."""
    codes = np.random.default_rng(seed).integers(0, fmt.max_code + 1, count)
    signs = np.random.default_rng(seed + 1).choice([-1.0, 1.0], count)
    return fmt.decode(codes) * signs


def nearest(fmt, x):
    """A Fraction to a number of the format, ties to even, without a float on the way."""
    if x < 0:
        return -nearest(fmt, -x)
    low, high = 0, fmt.max_code + 1  # bisect over codes; one beyond the largest is overflow
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fmt.exact(middle) <= x else (low, middle)
    above = fmt.exact(high) if high <= fmt.max_code else 2 * fmt.max - fmt.exact(fmt.max_code - 1)
    twice = 2 * x - fmt.exact(low) - above
    code = high if twice > 0 or (twice == 0 and low % 2) else low
    if code <= fmt.max_code:
        return float(fmt.exact(code))
    return math.inf if fmt.infinities else math.nan


def on(arithmetic, f, *operands):
    with arithmetic.context():
        return np.asarray(
            jax.jit(f)(*(jnp.asarray(x, arithmetic.carrier) for x in operands)), np.float64
        )


@pytest.mark.parametrize("name", nightly(FORMATS, but=["fp16", "bf16"]))
def test_operations_are_the_exact_results_rounded_once(name):
    fmt = format_(name)
    arithmetic = Arithmetic(fmt)
    a, b = numbers(fmt, 400), numbers(fmt, 400, seed=5)
    b[:100] = np.abs(a[:100]) * 2.0 ** np.random.default_rng(3).integers(-3, 3, 100)
    b = fmt.decode(fmt.encode(b, saturate=True))
    b = np.where(b == 0, 1.0, b)
    pairs = [(Fraction(x), Fraction(y)) for x, y in zip(a, b, strict=True)]
    operations = {
        arithmetic.add: lambda x, y: x + y,
        arithmetic.sub: lambda x, y: x - y,
        arithmetic.mul: lambda x, y: x * y,
        arithmetic.div: lambda x, y: x / y,
    }
    for ours, exactly in operations.items():
        want = [nearest(fmt, exactly(x, y)) for x, y in pairs]
        np.testing.assert_array_equal(on(arithmetic, ours, a, b), want, str(ours))


@pytest.mark.parametrize("name", nightly(FORMATS, but=["e4m3", "fp16"]))
@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero"])
def test_the_root_is_the_exact_one_rounded(name, rounding):
    """The result and its neighbours, squared exactly, stand on the right sides of the operand."""
    fmt = format_(name)
    a = np.abs(numbers(fmt, 500))
    roots = on(Arithmetic(fmt, rounding), Arithmetic(fmt, rounding).sqrt, a)
    for x, r in zip(a, roots, strict=True):
        code = int(fmt.encode(r))
        low, here, high = (fmt.exact(max(c, 0)) for c in (code - 1, code, code + 1))
        if rounding == "nearest_even":
            assert ((low + here) / 2) ** 2 <= Fraction(x) <= ((here + high) / 2) ** 2
        else:
            assert here**2 <= Fraction(x) < high**2


@pytest.mark.parametrize(
    ("name", "operation"),
    nightly([*(("fp16", f) for f in IN_FLOAT64), ("bf16", "add"), ("e4m3fn", "div")]),
)
def test_every_rounding_of_testfloats_operands(name, operation):
    """A sample of ``python -m proofs.arithmetic``, eagerly."""
    fmt = format_(name)
    generator = TestFloat(fmt, seed=1)
    codes = (*generator.pairs(), generator.random(6 * len(generator.special()) ** 2))
    chosen = np.random.default_rng(0).choice(len(codes[0]), 400, replace=False)
    count = {"sqrt": 1, "fma": 3}.get(operation, 2)
    operands = [fmt.decode(c[chosen].astype(fmt.code_dtype)) for c in codes[:count]]
    for rounding, want in expected(fmt, operation, operands).items():
        arithmetic = Arithmetic(fmt, rounding)
        with arithmetic.context():
            carried = [jnp.asarray(x, arithmetic.carrier) for x in operands]
            got = np.asarray(getattr(arithmetic, operation)(*carried), np.float64)
        np.testing.assert_array_equal(got, want, rounding)
        number = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(want)[number], rounding)


def test_a_sum_just_below_a_number_of_the_format():
    """The carrier's sum is that number, and only the sum's error tells."""
    a, b = [7612.0, 7612.0, -7612.0], [-2.0325183868408203e-06, 2.0325183868408203e-06, 2.0**-24]
    want = {
        "toward_zero": [7608, 7612, -7608],
        "toward_positive": [7612, 7616, -7608],
        "toward_negative": [7608, 7612, -7612],
        "away_from_zero": [7612, 7616, -7612],
        "nearest_even": [7612, 7612, -7612],
    }
    for rounding, numbers in want.items():
        arithmetic = Arithmetic(format_("fp16"), rounding)
        assert on(arithmetic, arithmetic.add, a, b).tolist() == numbers
        assert on(arithmetic, arithmetic.sub, a, np.negative(b)).tolist() == numbers


def test_a_constant_divisor():
    """XLA multiplies by the rounded reciprocal of a constant: 49 (1/49) is below 1."""
    arithmetic = Arithmetic(format_("fp16"), "toward_zero")
    a = np.arange(1024.0, 2048.0)
    for b in (49.0, 1721.0):
        got = on(arithmetic, lambda a, b=b: arithmetic.div(a, arithmetic.const(b)), a)
        want = arithmetic.fmt.decode(arithmetic.fmt.encode(a / b, rounding="toward_zero"))
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("rounding", ["toward_positive", *nightly(["nearest_even", "toward_zero"])])
def test_shifts_beyond_the_carrier(rounding):
    """Neither a zero nor an infinity that is not the rounding's own."""
    fmt = format_("e5m2")
    arithmetic = Arithmetic(fmt, rounding)
    a = np.array([1.5, -1.5, 0.0, np.inf])
    for k in (-300, 300):
        exact = np.array([1.5, -1.5, 0, np.inf]) * 2.0**k
        want = fmt.decode(fmt.encode(exact, rounding=rounding))
        for by in (k, jnp.full(4, k)):
            got = np.asarray(arithmetic.shift(jnp.asarray(a, np.float32), by))
            np.testing.assert_array_equal(got, want)


def sequential(terms):
    total = np.float16(0)
    for t in terms:
        total = total + t
    return total


def compensated(terms):
    total = lost = np.float16(0)
    for t in terms:
        y = t - lost
        new = total + y
        lost = (new - total) - y
        total = new
    return total


def pairwise(terms):
    while len(terms) > 1:
        terms = np.append(terms, np.float16(0)) if len(terms) % 2 else terms
        terms = terms[: len(terms) // 2] + terms[len(terms) // 2 :]
    return terms[0]


def blocked(terms):
    return sequential([sequential(terms[i : i + 32]) for i in range(0, len(terms), 32)])


@pytest.mark.parametrize("reference", [sequential, blocked, pairwise, compensated])
@pytest.mark.parametrize("n", [5, *nightly([130])])
def test_orders_of_summation_bit_for_bit_as_numpys_halves(reference, n):
    terms = np.random.default_rng(n).random(n).astype(np.float16)
    arithmetic = Arithmetic(format_("fp16"))
    got = accumulate(arithmetic, jnp.asarray(terms, jnp.float32), reference.__name__)
    assert float(got) == float(reference(terms))


def test_where_sums_stall():
    """1 more is nothing to 2048 in FP16, to 256 in BF16."""
    ones = jnp.ones(4096, jnp.float32)
    assert float(accumulate(Arithmetic(format_("fp16")), ones, "sequential")) == 2048
    bf16 = Arithmetic(format_("bf16"))
    with bf16.context():
        assert float(accumulate(bf16, jnp.ones(1000, jnp.float64), "sequential")) == 256


def test_invalid_arguments_are_rejected():
    with pytest.raises(ValueError, match="fp64 has 53 significant bits; expected up to 25"):
        Arithmetic(format_("fp64"))
    for rounding in ("up", "stochastic"):
        with pytest.raises(ValueError, match=f"rounding is '{rounding}'; expected one of 'near"):
            Arithmetic(format_("fp16"), rounding)
    with pytest.raises(ValueError, match=r"e11m3 has magnitudes from .*; expected 2\^-510"):
        Arithmetic(Format("e11m3", 11, 3))
    with pytest.raises(ValueError, match="order is 'random'; expected one of 'sequential'"):
        accumulate(Arithmetic(format_("fp16")), jnp.ones(3), "random")


def test_of_no_terms_the_sum_is_zero():
    assert accumulate(Arithmetic(Format("e6m9", 6, 9)), jnp.ones((2, 0)), "pairwise").tolist() == [
        0,
        0,
    ]
