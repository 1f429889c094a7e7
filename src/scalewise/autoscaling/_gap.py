"""Arrays of two kinds of numbers, such as scores and a mask's: the gap between them is closed.

A format has ``reach`` binades of normal numbers. If the magnitudes of an array leave a wider gap,
one scale can hold only the numbers above it: those below would be zeros. The numbers above are then
multiplied by a power of two that brings them just above the others, and after loading by its
inverse. Each number's error is at most half a unit in the last place of the largest on its side of
the gap. A narrower gap is left: below it the largest number is still a normal one.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ..formats import Format
from ..scaled import amax, exponent_of, power_of_two
from ..scalifying import leading, wide_dtype

ABOVE = 2  # binades from the largest number below to the smallest above: roundings don't meet


class Gap(NamedTuple):
    """Where a gap was closed; scalars, or of arrays that were stacked one for each.

    Attributes:
        end: the numbers of larger magnitude lay above the gap; all numbers below are less.
        factor: its square is what they were divided by, which may be beyond the dtype's range.
    """

    end: jax.Array
    factor: jax.Array

    def opened(self, x: jax.Array) -> jax.Array:
        end, factor = (leading(part, x) for part in self)
        return jnp.where(jnp.abs(x) > end, x * factor * factor, x)


def may_have_gap(fmt: Format, largest_constant: float) -> bool:
    """Returns whether a constant of the program's, a mask's, is so large that one scale for it and
    for numbers near 1 leaves these less than half of the format's binades."""
    return largest_constant >= 2.0 ** (reach(fmt) // 2)


def reach(fmt: Format) -> int:
    return fmt.max_exponent - fmt.min_exponent


def no_gap(dtype: DTypeLike) -> Gap:
    one = jnp.ones((), wide_dtype(dtype))
    return Gap(one * jnp.inf, one)


def closed(fmt: Format, x: jax.Array) -> tuple[jax.Array, Gap]:
    """Returns an array whose widest gap below the largest magnitude is closed, if it is wider than
    the format reaches; the same numbers, if there is none."""
    x = x.astype(wide_dtype(x.dtype))
    size, axes = lax.abs(x), range(x.ndim)
    largest = amax(x, axes, False)
    limit = largest * x.dtype.type(2.0 ** -reach(fmt))
    above = (size > limit) & (size < jnp.inf)
    below = amax(jnp.where(above, 0, x), axes, False)
    # of the inverses, since XLA's CPU backend has no fast minimum with a select in it; rounded
    # down, by less than two binades
    nearest = amax(jnp.where(above, limit / size, 0), axes, False)
    lowest, highest = exponent_of(below), exponent_of(limit) - exponent_of(nearest) - 1
    is_gap = (below > 0) & (highest - lowest >= reach(fmt) - 1)
    half = jnp.where(is_gap, (highest - lowest - ABOVE) // 2, 0)
    end = jnp.where(is_gap, power_of_two(lowest + 1, x.dtype), jnp.inf)
    factor, inverse = (power_of_two(i, x.dtype) for i in (half, -half))
    return jnp.where(above, x * inverse * inverse, x), Gap(end, factor)
