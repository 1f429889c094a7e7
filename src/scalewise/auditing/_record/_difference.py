"""The difference of two arrays as one number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def relative_difference(a: Any, b: Any) -> float:
    """Returns ``||a - b|| / max(||a||, ||b||)``, between 0 and 2.

    Over all numbers; inf if one is finite where the other is not, or both are infinite with
    opposite signs.

    Example:
        >>> relative_difference([3.0, 4.0], [3.0, 4.5]), relative_difference([1.0], [math.inf])
        (0.0924..., inf)
    """
    parts = [np.asarray(x) for x in (a, b)]
    if any(np.iscomplexobj(x) for x in parts):
        parts = [np.stack([np.real(x), np.imag(x)]) for x in parts]
    x, y = (np.ravel(part).astype(np.float64) for part in parts)
    finite = np.isfinite(x) & np.isfinite(y)
    rest = np.stack([x[~finite], y[~finite]])
    if not np.array_equal(rest[0], rest[1], equal_nan=True):
        return math.inf
    x, y = x[finite], y[finite]
    unit = max(np.abs(x).max(initial=0), np.abs(y).max(initial=0))
    if unit == 0:
        return 0.0
    x, y = x / unit, y / unit
    return float(np.linalg.norm(x - y) / max(np.linalg.norm(x), np.linalg.norm(y)))
