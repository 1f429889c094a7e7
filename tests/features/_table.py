"""The table of features, and the arrays that they compute with."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from arrays import normal

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]

FEATURES: dict[str, Callable[[Transform], Any]] = {}
# Features that transform, export or lower the function after scalewise has: an audit returns none.
OUTSIDE: set[str] = set()

W = normal(0, (16, 16)) / 4
V = normal(1, (16, 16)) / 4
X = normal(2, (8, 16))
B = normal(3, (16,))
S = jnp.asarray(
    np.asarray(X).T @ np.asarray(X) / 8 + 2 * np.eye(16), np.float32
)  # positive definite
ROWS = jnp.asarray([3, 0, 2, 2, 7, 5, 1, 4], jnp.int32)
MASK = X > 0
INT8 = jnp.round(W * 127 / jnp.max(jnp.abs(W))).astype(jnp.int8)


def feature(f: Callable[[Transform], Any]) -> Callable[[Transform], Any]:
    """Adds a feature: a function that calls programs under a transformation."""
    assert f.__name__ not in FEATURES, f.__name__
    FEATURES[f.__name__] = f
    return f


def outside(f: Callable[[Transform], Any]) -> Callable[[Transform], Any]:
    """Adds a feature that needs the transformed function itself, rather than its results."""
    OUTSIDE.add(f.__name__)
    return feature(f)
