"""A value of the audit: one float array in two lanes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from ._flat import unflat


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """One float array twice.

    Attributes:
        low: the low lane's value; of a lane of one format, in its own shape or flat.
        shadow: the shadow's, in the same way.
        marred: bool scalar, whether ``low`` isn't finite somewhere where ``shadow`` is.
    """

    low: Any
    shadow: Any
    marred: Any


def shaped(value: Any, aval: Any) -> Any:
    """A value whose arrays have their own shape again, if they were kept flat."""
    if not isinstance(value, Pair) or not isinstance(value.low, jax.Array | np.ndarray):
        return value
    low, shadow = unflat(value.low, aval.shape), unflat(value.shadow, aval.shape)
    return Pair(low, shadow, value.marred)
