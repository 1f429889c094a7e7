"""Which loss scale suits the exponents of some equations' numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...formats import Format
from .._tape._statistics import LOWEST
from ._equation_statistics import Equations

POWERS = range(-40, 41)


def shares(
    equations: Equations, smallest: float, largest: float, powers: Sequence[int] | range
) -> dict[int, tuple[float, float]]:
    """Returns for each ``k`` which shares of the equations' nonzero numbers times ``2**k`` are
    below ``smallest`` and above ``largest``; from the reference run's histograms, in whole binades.
    """
    counts = np.sum([e.histogram for e in equations], axis=0) if equations else np.zeros(1)
    total, bins = max(float(counts.sum()), 1.0), LOWEST + np.arange(len(counts))
    bottom, top = math.log2(smallest), math.log2(largest)
    return {
        k: (
            float(counts[bins + k < bottom].sum()) / total,
            float(counts[bins + k > top].sum()) / total,
        )
        for k in powers
    }


def best_power(equations: Equations, fmt: Format, largest: float = math.inf) -> int:
    """Returns the exponent of the best loss scale for these equations; 0 if no scale is better.

    Of the scales that leave the largest number at least a binade below overflow, it is the one with
    the fewest numbers below the smallest normal number; of equally good ones, the one with the
    fewest below the smallest number, then the one nearest 1. The exponent is at most ``largest``.
    """
    top = max((max(e["amax"], e["reference_max"]) for e in equations), default=0.0)
    if not 0 < top < math.inf:
        return 0
    headroom = min(math.floor(math.log2(float(fmt.max) / top)) - 1, largest)
    table = shares(equations, float(fmt.smallest_normal), float(fmt.max), POWERS)
    lost = shares(equations, float(fmt.smallest), float(fmt.max), POWERS)
    safe = [k for k in POWERS if k <= headroom]
    return min(safe, key=lambda k: (table[k][0], lost[k][0], abs(k)), default=0)
