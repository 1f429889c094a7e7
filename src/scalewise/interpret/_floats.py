"""Which values of an equation stand for float arrays, and changes of some values in a list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Protocol, TypeAlias, TypeVar

import jax.numpy as jnp
import numpy as np

from .._jax import ShapedArray

T = TypeVar("T")

Value: TypeAlias = Any
"""What stands for one array, a pytree that the interpretation chooses; see Interpretation."""


class HasDtype(Protocol):
    """An array, or the abstract type of one."""

    @property
    def dtype(self) -> np.dtype: ...


_is_floating = lru_cache(maxsize=64)(lambda dtype: jnp.issubdtype(dtype, jnp.floating))


def is_float(aval: HasDtype) -> bool:
    """Returns whether arrays of this abstract type are lifted: real floats of any width."""
    return _is_floating(aval.dtype)


def is_inexact(aval: HasDtype) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def map_floats(
    f: Callable[[Value, ShapedArray], Value],
    values: Iterable[Value],
    avals: Iterable[ShapedArray],
    lifts: Callable[[ShapedArray], bool] = is_float,
) -> list[Value]:
    """Returns ``f(value, aval)`` for each value of a float's type, or of another type that
    ``lifts``, and all others unchanged."""
    return [f(x, a) if lifts(a) else x for x, a in zip(values, avals, strict=True)]


def with_items(values: Iterable[T], indices: Iterable[int], items: Iterable[T]) -> list[T]:
    full = list(values)
    for i, x in zip(indices, items, strict=True):
        full[i] = x
    return full
