"""The norm by sums of several words with exponents of their own: our best.

A block of elements is scaled by one power of two, squared without loss and added pairwise in words;
the sums of blocks carry an integer exponent each from there on. So nothing overflows, nothing that
counts is flushed, and nothing is swamped, whatever the range and the width of the format.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..formats import Format
from ._arithmetic import Arithmetic
from ._sums import pad
from ._tree import reduce_pairwise
from ._words import add_error, add_words, normalise, two_square, two_sum

NO_EXPONENT = -(1 << 20)  # of a sum that is zero: less than any other


@dataclasses.dataclass(frozen=True)
class Plan:
    """How many words and how long a block, so that a sum of squares is as good as is asked.

    Attributes:
        words: in which the sum is held.
        block: elements behind one scale, a power of two.
        top: squares and their sums are kept below 2^(2 top).
        error: a bound on the relative error of the sum of squares.
    """

    words: int
    block: int
    top: int
    error: float


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A sum of words times 2^exponent, elementwise; the exponent is an integer, not a float."""

    words: Any  # Words
    exponent: Any  # int32


@dataclasses.dataclass(frozen=True)
class Root:
    """``(significand + rest) * 2^exponent``: rest is what the significand's rounding has lost.

    The significand is zero, NaN (of a negative sum), or near the middle of the format's exponents.
    """

    significand: Any
    exponent: Any  # int32
    rest: Any

    def value(self, arithmetic: Arithmetic) -> jax.Array:
        """The number of the format. A tie among subnormals is decided by what was lost."""
        y = arithmetic.shift(self.significand, self.exponent)
        # exact in the carrier; on the machine both are moved back up to where they came from
        missing = arithmetic.shift_exactly(self.significand, self.exponent) - y
        step = arithmetic.const(float(arithmetic.fmt.smallest))
        tie = (jnp.abs(missing) == step / 2) & (jnp.sign(missing) == jnp.sign(self.rest))
        return jnp.where(tie, y + jnp.sign(missing) * step, y)


jax.tree_util.register_dataclass(Scaled, ["words", "exponent"], [])


