"""The norm by sums in fixed point, digit by digit, with integer exponents beside them: our best.

The squares of a block are brought to one power of two and cut into digits: integers so small that a
format of p bits adds a block of them without a rounding (all integers up to 2^p are its numbers, or
are so times a power of two). So a block's sum errs only by what lies below its last digit, nothing
overflows, nothing is swamped, and no order of summation makes a difference. Which is why all digits
of a number can be carried in one integer here: what the machine would add, digit by digit and carry
by carry, is exactly that integer. Sums of blocks are aligned and added in the same way.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._check import Count, checked
from .._resolve import as_format
from ..formats import Format, FormatLike
from ..rounding import round_bits
from ..scaled import power_of_two
from ._arithmetic import Arithmetic, pad

NO_EXPONENT = -(1 << 20)  # of a sum that is zero: less than any other
BLOCK = 16  # numbers behind one scale
WIDEST = 62  # bits of a sum that an int64 carries beside its sign


@dataclasses.dataclass(frozen=True)
class SumPlan:
    """How many digits of squares are kept for a sum of the required accuracy.

    Attributes:
        kept: bits below the power of two over a block's largest number (its square): even.
        whole: whether that holds every square of the format whole, and nothing is cut off.
        error: a bound on the relative error of the sum.
    """

    kept: int
    whole: bool
    error: float

    @property
    def integer(self) -> type[np.int32 | np.int64]:
        """Returns the dtype that carries a sum."""
        return np.int32 if self.kept + BLOCK.bit_length() <= 31 else np.int64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled:
    """``total * 2^exponent``, elementwise, both integers; the exponent has no bound."""

    total: jax.Array
    exponent: jax.Array  # int32


@dataclasses.dataclass(frozen=True)
class Root:
    """``exact * 2^exponent``; significand is exact rounded to the format.

    The significand is zero, NaN (of a negative sum), or near the middle of the format's exponents.
    """

    significand: jax.Array
    exponent: jax.Array  # int32
    exact: jax.Array  # float64

    def value(self, fmt: Format) -> jax.Array:
        """The number of the format, in float64: rounded once, also where it is subnormal."""
        with jax.enable_x64(True):
            power = power_of_two(jnp.clip(self.exponent, -1000, 1000), np.float64)
            return round_bits(self.exact * power, fmt)


def plan(arithmetic: Arithmetic, n: int, cancels: bool = False) -> SumPlan:
    """The fewest bits with which a sum of n squares errs by u/4 or less, and its root by u/8.

    If the sum may be cancelled by a negative epsilon: by u^2/4. With q the last digit's unit and B
    numbers in a block, squares are cut twice (what their rounding keeps, and what it loses) by q/2
    each, and the sum is 1/4 or more: 4 B q. Sums of blocks are cut by q and are 1/2 or more: 2 B q
    at each further level; epsilon is one more.
    """
    fmt, u = arithmetic.fmt, 2.0**-arithmetic.fmt.precision
    levels = max(1, math.ceil(math.log2(max(n, 1)) / math.log2(BLOCK))) + 1
    target = u**2 / 4 if cancels else u / 4
    each = 4 * BLOCK * (1 if arithmetic.rounding == "nearest_even" else 2)  # cut by q then
    kept = _even(math.ceil(math.log2(levels * each / target)))
    # squares are formed below 2^(2 top): q, and the squares that count, have to be its numbers
    top = top_exponent(fmt)
    least = max(float(fmt.smallest), 2 * float(fmt.smallest_normal) ** 2)
    room = int(2 * top - math.log2(least)) // 2 * 2
    widest = WIDEST - BLOCK.bit_length() + 1
    every = _even(2 * math.ceil(math.log2(float(fmt.max / fmt.smallest)) + 1))
    if kept > room and every <= widest:  # digits that have exponents of their own
        kept = max(kept, every)
        return SumPlan(kept, True, (levels - 1) * each * 2.0**-kept)
    kept = min(kept, room, widest)
    return SumPlan(kept, False, levels * each * 2.0**-kept)


def _even(k: int) -> int:
    return k + k % 2


def top_exponent(fmt: Format) -> int:
    """The t for which squares of numbers below 2^t don't overflow."""
    full = fmt.max == (2 - fmt.eps) * 2**fmt.max_exponent
    return (fmt.max_exponent + full) // 2


