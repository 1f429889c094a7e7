"""Published algorithms for a norm in one format, and corrected versions of them.

All take finite magnitudes ``a`` (..., n) of an arithmetic's format and an epsilon (...) or None,
and return (...). In which order ``add_up`` adds is the caller's choice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from .._check import Count, checked
from .._resolve import as_format
from ..formats import FP32, FormatLike
from ._arithmetic import Arithmetic, add_up, check_order
from ._auto import top_exponent


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a method works with: arithmetic, order of summation, and threshold, None for its own."""

    arithmetic: Arithmetic
    order: str
    block: int
    beta: float | None = None

    def add_up(self, terms: jax.Array) -> jax.Array:
        return add_up(terms, arithmetic=self.arithmetic, order=self.order, block=self.block)

    def squares(self, a: jax.Array) -> jax.Array:
        return self.add_up(self.arithmetic.mul(a, a))

    def plus(self, total: jax.Array, eps: jax.Array | None) -> jax.Array:
        return total if eps is None else self.arithmetic.add(total, eps)


Method = Callable[[Setting, jax.Array, jax.Array | None], jax.Array]


def direct(s: Setting, a: jax.Array, eps: jax.Array | None) -> jax.Array:
    return s.arithmetic.sqrt(s.plus(s.squares(a), eps))


def max_normalised(s: Setting, a: jax.Array, eps: jax.Array | None) -> jax.Array:
    """x ||a / x||, x the largest: LAPACK's before 3.10. Epsilon is divided by x twice.

    As published: that overflows where epsilon exceeds x^2 max, and the norm is then infinite.
    """
    A = s.arithmetic
    x = _largest(a)
    safe = jnp.where(x > 0, x, A.const(1))
    total = s.squares(A.div(a, safe[..., None]))
    if eps is None:
        return A.mul(safe, A.sqrt(total))
    scaled = A.mul(safe, A.sqrt(A.add(total, A.div(A.div(eps, safe), safe))))
    return jnp.where(x > 0, scaled, A.sqrt(eps))


def two_segment_overflow(s: Setting, a: jax.Array, eps: jax.Array | None) -> jax.Array:
    """As published: what is above sqrt(max) apart, divided by the largest; a Taylor step joins.

    It is halved by a shift of the exponent, since twice the sum would overflow.
    """
    A = s.arithmetic
    beta = _nearest(A, math.sqrt(float(A.fmt.max)) if s.beta is None else s.beta)
    x = _largest(a)
    big, rest = _segments(a, a > beta)
    safe = jnp.where(x > 0, x, A.const(1))
    kx = A.mul(A.sqrt(s.squares(A.div(big, safe[..., None]))), safe)
    q = s.plus(s.squares(rest), eps)
    taylor = A.add(kx, A.shift(A.div(q, kx), -1))
    return jnp.where(x <= beta, direct(s, a, eps), taylor)


def two_segment_underflow(s: Setting, a: jax.Array, eps: jax.Array | None) -> jax.Array:
    """As published: what is below sqrt(smallest), zeros apart, is divided by its largest."""
    A = s.arithmetic
    beta = _nearest(A, math.sqrt(float(A.fmt.smallest)) if s.beta is None else s.beta)
    small, rest = _segments(a, (a < beta) & (a > 0))
    x = _largest(small)
    safe = jnp.where(x > 0, x, A.const(1))
    k = A.sqrt(s.squares(A.div(small, safe[..., None])))
    q = A.sqrt(s.plus(s.squares(rest), eps))
    g = A.div(A.mul(k, safe), q)
    root = A.mul(q, A.sqrt(A.add(A.const(1), A.mul(g, g))))
    taylor = A.add(q, A.div(A.mul(A.mul(q, g), g), A.const(2)))
    return jnp.where(x == 0, direct(s, a, eps), jnp.where(g > beta, root, taylor))


