"""Numbers of several words: sums of a format's numbers, kept to many times its precision.

A number is held as an unevaluated sum of words, each about a unit roundoff below the one before it.
What a rounding loses is again a number of the format (Dekker, 1971), so it is found, not lost.
In our carriers that remainder is exact by the theorem: only the first result is rounded.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ._arithmetic import Arithmetic

Words = tuple[jax.Array, ...]


def two_sum(arithmetic: Arithmetic, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """a + b = sum + error, exactly: Dekker's FastTwoSum on the larger and the smaller.

    Towards zero as well, if neither is negative. The sum must not overflow.
    """
    larger = jnp.abs(a) >= jnp.abs(b)
    return fast_two_sum(arithmetic, jnp.where(larger, a, b), jnp.where(larger, b, a))


def fast_two_sum(arithmetic: Arithmetic, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """:func:`two_sum` where it is known that ``|a| >= |b|``: three operations instead of six."""
    total = arithmetic.add_in_range(a, b)
    return total, b - (total - a)


def two_square(arithmetic: Arithmetic, a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """a^2 = square + error: exactly, unless the error lies below the format's smallest number.

    On the machine that is Veltkamp's splitting and Dekker's product, or one fused multiply-add.
    """
    exact = a * a
    square = arithmetic.round(exact)
    return square, arithmetic.round(exact - square)


def add_words(arithmetic: Arithmetic, a: Words, b: Words) -> Words:
    """The sum of two numbers of K words, in K words: word by word, what is lost going one down.

    With two words it is Dekker's add2 (Joldes, Muller, Popescu, ACM TOMS 44:2, 2017, algorithm 5).
    Error: :func:`add_error`.
    """
    last = len(a) - 1
    words, errors = [], []
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        total, following = x, []
        for term in (y, *errors):
            if i == last and i > 0:
                total = arithmetic.add_in_range(total, term)
            else:
                total, error = two_sum(arithmetic, total, term)
                following.append(error)
        words.append(total)
        errors = following
    return normalise(arithmetic, tuple(words))


def normalise(arithmetic: Arithmetic, words: Words) -> Words:
    """The same number in words that do not overlap: from the last to the first, then back."""
    w = list(words)
    for i in reversed(range(len(w) - 1)):
        w[i], w[i + 1] = two_sum(arithmetic, w[i], w[i + 1])
    for i in range(1, len(w) - 1):
        w[i], w[i + 1] = two_sum(arithmetic, w[i], w[i + 1])
    return tuple(w)


def add_error(arithmetic: Arithmetic, words: int) -> float:
    """A bound on the relative error of :func:`add_words`, neither number negative: (2^K - 1) u^K.

    Sums of the words i are at most u^i, 2u^i, ..., 2^i u^i of the whole, each losing at most u of
    itself to the words below; only what the K sums of the last words lose is gone. To first order
    in u, as the 3u^2 of two words.
    """
    return (2**words - 1) * arithmetic.unit**words
