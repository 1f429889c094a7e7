"""``auto``'s sums against a machine that has nothing but the format: digit by digit, carries too.

Here every number that occurs is checked to be one of the format, and every result that isn't exact
is rounded to it, by NumPy and the format's own codes.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import nightly
from scalewise.formats import Format
from scalewise.formats import format as format_
from scalewise.ops import Arithmetic
from scalewise.ops._auto import BLOCK, Scaled, _aligned_sum, plan, sum_of_squares, top_exponent

UNSIGNED = Format("ue5m11", 5, 11, signed=False)


class Machine:
    """One format; its numbers are float64, its integers (exponents) Python's."""

    def __init__(self, arithmetic, kept):
        fmt = arithmetic.fmt
        self.fmt, self.kept, self.cut = fmt, kept, np.rint if fmt.signed else np.floor
        self.mode = arithmetic.rounding
        self.width = max(1, fmt.precision // 2 + 1)  # bits of a digit
        # carries leave 2^(width - 1) or 2^width, deposits add as much, 2^p is the most
        full = self.width - (1 if fmt.signed else 0)
        self.between = 2 ** (fmt.precision - full) - 1
        self.digits = -(-(kept + BLOCK.bit_length() + 2) // self.width)

    def round(self, x):
        return float(self.fmt.decode(self.fmt.encode(x, rounding=self.mode)))

    def exact(self, x):
        assert self.round(x) == x, x
        return x

    def deposit(self, digits, v, unit):
        """Adds v to digits of that last unit, the most significant first."""
        for i in range(self.digits):
            k = self.width * (self.digits - 1 - i)
            d = self.exact(float(self.cut(v / unit / 2.0**k)))
            v = self.exact(v - d * 2.0**k * unit) if d else v
            digits[i] = self.exact(digits[i] + d)

    def carry(self, digits, cut=None):
        for i in range(self.digits - 1, 0, -1):
            c = self.exact(float((cut or self.cut)(digits[i] / 2.0**self.width)))
            digits[i] = self.exact(digits[i] - c * 2.0**self.width)
            digits[i - 1] = self.exact(digits[i - 1] + c)

    def squares(self, block):
        """Digits of the sum of a block's squares, and the last one's exponent."""
        top = top_exponent(self.fmt)
        largest = math.frexp(max(block))[1]
        unit = 2.0 ** (2 * top - self.kept)
        digits, since = [0.0] * self.digits, 0
        for a in block:
            x = self.round(math.ldexp(a, top - largest))
            square = self.round(x * x)
            lost = self.round(x * x - square)  # a fused multiply-add
            for v in (square, lost):
                if since == self.between:
                    self.carry(digits)
                    since = 0
                self.deposit(digits, v, unit)
                since += 1
        self.carry(digits, np.floor)  # from here on none but the first is negative
        return digits, 2 * largest - self.kept

    def down(self, digits, by):
        """Digits moved down by so many places of two: what falls off is gone."""
        whole, part = divmod(by, self.width)
        digits = [0.0] * min(whole, self.digits) + digits[: max(self.digits - whole, 0)]
        out, above = [], 0.0
        for d in digits:
            high = self.exact(float(np.floor(d / 2.0**part)))
            out.append(self.exact(high + self.exact(above * 2.0 ** (self.width - part))))
            above = self.exact(d - high * 2.0**part)
        return out

    def value(self, digits):
        return sum(int(d) << self.width * (self.digits - 1 - i) for i, d in enumerate(digits))


def vectors(fmt, count):
    rng = np.random.default_rng(count)
    codes = rng.integers(0, fmt.max_code + 1, (count, BLOCK))
    any_size = fmt.decode(codes)
    near = fmt.decode(fmt.encode(rng.uniform(0.5, 2, (count, BLOCK))))
    return np.concatenate([any_size, near, np.sort(any_size[:2], axis=1)])


@pytest.mark.parametrize("name", nightly(["fp16", "bf16", "e5m2", "e4m3", "dlfloat16", "ue5m11"]))
def test_a_blocks_sum_is_what_the_machine_adds_up(name):
    fmt = UNSIGNED if name == "ue5m11" else format_(name)
    arithmetic = Arithmetic(fmt, "nearest_even" if fmt.signed else "toward_zero")
    p = plan(arithmetic, 4096)
    assert not p.whole
    machine = Machine(arithmetic, p.kept)
    x = vectors(fmt, 12)
    with arithmetic.context():
        got = sum_of_squares(arithmetic, jnp.asarray(x, arithmetic.carrier), p)
    for row, total, exponent in zip(x, got.total.tolist(), got.exponent.tolist(), strict=True):
        digits, last = machine.squares(row)
        assert (machine.value(digits), last) == (total, exponent)


@pytest.mark.parametrize("name", ["fp16", "e4m3"])
def test_aligned_sums_are_what_the_machine_adds_up(name):
    arithmetic = Arithmetic(format_(name))
    p = plan(arithmetic, 4096)
    machine = Machine(arithmetic, p.kept)
    rng = np.random.default_rng(0)
    for spread in (1, 5, 60):
        totals = rng.integers(1, 1 << p.kept, 4)
        exponents = rng.integers(-spread, spread + 1, 4)
        with jax.enable_x64(True):
            columns = jnp.asarray(totals, p.integer), jnp.asarray(exponents, np.int32)
            s = Scaled(*(c[:, None] for c in columns))
            got = _aligned_sum(s, p)
        size = max(int(t).bit_length() + int(e) for t, e in zip(totals, exponents, strict=True))
        assert int(got.exponent[0]) == size - p.kept
        want = 0
        for t, e in zip(totals.tolist(), exponents.tolist(), strict=True):
            by = size - p.kept - e
            digits = [float(t >> machine.width * i & (1 << machine.width) - 1)
                      for i in reversed(range(machine.digits))]  # fmt: skip
            want += machine.value(machine.down(digits, by)) if by >= 0 else t << -by
        assert int(got.total[0]) == want
