"""One array of an audited program, in the low-precision run and in the reference run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import ShapedArray, Tracer, has_explicit_mesh, split_as
from ...interpret import Value
from ._flat import unflat

Flag: TypeAlias = jax.Array | np.ndarray | np.bool_  # a boolean scalar


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["low", "reference", "tainted"],
    meta_fields=[],
    drop_fields=["constant", "literal"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """One float array in both runs.

    Attributes:
        low: the value in the low-precision run, in its own shape, or flat and padded where
            :func:`is_elementwise` allows that.
        reference: the value in the reference run, laid out in the same way.
        tainted: bool scalar, true if ``low`` is non-finite somewhere where ``reference`` is finite.
        constant: whether it depends on no argument and no random bits; not part of the pytree.
        literal: whether it is a constant that no operation has rounded; not part of the pytree.
    """

    low: Value
    reference: jax.Array
    tainted: Flag
    constant: bool = False
    literal: bool = False


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["low", "reference"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """An array of another type (a predicate, an index, a count) that depends on floats.

    An array without this wrapper is the same in both runs.

    Attributes:
        low, reference: the array in each run, in its own shape.
    """

    low: jax.Array
    reference: jax.Array

    @property
    def ways(self) -> Sequence[jax.Array]:
        """The arrays of both runs; one of them if they are known to be equal."""
        if not isinstance(self.low, Tracer) and bool(jnp.all(self.low == self.reference)):
            return (self.low,)
        return self.low, self.reference


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Draw:
    """A random draw in the run of a format: computed without rounding from random bits and
    constants alone, and rounded where an argument meets it (see :class:`EmulationWithDraws`).

    Attributes:
        exact: float64, in its own shape.
        reference: the value in the reference run.
    """

    exact: jax.Array
    reference: jax.Array


def low_of(x: Value) -> Value:
    """Returns the low-precision run's array."""
    return x.low if isinstance(x, Pair | Decision) else x


def reference_of(x: Value) -> Value:
    """Returns the reference run's array."""
    return x.reference if isinstance(x, Pair | Decision) else x


def with_constancy(value: Value, constant: bool, literal: bool) -> Value:
    """Returns a value that is known to be constant or not."""
    if not isinstance(value, Pair):
        return value
    return Pair(value.low, value.reference, value.tainted, constant, literal)  # replace is slow


def shaped(value: Value, aval: ShapedArray) -> Value:
    """Returns a pair with both arrays as ``aval`` says; anything else unchanged."""
    if not isinstance(value, Pair):
        return value

    def reshape(x: Value) -> Value:
        return split_as(unflat(x, aval.shape), aval)

    if value.reference.shape == aval.shape and not has_explicit_mesh():
        return value

    low, reference = jax.tree.map(reshape, value.low), reshape(value.reference)
    return Pair(low, reference, value.tainted)
