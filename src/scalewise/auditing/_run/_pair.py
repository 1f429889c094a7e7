"""One array of an audited program, in the low-precision run and in the reference run."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import ShapedArray, Tracer, has_explicit_mesh, split_as
from ...interpret import Value
from ...primitives import having

SMALL = (1024, 65536)

# Primitives that act on each number separately, so that they may be computed on padded arrays.
ELEMENTWISE = having("elementwise") - having("chooses") - having("series") - having("own_dtype")
# Primitives that return their operand's numbers in the same order.
RESHAPES = having("same_order")


def padded_size(size: int) -> int:
    """At most a quarter is padding, except below 65,536 numbers, where two sizes serve all."""
    for small in SMALL:
        if size <= small:
            return small
    step = 1 << (size - 1).bit_length() - 3
    return -(-size // step) * step


def flat(x: jax.Array, length: int) -> jax.Array:
    """A concrete array is padded by NumPy on the host, so that nothing is compiled. One that a mesh
    splits becomes whole on each device."""
    x = split_as(x, None)
    if x.shape == (length,):
        return uncommitted(x)
    if isinstance(x, Tracer):
        x = x.reshape(-1)
        return x if x.size == length else jnp.pad(x, (0, length - x.size))
    row = np.asarray(x).reshape(-1)
    return jax.device_put(row if row.size == length else np.pad(row, (0, length - row.size)))


def uncommitted(x: Any) -> Any:
    """An array made by DLPack or ``jax.device_put`` is bound to its device. JAX compiles a program
    for it apart from one for arrays that aren't, which ``compile_ahead`` has compiled."""
    bound = isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.committed
    if not bound or len(x.devices()) > 1 or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return jax.device_put(np.asarray(x))


def is_flat(x: jax.Array, shape: Sequence[int]) -> bool:
    return isinstance(x, jax.Array) and x.shape == (padded_size(math.prod(shape)),)


def unflat(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    if x.shape == tuple(shape):
        return x
    return x[: math.prod(shape)].reshape(shape)


Flag: TypeAlias = jax.Array | np.ndarray | np.bool_  # a boolean scalar


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["low", "reference", "tainted"],
    meta_fields=[],
    drop_fields=["constant", "literal"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """One float array in both runs, in its own shape, or flat and padded where the kind of run
    allows that."""

    low: Value
    reference: jax.Array
    tainted: Flag  # whether ``low`` is non-finite somewhere where ``reference`` is finite
    constant: bool = False  # whether it depends on no argument and no random bits
    # whether it is a constant of the program that no operation has rounded; traced in a loop, where
    # another number may take its place
    literal: bool | jax.Array = False


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["low", "reference"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """An array of another type (a predicate, an index, a count) that depends on floats.

    An array without this wrapper is the same in both runs.
    """

    low: jax.Array  # low, reference: the array in each run, in its own shape
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
    """

    exact: jax.Array  # float64, in its own shape
    reference: jax.Array  # the value in the reference run


def low_of(x: Value) -> Value:
    return x.low if isinstance(x, Pair | Decision) else x


def reference_of(x: Value) -> Value:
    return x.reference if isinstance(x, Pair | Decision) else x


def with_constancy(value: Value, constant: bool, literal: bool | jax.Array) -> Value:
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
