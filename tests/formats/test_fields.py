"""bits: sign, exponent and fraction of a number, beside struct's and NumPy's own bits."""

import math
import struct
from decimal import Decimal

import numpy as np
import pytest

import scalewise as sw
from scalewise.formats import CATALOGUE, bits

NUMBERS = [0.15625, -118.625, 0.0, -0.0, 1.0, 2.0**-24, 65504.0, math.inf, -math.inf, 3.14159]


@pytest.mark.parametrize("x", NUMBERS)
@pytest.mark.parametrize(("name", "code", "e"), [("fp16", ">e", 5), ("fp32", ">f", 8)])
def test_the_fields_are_those_of_ieee_754(x, name, code, e):
    text = "".join(f"{byte:08b}" for byte in struct.pack(code, x))
    b = bits(x, name)
    assert str(b) == f"{text[0]} {text[1 : 1 + e]} {text[1 + e :]}"
    assert (b.sign, b.exponent, b.fraction) == tuple(int(s, 2) for s in str(b).split())


@pytest.mark.parametrize("fmt", CATALOGUE.values(), ids=lambda f: f.name)
def test_the_formula_gives_the_value_of_each_code(fmt):
    for code in range(0, 2**fmt.bits, max(1, 2**fmt.bits // 256)):
        x = float(fmt.decode(code))
        if not math.isfinite(x):
            continue
        b = bits(x, fmt)
        assert b.value == x
        assert sum(map(len, str(b).split())) == fmt.bits
        formula, shown = repr(b).split("  ")[1].split(" = ")
        power, significand = formula.removeprefix("-").split(" * ")
        sign = -1 if formula.startswith("-") else 1
        assert sign * 2.0 ** int(power[2:]) * eval(significand) == x == float(shown)


def test_a_number_is_rounded():
    assert bits(1 + 2.0**-11, "fp16") == bits(1.0, np.float16)
    assert repr(bits(math.nan, "bf16")).endswith("nan")


@pytest.mark.parametrize("name", ["fp16", "fp32", "fp64"])
def test_the_value_has_all_its_digits(name):
    b = bits(0.01, name)
    assert Decimal(repr(b).split(" = ")[1]) == Decimal(b.value)


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="fp17"):
        sw.formats.bits(1.0, "fp17")
