"""The table of features, and the arrays that they compute with."""

from collections.abc import Callable
from typing import Any

import numpy as np

from arrays import normal

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]

FEATURES: dict[str, Callable[[Transform], Any]] = {}
# Features that transform, export or lower the function after scalewise has: an audit returns none.
OUTSIDE: set[str] = set()

W = np.asarray(normal(0, (16, 16))) / 4
V = np.asarray(normal(1, (16, 16))) / 4
X = np.asarray(normal(2, (8, 16)))
B = np.asarray(normal(3, (16,)))
S = np.asarray(X.T @ X / 8 + 2 * np.eye(16), np.float32)  # positive definite
ROWS = np.asarray([3, 0, 2, 2, 7, 5, 1, 4], np.int32)
MASK = np.asarray(X > 0)
INT8 = np.asarray(np.round(W * 127 / np.abs(W).max()), np.int8)


def feature(f: Callable[[Transform], Any]) -> Callable[[Transform], Any]:
    """Adds a feature: a function that calls programs under a transformation."""
    assert f.__name__ not in FEATURES, f.__name__
    FEATURES[f.__name__] = f
    return f


def outside(f: Callable[[Transform], Any]) -> Callable[[Transform], Any]:
    """Adds a feature that needs the transformed function itself, rather than its results."""
    OUTSIDE.add(f.__name__)
    return feature(f)
