"""One float array of an audited program, in the low-precision run and in the reference run."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ._flat import unflat


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """One float array in both runs.

    Attributes:
        low: the value in the low-precision run, in its own shape, or flat and padded where
            :func:`is_elementwise` allows that.
        reference: the value in the reference run, laid out in the same way.
        tainted: bool scalar, true if ``low`` is non-finite somewhere where ``reference`` is finite.
    """

    low: Any
    reference: Any
    tainted: Any


def shaped(value: Any, aval: Any) -> Any:
    """Returns a pair with both arrays in the shape of ``aval``; anything else unchanged."""
    if not isinstance(value, Pair) or value.reference.shape == aval.shape:
        return value

    def reshape(x: Any) -> Any:
        return unflat(x, aval.shape)

    return Pair(jax.tree.map(reshape, value.low), reshape(value.reference), value.tainted)
