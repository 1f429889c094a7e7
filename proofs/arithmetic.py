"""Compares ``ops.Arithmetic`` with exact rationals, every operation in every rounding mode.

Operands are all pairs of numbers of 8-bit formats; of 16-bit formats, those of TestFloat (Hauser,
release 3e, level 1): all pairs of its special exponents and fractions, and its random operands
beside them. Expected results are Fractions, located between two neighbours of the format by integer
division; NaN, infinities and zeros are those of NumPy's float64. ``python -m proofs.arithmetic``
prints the number of comparisons and of mismatches; names of formats restrict it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from proofs.oracle import DETERMINISTIC, STAYS_FINITE, of_magnitude
from scalewise.formats import Format
from scalewise.formats import format as format_
from scalewise.ops import Arithmetic

FORMATS = (
    "fp16", "bf16", "e4m3fn", "e5m2", "e4m3", "e3m4", "e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz",
)  # fmt: skip
TRIPLES = 65536  # operands of a * b + c
EXACTLY: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "fma": lambda a, b, c: a * b + c,
}
IN_FLOAT64: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "fma": lambda a, b, c: a * b + c,
    "sqrt": np.sqrt,
}


class Place(NamedTuple):
    """The position of an exact magnitude among the numbers of a format.

    Attributes:
        code: of the largest number that is no larger.
        rest: 0 on that number, 1 below the middle to the next number, 2 in the middle, 3 above.
    """

    code: int
    rest: int


def place(fmt: Format, numerator: int, denominator: int) -> Place:
    """Returns the place of a positive rational; codes continue above the largest number."""
    assert fmt.subnormals
    exponent = numerator.bit_length() - denominator.bit_length()
    exponent -= numerator << max(-exponent, 0) < denominator << max(exponent, 0)
    binade = max(exponent, fmt.min_exponent)
    last = binade - fmt.mantissa_bits
    whole, rest = divmod(numerator << max(-last, 0), denominator << max(last, 0))
    below = (rest > 0) + (2 * rest >= denominator << max(last, 0)) * (rest > 0)
    above = 2 * rest > denominator << max(last, 0)
    return Place(whole + ((binade - fmt.min_exponent) << fmt.mantissa_bits), below + above)


def place_of_root(fmt: Format, x: Fraction) -> Place:
    """The place of a positive number's square root, by an integer root of 40 bits and more."""
    shift = 2 * (fmt.precision + 20 + abs(fmt.min_exponent))
    scaled = (x.numerator << shift) // x.denominator
    root = math.isqrt(scaled)
    exact = root * root * x.denominator == x.numerator << shift
    return place(fmt, 2 * root + (not exact), 2 << (shift // 2))  # a half: more than root


def rounded(fmt: Format, rounding: str, places: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """Returns the float64 numbers to which magnitudes at the places (n, 2) round."""
    codes, rest = places[:, 0], places[:, 1]
    result = np.empty(len(codes))
    for sign in (False, True):
        mode = of_magnitude(rounding, sign)
        odd = codes % 2 == 1
        up = {
            "nearest_even": (rest == 3) | ((rest == 2) & odd),
            "nearest_away": rest >= 2,
            "toward_zero": rest < 0,
            "away_from_zero": rest > 0,
            "to_odd": (rest > 0) & ~odd,
        }[mode]
        code = codes + up
        beyond = np.inf if fmt.infinities else np.nan
        over = np.where(STAYS_FINITE[mode], float(fmt.max), beyond)
        size = np.where(code > fmt.max_code, over, fmt.decode(np.minimum(code, fmt.max_code)))
        result = np.where(negative == sign, -size if sign else size, result)
    return result


def expected(fmt: Format, operation: str, operands: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the correctly rounded results in float64 for each rounding mode."""
    with np.errstate(all="ignore"):
        special = IN_FLOAT64[operation](*operands)
    finite = np.logical_and.reduce([np.isfinite(x) for x in operands])
    finite &= ~np.isnan(special)
    if operation == "div":
        finite &= operands[1] != 0
    places = np.zeros((len(special), 2), np.int64)
    negative, nonzero = np.zeros(len(special), bool), np.zeros(len(special), bool)
    exact = {x: Fraction(x) for x in np.unique(np.concatenate(operands)) if np.isfinite(x)}
    for i in np.flatnonzero(finite):
        numbers = [exact[float(x[i])] for x in operands]
        if operation == "sqrt":
            if numbers[0]:
                nonzero[i], places[i] = True, place_of_root(fmt, numbers[0])
            continue
        value = EXACTLY[operation](*numbers)
        if value:
            nonzero[i], negative[i] = True, value < 0
            places[i] = place(fmt, abs(value.numerator), value.denominator)
    return {
        rounding: _with_special(fmt, rounding, operation, operands, special, nonzero)(
            rounded(fmt, rounding, places, negative)
        )
        for rounding in DETERMINISTIC
    }


def _with_special(fmt, rounding, operation, operands, special, nonzero):
    """Fills in the results that are zero, infinite or NaN."""
    other = special.copy()
    if rounding == "toward_negative" and operation in ("add", "sub", "fma"):
        terms = {"fma": lambda a, b, c: (a * b, c), "sub": lambda a, b: (a, -b)}
        with np.errstate(all="ignore"):
            a, b = terms.get(operation, lambda a, b: (a, b))(*operands)
        positive = ~np.signbit(a) & ~np.signbit(b) & (a == 0) & (b == 0)
        other = np.where((special == 0) & ~positive, -0.0, other)
    if not fmt.infinities:
        other = np.where(np.isinf(other), np.nan, other)

    def fill(numbers: np.ndarray) -> np.ndarray:
        both = np.where(nonzero, numbers, other)
        return both if fmt.negative_zero else np.where(both == 0, 0.0, both)

    return fill


# -- operands ------------------------------------------------------------------------------------


class TestFloat:
    """TestFloat's operands for a format of any widths: codes by special exponents and fractions."""

    __test__ = False

    def __init__(self, fmt: Format, seed: int = 0):
        assert fmt.bias is not None
        self.fmt, self.bias, self.rng = fmt, fmt.bias, np.random.default_rng(seed)
        m, bias, top = fmt.mantissa_bits, fmt.bias, 2**fmt.exponent_bits - 1
        inner = [1, bias - m - 1, bias - 2, bias - 1, bias, bias + 1, bias + 2, bias + m + 1]
        self.exponents = self._fields([0, *inner, top - 1, top])
        outer = [2, bias - 4, bias - 3, bias + 3, bias + 4, top - 2]
        self.more_exponents = self._fields([0, *inner, *outer, top - 1, top])
        last = 2**m - 1
        single = [1 << k for k in range(m)]
        leading = [last ^ (2**k - 1) for k in range(m)]
        trailing = [2**k - 1 for k in range(1, m)]
        self.fractions = np.unique([0, last & 1, last, max(last - 1, 0)])
        cleared = [last ^ bit for bit in single]
        self.more_fractions = np.unique([0, *single, *leading, *cleared, *trailing])

    def _fields(self, exponents: list[int]) -> np.ndarray:
        fmt = self.fmt
        inside = sorted({e for e in exponents if 0 <= e < 2**fmt.exponent_bits})
        fields = np.array(inside, np.int64) << fmt.mantissa_bits
        return np.concatenate([fields, fields | (1 << (fmt.bits - 1))])

    def special(self) -> np.ndarray:
        """Every special exponent with every special fraction (TestFloat's QIn and P1)."""
        return (self.exponents[:, None] | self.fractions).ravel()

    def random(self, count: int) -> np.ndarray:
        """Special or concentrated exponents with sums of special fractions, or with any."""
        rng, fmt = self.rng, self.fmt
        last = 2**fmt.mantissa_bits - 1
        fractions = sum(rng.choice(self.more_fractions, count) for _ in range(2)) & last
        fractions = np.where(rng.random(count) < 0.25, rng.integers(0, last + 1, count), fractions)
        spread = rng.choice([0, 0, 1, 2], count)  # all exponents, or a half, a quarter around 1
        half = 2 ** (fmt.exponent_bits - 1)
        near = self.bias + rng.integers(-half, half, count) // 2**spread
        near = np.clip(near, 0, 2**fmt.exponent_bits - 1) << fmt.mantissa_bits
        near |= rng.integers(0, 2, count) << (fmt.bits - 1)
        some = rng.choice(self.more_exponents, count)
        return np.where(rng.random(count) < 0.5, some, near) | fractions

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Codes: all pairs of special operands; special beside random ones; three times random."""
        a, b = (x.ravel() for x in np.meshgrid(self.special(), self.special(), indexing="ij"))
        n = len(a)
        left = [a, a, self.random(n), *(self.random(n) for _ in range(3))]
        right = [b, self.random(n), b, *(self.random(n) for _ in range(3))]
        return np.concatenate(left), np.concatenate(right)

    def triples(self, count: int) -> tuple[np.ndarray, ...]:
        """Codes: each operand special or random, in all eight ways alike."""
        special = self.special()
        ways = self.rng.integers(0, 8, count)
        return tuple(
            np.where((ways >> i) & 1, self.rng.choice(special, count), self.random(count))
            for i in range(3)
        )


def operands(fmt: Format, operation: str, count: int) -> list[np.ndarray]:
    """Returns the operands, numbers of the format, in float64."""
    generator = TestFloat(fmt)
    if operation == "sqrt":
        codes = (np.arange(2**fmt.bits),)
    elif operation == "fma":
        codes = generator.triples(count)
    elif fmt.bits <= 8:
        codes = tuple(x.ravel() for x in np.meshgrid(*2 * [np.arange(2**fmt.bits)]))
    else:
        codes = generator.pairs()
    return [fmt.decode(x.astype(fmt.code_dtype)) for x in codes]


def mismatches(
    arithmetic: Arithmetic, operation: str, numbers: Sequence[np.ndarray], want: np.ndarray
) -> np.ndarray:
    """Returns where the results differ, including the signs of zero."""
    with arithmetic.context():
        run = jax.jit(getattr(arithmetic, operation))
        got = np.asarray(run(*(jnp.asarray(x, arithmetic.carrier) for x in numbers)), np.float64)
    same = (got == want) & (np.signbit(got) == np.signbit(want))
    return np.flatnonzero(~same & ~(np.isnan(got) & np.isnan(want)))


def main() -> None:
    compared = wrong = 0
    for name in sys.argv[1:] or FORMATS:
        fmt, line = format_(name), []
        for operation in IN_FLOAT64:
            numbers = operands(fmt, operation, TRIPLES)
            bad = 0
            for rounding, want in expected(fmt, operation, numbers).items():
                where = mismatches(Arithmetic(fmt, rounding), operation, numbers, want)
                bad += len(where)
                compared += len(want)
                for i in where[:2]:
                    shown = ", ".join(repr(float(x[i])) for x in numbers)
                    print(f"{name} {rounding} {operation}({shown}) is {want[i]!r}")
            wrong += bad
            line.append(f"{operation} {len(numbers[0]):,}")
        print(f"{name:<12} x {len(DETERMINISTIC)} roundings: {', '.join(line)}", flush=True)
    print(f"{compared:,} results of Arithmetic against exact rationals: {wrong} mismatches")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