@checked
def ulp_bound(fmt: FormatLike, n: Count) -> float:
    """A bound on the error of ``auto``'s norm of n numbers, in ulps of the result.

    Half an ulp is the least that any result in the format can promise. Added to it are half
    the relative error of the sum of squares, over an ulp, which is at least u, and the error of
    float64, in which the root is emulated.
    """
    fmt = as_format(fmt, "ulp_bound")
    arithmetic = Arithmetic(fmt, "nearest_even" if fmt.signed else "toward_zero")
    p = fmt.precision
    return 0.5 + plan(arithmetic, n).error / 2 * 2.0**p + 2.0 ** (p - 53)


def auto_norm(
    arithmetic: Arithmetic, a: jax.Array, eps: jax.Array | None, nonnegative: bool
) -> Root:
    """Returns sqrt(sum a^2 + eps) of finite magnitudes; ``nonnegative``: eps is known not to be
    negative."""
    p = plan(arithmetic, a.shape[-1], not nonnegative)
    total = sum_of_squares(arithmetic, a, p)
    if eps is not None:
        total = add(total, scaled(arithmetic, eps, p), p)
    return root_of(arithmetic, total)


def sum_of_squares(arithmetic: Arithmetic, a: jax.Array, p: SumPlan) -> Scaled:
    with jax.enable_x64(True):
        blocks, largest = _blocks(arithmetic, a)
        units = _squares(arithmetic, blocks, largest[..., None, :], p)
        return _sum_of_sums(_sum(units, 2 * largest - p.kept, p), p)


def sum_of(arithmetic: Arithmetic, a: jax.Array, p: SumPlan) -> Scaled:
    """The sum along the last axis, of any signs: the error is of the sum of magnitudes."""
    with jax.enable_x64(True):
        blocks, largest = _blocks(arithmetic, a)
        up = arithmetic.power(p.kept - largest)[..., None, :]
        units = _cut(arithmetic, blocks * up)
        return _sum_of_sums(_sum(units, largest - p.kept, p), p)