def plan(arithmetic: Arithmetic, n: int, cancels: bool = False) -> Plan:
    """The fewest words and the longest blocks with which a sum of n squares is good enough.

    That is u/4 for either source of error, so that the root errs by a quarter ulp or less. If
    the sum may be cancelled by a negative epsilon, u^2/4. A format that is too narrow for it gets
    the best there is: as many words as its exponents have room for.
    """
    fmt, u = arithmetic.fmt, arithmetic.unit
    top = _top(fmt)
    quantum = float(fmt.smallest) / 2.0 ** (2 * top)  # of what lies below 2^(2 top)
    levels = max(n - 1, 0).bit_length()
    target = u**2 / 4 if cancels else u / 4
    room = max(1, int(-np.log2(quantum)) // fmt.precision)
    words = next((k for k in range(2, room) if levels * add_error(arithmetic, k) <= target), room)
    block = 1
    while block < n and 4 * (2 * block) ** 2 * words * quantum <= target / 4:
        block *= 2
    own = max(levels - block.bit_length() + 2, 1)  # additions that align exponents
    error = levels * add_error(arithmetic, words) + words * quantum * (4 * block**2 + 4 * own)
    return Plan(words, block, top, error)


def _top(fmt: Format) -> int:
    """The t for which squares of numbers below 2^t don't overflow."""
    full = fmt.max == (2 - fmt.eps) * 2**fmt.max_exponent
    return (fmt.max_exponent + full) // 2


def ulp_bound(fmt: Format, n: int) -> float:
    """A bound on the error of ``auto``'s norm of n numbers, in ulps of the result.

    Half an ulp is the least that any result in the format can promise. To it come: half the
    relative error of the sum of squares, over an ulp, which is at least u; what the correction of
    the root leaves, u of half an ulp and third-order terms.
    """
    arithmetic = Arithmetic(fmt)
    u = arithmetic.unit
    return 0.5 + plan(arithmetic, n).error / 2 / u + u / 2 + 8 * u**2


def auto_norm(
    arithmetic: Arithmetic, a: jax.Array, eps: jax.Array | None, nonnegative: bool
) -> Root:
    """sqrt(sum a^2 + eps) along the last axis.

    Args:
        arithmetic: whose format all numbers are of.
        a: (..., n) finite magnitudes.
        eps: (...) finite, or None for zero.
        nonnegative: whether eps is known not to be negative.
    """
    p = plan(arithmetic, a.shape[-1], not nonnegative)
    total = sum_of_squares(arithmetic, a, p)
    if eps is not None:
        total = add_scaled(arithmetic, total, scaled(arithmetic, eps, p), p=p)
    return root_of(arithmetic, total, p)


def sum_of_squares(arithmetic: Arithmetic, a: jax.Array, p: Plan) -> Scaled:
    """The sum of the squares along the last axis."""
    return _sum(arithmetic, a, p, squared=True)


def sum_of(arithmetic: Arithmetic, a: jax.Array, p: Plan) -> Scaled:
    """The sum along the last axis, of any signs: the error is of the sum of magnitudes."""
    return _sum(arithmetic, a, p, squared=False)


def _sum(arithmetic: Arithmetic, a: jax.Array, p: Plan, squared: bool) -> Scaled:
    n = a.shape[-1]
    if n == 0:
        return scaled(arithmetic, jnp.zeros(a.shape[:-1], a.dtype), p)
    blocks = pad(a, -n % p.block).reshape(*a.shape[:-1], -1, p.block)
    below = p.top - p.block.bit_length() // 2  # ceil(log2(block) / 2): room for so many squares
    below = below if squared else 2 * below
    largest = arithmetic.exponent(jnp.max(jnp.abs(blocks), axis=-1))
    up = below - 1 - largest
    x = arithmetic.shift(blocks, up[..., None])
    words = two_square(arithmetic, x)[: p.words] if squared else (x,)
    words += (jnp.zeros_like(x),) * (p.words - len(words))
    zeros = (0.0,) * p.words
    front = tuple(jnp.moveaxis(w, -1, 0) for w in words)
    words = reduce_pairwise(lambda x, y: add_words(arithmetic, x, y), front, zeros)
    total = _renormalised(arithmetic, Scaled(words, -2 * up if squared else -up), p)
    front = jax.tree.map(lambda t: jnp.moveaxis(t, -1, 0), total)
    return reduce_pairwise(partial(add_scaled, arithmetic, p=p), front, Scaled(zeros, NO_EXPONENT))


def scaled(arithmetic: Arithmetic, x: jax.Array, p: Plan) -> Scaled:
    """A number of the format, of either sign, as the leading one of several words."""
    words = (x, *(jnp.zeros_like(x) for _ in range(p.words - 1)))
    return _renormalised(arithmetic, Scaled(words, jnp.zeros(x.shape, np.int32)), p)


def constant(arithmetic: Arithmetic, x: float, exponent: jax.Array, p: Plan) -> Scaled:
    """``x * 2^exponent`` for a positive constant x, which is split into words beforehand."""
    m, e = np.frexp(x)
    rest, words = float(m) * 4.0**p.top, []
    for _ in range(p.words):
        word = float(arithmetic.fmt.decode(arithmetic.fmt.encode(rest)))
        words.append(jnp.full(exponent.shape, arithmetic.const(word)))
        rest -= word
    return _renormalised(arithmetic, Scaled(tuple(words), exponent + int(e) - 2 * p.top), p)


def add_scaled(arithmetic: Arithmetic, a: Scaled, b: Scaled, *, p: Plan) -> Scaled:
    """The sum; the smaller one's words are moved down to the exponent of the larger."""
    exponent = jnp.maximum(a.exponent, b.exponent) + 1
    x, y = (tuple(arithmetic.shift(w, s.exponent - exponent) for w in s.words) for s in (a, b))
    words = add_words(arithmetic, x, y)
    return _renormalised(arithmetic, Scaled(words, exponent), p)


def _renormalised(arithmetic: Arithmetic, s: Scaled, p: Plan) -> Scaled:
    """Its leading word in the binade below 2^(2 top)."""
    lead = s.words[0]
    up = 2 * p.top - 1 - arithmetic.exponent(lead)
    zero = lead == 0
    words = tuple(arithmetic.shift(w, up) for w in s.words)
    exponent = jnp.where(zero, NO_EXPONENT, s.exponent - up)
    return Scaled(words, exponent)


def root_of(arithmetic: Arithmetic, s: Scaled, p: Plan) -> Root:
    """The square root: rounded, then corrected twice by what its square leaves."""
    s = _renormalised(arithmetic, Scaled(normalise(arithmetic, s.words), s.exponent), p)
    odd = s.exponent % 2
    words = [arithmetic.shift(w, -odd) for w in s.words]
    k = (s.exponent + odd) // 2
    lead = words[0]
    safe = jnp.where(lead > 0, lead, arithmetic.const(4.0**p.top / 4))
    root = arithmetic.sqrt(safe)
    # what a correctly rounded root or quotient leaves is a number of the format
    rest = safe - root * root
    later = jnp.zeros_like(rest)
    for word in words[1:]:
        rest, lost = two_sum(arithmetic, rest, word)
        later = arithmetic.add(later, lost)
    twice = 2 * root
    first = arithmetic.div(rest, twice)
    left = arithmetic.add(rest - first * twice, later)
    square = arithmetic.mul(first, first)
    if not arithmetic.fmt.signed:
        square = jnp.minimum(square, left)
    second = arithmetic.div(arithmetic.sub(left, square), twice)
    root, lost = two_sum(arithmetic, root, first)
    root, rest = two_sum(Arithmetic(arithmetic.fmt), root, arithmetic.add(lost, second))
    root = jnp.where(lead > 0, root, jnp.where(lead == 0, arithmetic.const(0), np.nan))
    return Root(root, jnp.where(lead > 0, k, 0), rest)