def two_segment_overflow_corrected(s: Setting, a: jax.Array, eps: jax.Array | None) -> jax.Array:
    """The same with a beta for n squares in their order, and the exact root instead of Taylor."""
    A = s.arithmetic
    x = _largest(a)
    beta = _safe_exponent(s, a.shape[-1]) if s.beta is None else math.floor(math.log2(s.beta))
    big, rest = _segments(a, a >= A.const(2.0**beta))
    # the largest just below 2^beta: no smaller than need be, so that little falls off below
    k = jnp.where(x < A.const(2.0**beta), 0, A.exponent(x) + 1 - beta)
    total = s.squares(A.shift(big, -k[..., None]))
    total = A.add(total, A.shift(s.squares(rest), -2 * k))
    return _root(A, *_plus(A, total, k, eps))


def two_segment_underflow_corrected(s: Setting, a: jax.Array, eps: jax.Array | None) -> jax.Array:
    """The same where Q may be zero and epsilon negative: the two sums are added, then rooted.

    The small ones' sum is scaled by a power of two; the two meet at the exponent of the larger.
    """
    A = s.arithmetic
    cut = beta_low(A.fmt) if s.beta is None else s.beta
    small, rest = _segments(a, a < A.const(cut))
    x = _largest(small)
    k = jnp.where(x > 0, A.exponent(x) + 1 - _safe_exponent(s, a.shape[-1]), 0)
    tiny = s.squares(A.shift(small, -k[..., None]))
    q, down = _plus(A, s.squares(rest), jnp.zeros_like(k), eps)
    return _root(A, *_scaled_sum(A, tiny, k, q, down))


def power_of_two(s: Setting, a: jax.Array, eps: jax.Array | None) -> jax.Array:
    """2^k ||2^-k a||, so that n squares just fit: exact and cheap scaling, one pass more.

    Epsilon and the sum meet at the exponent of the larger.
    """
    A = s.arithmetic
    x = _largest(a)
    k = jnp.where(x > 0, A.exponent(x) + 1 - _safe_exponent(s, a.shape[-1]), 0)
    total = s.squares(A.shift(a, -k[..., None]))
    return _root(A, *_plus(A, total, k, eps))


def wide_scalar(s: Setting, a: jax.Array, eps: jax.Array | None) -> jax.Array:
    """Products as a dot product's unit has them: exact, and added to a float32 accumulator."""
    wide = Arithmetic(FP32)
    with wide.context():
        x = wide.enter(a)
        total = dataclasses.replace(s, arithmetic=wide).squares(x)
        if eps is not None:
            total = wide.add(total, wide.enter(eps))
        return s.arithmetic.enter(wide.sqrt(total))