def _blocks(arithmetic: Arithmetic, a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(..., BLOCK, m), and (..., m) the exponents of powers of two above all of each block."""
    m = -(-max(a.shape[-1], 1) // BLOCK)
    a = pad(a, BLOCK * m - a.shape[-1]).reshape(*a.shape[:-1], BLOCK, m)
    return a, arithmetic.exponent(jnp.max(jnp.abs(a), axis=-2)) + 1


def _squares(arithmetic: Arithmetic, a: jax.Array, largest: jax.Array, p: SumPlan) -> jax.Array:
    """The squares of numbers below 2^largest in units of the last digit, whole, as floats.

    The square and what its rounding has lost are cut into digits each for itself. They are formed
    at the top of the format's range, so what is flushed there is below half a unit.
    """
    fmt = arithmetic.fmt
    if p.whole:
        x = a * arithmetic.power(p.kept // 2 - largest)
        return x * x
    top = top_exponent(fmt)
    if 2.0 ** (2 * top - p.kept) >= 2 * float(fmt.smallest_normal):  # none that counts is subnormal
        x = a * arithmetic.power(p.kept // 2 - largest)
        exact = x * x
        square = arithmetic.significand(exact)
        return _cut(arithmetic, square) + _cut(arithmetic, exact - square)
    x = a * arithmetic.power(top - largest)
    exact = x * x
    square = arithmetic.round(exact)
    lost = arithmetic.round(exact - square)
    unit = arithmetic.const(2.0 ** (p.kept - 2 * top))
    return _cut(arithmetic, square * unit) + _cut(arithmetic, lost * unit)


def _cut(arithmetic: Arithmetic, x: jax.Array) -> jax.Array:
    """A whole number of units: what lies below the last digit is rounded away."""
    if arithmetic.rounding == "toward_zero":
        return jnp.floor(x)
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _sum(units: jax.Array, exponent: jax.Array, p: SumPlan) -> Scaled:
    return Scaled(jnp.sum(units.astype(p.integer), axis=-2, dtype=p.integer), exponent)


def _sum_of_sums(s: Scaled, p: SumPlan) -> Scaled:
    while (m := s.total.shape[-1]) > 1:
        block = min(BLOCK, 1 << (m - 1).bit_length())
        fill = -m % block

        def shaped(x: jax.Array, block: int = block, fill: int = fill) -> jax.Array:
            return pad(x, fill).reshape(*x.shape[:-1], block, -1)

        s = _aligned_sum(Scaled(shaped(s.total), shaped(s.exponent)), p)
    return Scaled(s.total[..., 0], s.exponent[..., 0])


def _aligned_sum(s: Scaled, p: SumPlan) -> Scaled:
    """The sums over the last axis but one: all moved to the largest one's exponent, then added.

    Digits that fall off at the end are cut, not rounded: that takes no carry.
    """
    length = np.iinfo(p.integer).bits - lax.clz(jnp.abs(s.total)).astype(np.int32)
    size = jnp.where(s.total == 0, NO_EXPONENT, s.exponent + length)
    top = jnp.max(size, axis=-2)
    up = jnp.where(s.total == 0, 0, s.exponent + p.kept - top[..., None, :])
    bits = np.iinfo(p.integer).bits - 1
    left = s.total << jnp.clip(up, 0, bits).astype(p.integer)
    right = s.total >> jnp.clip(-up, 0, bits).astype(p.integer)
    total = jnp.sum(jnp.where(up >= 0, left, right), axis=-2, dtype=p.integer)
    return Scaled(total, top - p.kept)


def add(a: Scaled, b: Scaled, p: SumPlan) -> Scaled:
    with jax.enable_x64(True):
        pair = jax.tree.map(lambda x, y: jnp.stack([x, y])[..., None], a, b)
        s = _aligned_sum(jax.tree.map(lambda x: jnp.moveaxis(x, 0, -2), pair), p)
        return Scaled(s.total[..., 0], s.exponent[..., 0])


def scaled(arithmetic: Arithmetic, x: jax.Array, p: SumPlan) -> Scaled:
    """A number of the format, of either sign."""
    with jax.enable_x64(True):
        size = arithmetic.exponent(x) + 1
        units = x * arithmetic.power(p.kept - size)
        return Scaled(units.astype(p.integer), size - p.kept)


def constant(x: float, exponent: jax.Array, p: SumPlan) -> Scaled:
    """``x * 2^exponent`` for a positive constant x, cut to digits beforehand."""
    with jax.enable_x64(True):
        m, e = math.frexp(x)
        total = jnp.full_like(exponent, round(math.ldexp(m, p.kept)), p.integer)
        return Scaled(total, exponent + (e - p.kept))


def rounded(arithmetic: Arithmetic, s: Scaled) -> tuple[jax.Array, jax.Array]:
    """A sum as one number of the format near the middle of its exponents, and 2's exponent."""
    with jax.enable_x64(True):
        x, exponent = _middle(arithmetic.fmt, s.total.astype(np.float64), s.exponent)
        x = round_bits(x, arithmetic.fmt, rounding=arithmetic.rounding)
        return x.astype(arithmetic.carrier), exponent


def root_of(arithmetic: Arithmetic, s: Scaled) -> Root:
    """Returns the square root of all digits, rounded once.

    The machine takes the root of the leading ones and sets the last bit right by the sign of what
    its square leaves, in the same digits. Here float64 does: it holds up to 53 bits of the sum, and
    a root whose square has fewer isn't nearer to a middle of the format's numbers than 2^-53.
    """
    fmt = arithmetic.fmt
    with jax.enable_x64(True):
        odd = s.exponent % 2
        total = s.total.astype(np.float64)
        root = jnp.sqrt(jnp.maximum(jnp.where(odd == 0, total, 2 * total), 0))
        root, k = _middle(fmt, root, (s.exponent - odd) // 2)
        root = jnp.where(s.total < 0, np.float64(np.nan), root)
        k = jnp.where(s.total > 0, k, 0)
        return Root(round_bits(root, fmt).astype(arithmetic.carrier), k, root)


def middle(fmt: Format) -> int:
    return (fmt.min_exponent + fmt.max_exponent) // 2


def _middle(fmt: Format, x: jax.Array, exponent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same product with a float64 in the middle of the format's exponents; zero stays."""
    field = (lax.bitcast_convert_type(x, np.int64) >> 52) & 0x7FF
    down = jnp.where(x == 0, 0, field.astype(np.int32) - 1023 - middle(fmt))
    return x * power_of_two(-down, np.float64), exponent + down
