"""A value of the audit: one float array in two lanes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ._flat import unflat


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """One float array twice.

    Attributes:
        low: the low lane's value; where each number is computed by itself (see
            :func:`number_by_number`), in its own shape or flat.
        shadow: the shadow's, in the same way.
        marred: bool scalar, whether ``low`` isn't finite somewhere where ``shadow`` is.
    """

    low: Any
    shadow: Any
    marred: Any


def shaped(value: Any, aval: Any) -> Any:
    """A value whose arrays have their own shape again, if they were kept flat."""
    if not isinstance(value, Pair) or value.shadow.shape == aval.shape:
        return value

    def one(x: Any) -> Any:
        return unflat(x, aval.shape)

    return Pair(jax.tree.map(one, value.low), one(value.shadow), value.marred)
