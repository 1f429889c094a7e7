"""Histograms of powers of two: how many numbers of a pytree lie in each binade."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._resolve import as_format
from ..formats import FormatLike

LOWEST = -127  # the bin of float32's zeros and subnormals
BINS = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Exponents:
    """How many numbers have each exponent of two; ``repr`` draws the histogram.

    Attributes:
        counts: float32 of shape (256,): of numbers x with ``2**e <= |x| < 2**(e + 1)`` for e from
            -126 to 127; the first also counts float32's subnormals, the last infinities and NaN.
        zeros: how many numbers are zero; float32 scalar. They are in no bin.
    """

    counts: jax.Array
    zeros: jax.Array

    def bins(self) -> dict[int, int]:
        """Returns the counts of the exponents that occur, by exponent."""
        counts = np.asarray(self.counts)
        return {i + LOWEST: int(n) for i, n in enumerate(counts[:-1]) if n}

    def flushed(self, fmt: FormatLike, scale: float = 1.0) -> float:
        """Returns the share of the nonzero numbers that are below half of a format's smallest.

        Args:
            fmt: a format.
            scale: a loss scale that the numbers are multiplied by first.
        """
        smallest = float(as_format(fmt, "Exponents").smallest)
        below = [n for e, n in self.bins().items() if 2.0**e * scale < smallest / 2]
        return sum(below) / max(sum(self.bins().values()), 1)

    def __repr__(self) -> str:
        bins = self.bins()
        total = sum(bins.values())
        lines = [f"{total} nonzero numbers, {int(self.zeros)} zeros"]
        last = max(bins, default=0)
        for top in range(last, min(bins, default=0) - 4, -4) if bins else ():
            share = sum(bins.get(e, 0) for e in range(top - 3, top + 1)) / total
            bar = "#" * round(50 * share)
            lines.append(f"2^{top - 3:<4} to 2^{top + 1:<4} {share:6.1%} {bar}".rstrip())
        return "\n".join(lines)


def exponents_of(arrays: Sequence[jax.Array]) -> Exponents:
    parts = [_of_array(jnp.asarray(x)) for x in arrays]
    counts, zeros = (functools.reduce(jnp.add, list(part)) for part in zip(*parts, strict=True))
    return Exponents(counts, zeros)


def _of_array(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    bits = lax.bitcast_convert_type(jnp.abs(x).astype(jnp.float32), jnp.int32).ravel()
    zeros = jnp.sum(bits == 0).astype(jnp.float32)
    field = jnp.where(bits == 0, BINS, lax.shift_right_logical(bits, np.int32(23)))
    counts = jnp.zeros(BINS, jnp.int32).at[field].add(1, mode="drop")
    return counts.astype(jnp.float32), zeros