def narrow_squares(s: Setting, a: jax.Array, eps: jax.Array | None) -> jax.Array:
    """2^k ||2^-k a|| on a machine whose vectors are narrow and whose scalars are float32.

    Each element is scaled and squared in the format; the sum, epsilon and the root are float32.
    The largest square is a large number of the format, and float32 holds n of it: so no square
    overflows, and none that counts is subnormal.
    """
    A, wide = s.arithmetic, Arithmetic(FP32)
    levels = max(a.shape[-1] - 1, 0).bit_length()
    top = min(top_exponent(A.fmt), (FP32.max_exponent - levels - 2) // 2)
    k = _exponent_above(A, _largest(a)) - top
    if eps is not None:
        k = jnp.maximum(k, (_exponent_above(A, eps) + 1) // 2 - top)
    squares = A.mul(*[A.shift(a, -k[..., None])] * 2)
    with wide.context():
        total = dataclasses.replace(s, arithmetic=wide).add_up(wide.enter(squares))
        if eps is not None:
            total = wide.add(total, wide.shift(wide.enter(eps), -2 * k))
        return A.enter(wide.shift(wide.sqrt(total), k))


def blue(s: Setting, a: jax.Array, eps: jax.Array | None) -> jax.Array:
    """Uses three accumulators for small, middle and large magnitudes (Blue 1978), as LAPACK 3.10.

    Thresholds and scales are Anderson's (ACM TOMS 44:1, 2017, algorithm 978) for any format: with
    Fortran's exponents, whose significands lie in [1/2, 1). Epsilon joins the middle, or the large
    ones where it is beyond half the largest power of two.
    """
    A = s.arithmetic
    low, high, digits = A.fmt.min_exponent + 1, A.fmt.max_exponent + 1, A.fmt.precision
    small_below, big_above = math.ceil((low - 1) / 2), (high - digits + 1) // 2
    up, down = -((low - digits) // 2), -math.ceil((high + digits - 1) / 2)
    is_big, is_small = a > A.const(2.0**big_above), a < A.const(2.0**small_below)
    big, _ = _segments(a, is_big)
    small, rest = _segments(a, is_small)
    middle = jnp.where(is_big, A.const(0), rest)
    large, tiny = (s.squares(A.shift(v, k)) for v, k in ((big, down), (small, up)))
    q = s.squares(middle)
    if eps is not None:
        large_eps, small_eps = _segments(eps, jnp.abs(eps) > A.const(2.0 ** (high - 2)))
        large = A.add(large, A.shift(large_eps, 2 * down))
        q = A.add(q, small_eps)
    with_large = A.shift(A.sqrt(A.add(large, A.shift(q, 2 * down))), -down)
    roots = A.sqrt(jnp.maximum(q, 0)), A.shift(A.sqrt(tiny), -up)
    more, less = jnp.maximum(*roots), jnp.minimum(*roots)
    ratio = A.div(less, jnp.where(more > 0, more, A.const(1)))
    both = A.sqrt(A.mul(A.mul(more, more), A.add(A.const(1), A.mul(ratio, ratio))))
    without = jnp.where(tiny > 0, jnp.where(q == 0, roots[1], both), roots[0])
    difference = A.shift(A.sqrt(A.add(tiny, A.shift(q, 2 * up))), -up)  # epsilon is negative
    without = jnp.where(q < 0, difference, without)
    return jnp.where(large != 0, with_large, without)


METHODS: dict[str, tuple[Method, str]] = {  # and the order of summation where none is asked for
    "direct": (direct, "sequential"),
    "max_normalised": (max_normalised, "sequential"),
    "two_segment_overflow": (two_segment_overflow, "sequential"),
    "two_segment_underflow": (two_segment_underflow, "sequential"),
    "two_segment_overflow_corrected": (two_segment_overflow_corrected, "pairwise"),
    "two_segment_underflow_corrected": (two_segment_underflow_corrected, "pairwise"),
    "power_of_two": (power_of_two, "pairwise"),
    "wide_scalar": (wide_scalar, "sequential"),
    "narrow_squares": (narrow_squares, "sequential"),
    "blue": (blue, "sequential"),
}
# Methods with a threshold, which ``beta`` replaces.
SEGMENTED = tuple(name for name in METHODS if name.startswith("two_segment_"))


def _largest(a: jax.Array) -> jax.Array:
    return jnp.max(a, axis=-1, initial=0)


def _exponent_above(A: Arithmetic, x: jax.Array) -> jax.Array:
    """Returns the least e for which 2^e is above |x|; for 0 the format's least."""
    return jnp.where(x == 0, A.fmt.min_exponent - A.fmt.mantissa_bits, A.exponent(x) + 1)


def _plus(
    A: Arithmetic, total: jax.Array, k: jax.Array, eps: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """``total 2^2k + eps``, as a number and its own k."""
    return (total, k) if eps is None else _scaled_sum(A, total, k, eps, jnp.zeros_like(k))


def _scaled_sum(
    A: Arithmetic, a: jax.Array, a_k: jax.Array, b: jax.Array, b_k: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """``a 2^2a_k + b 2^2b_k`` as a number and its own k, with which the sum just fits."""
    sizes = [jnp.where(x == 0, -(1 << 12), A.exponent(x) + 2 * k) for x, k in ((a, a_k), (b, b_k))]
    k = -((A.fmt.max_exponent - 2 - jnp.maximum(*sizes)) // 2)  # both below half 2^max_exponent
    return A.add(A.shift(a, 2 * (a_k - k)), A.shift(b, 2 * (b_k - k))), k


def _root(A: Arithmetic, total: jax.Array, k: jax.Array) -> jax.Array:
    return A.shift(A.sqrt(total), k)


def _segments(a: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the chosen elements and the others, each with zeros in the gaps."""
    zero = jnp.zeros_like(a)
    return jnp.where(chosen, a, zero), jnp.where(chosen, zero, a)


def _nearest(arithmetic: Arithmetic, x: float) -> jax.Array:
    fmt = arithmetic.fmt
    return arithmetic.const(float(fmt.decode(fmt.encode(x))))


@checked
def beta_high(fmt: FormatLike, n: Count, *, order: str = "pairwise", block: Count = 32) -> float:
    """Returns a power of two below which n numbers have a sum of squares that can't overflow.

    A rounded sum of n numbers below 2^e stays at ``2^(e + g)`` or below, where g depends on the
    order of summation: ``ceil(log2 n)`` pairwise, one more for a compensated sum of more than two,
    ``min(ceil(log2 n), p)`` one after the other in a format of p bits, whose sum stops growing at
    2^p terms. Squares of numbers below 2^b are below 2^(2b), so that ``2 b + g <= emax``, with
    emax the exponent of the format's largest number. The published threshold, ``sqrt(max)``, is
    that for one number.

    Args:
        fmt: the format of every intermediate, or a name or dtype of one.
        n: how many numbers; positive.
        order, block: as for :func:`l2_norm`.

    Example:
        >>> beta_high("fp16", 1), beta_high("fp16", 100), beta_high("fp16", 4096)
        (128.0, 16.0, 2.0)
    """
    fmt = as_format(fmt, "beta_high")
    check_order(order)
    return 2.0 ** _safe_exponent(Setting(Arithmetic(fmt), order, block), n)


@checked
def beta_low(fmt: FormatLike, n: Count = 1) -> float:
    """Returns a power of two from which on squares keep all bits of the format.

    The square of a number from 2^b on is at least 2^(2b). It is rounded with the relative error of
    a normal number if it is one: ``2 b >= emin``, the exponent of the smallest normal number; one
    more leaves a bit for the sum. That holds for each of n numbers, so that the threshold doesn't
    depend on n. The published one, ``sqrt(smallest subnormal)``, is where squares become zero: from
    there to this they lose bits.

    Args:
        fmt: as for :func:`beta_high`.
        n: how many numbers; positive.

    Example:
        >>> beta_low("fp16") == 2.0**-6
        True
    """
    return 2.0 ** math.ceil((as_format(fmt, "beta_low").min_exponent + 1) / 2)


def _safe_exponent(s: Setting, n: int) -> int:
    """The b for which no sum of squares of n numbers below 2^b overflows, in the order at hand."""
    return (s.arithmetic.fmt.max_exponent - growth(s.arithmetic, s.order, n, s.block)) // 2


def growth(arithmetic: Arithmetic, order: str, n: int, block: int) -> int:
    """The g for which a rounded sum of n positive numbers below 2^e stays at 2^(e + g) or below.

    The sum of k numbers is at most k 2^e, a bound that rounding respects for k up to 2^p, since it
    is a number of the format. Beyond 2^(p + e) a term is less than half an ulp of the sum.
    """
    levels = max(n - 1, 0).bit_length()
    if n <= 2:  # one addition, in any order
        return levels
    match order:
        case "pairwise":
            return levels
        case "compensated":
            return levels + 1
        case "blocked":
            runs = growth(arithmetic, "sequential", -(-n // block), block)
            return growth(arithmetic, "sequential", min(block, n), block) + runs
    return min(levels, arithmetic.fmt.precision)
