"""Sizes of arrays that may have a symbolic dimension, as ``jax.export`` traces them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np


def is_known(size: object) -> bool:
    """True for a number, False for an expression of symbolic dimensions."""
    return isinstance(size, int | np.integer)


def at_least(size: int, bound: int) -> bool:
    """True if ``size`` is ``bound`` or more, and for a symbolic size, which counts as large."""
    return not is_known(size) or bool(size >= bound)


def predicted_size(shape: Iterable[int]) -> int:
    """The product of a shape's dimensions, at least 1; a symbolic dimension counts as 1."""
    return max(1, math.prod(int(n) for n in shape if is_known(n)))
