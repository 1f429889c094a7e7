"""Operations on small arrays that only move numbers: NumPy computes them, so that none is compiled.

They are a quarter of a program's operations, and compiling one takes longer than all of its runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import Tracer, has_explicit_mesh
from ...interpret import Equation, Value
from ...primitives import having
from ._pair import Pair, flat, padded_size

DROPS = having("drops")
LARGEST = 1 << 14  # numbers that NumPy moves in less time than compiling takes, in all runs


def _broadcast(x: np.ndarray, shape: Sequence[int], broadcast_dimensions: Sequence[int], **_: Any):
    spread = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
        spread[axis] = size
    return np.broadcast_to(x.reshape(spread), shape)


def _slice(
    x: np.ndarray, start_indices: Sequence[int], limit_indices: Sequence[int],
    strides: Sequence[int] | None,
):  # fmt: skip
    steps = strides or (1,) * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


MOVES: Mapping[str, Callable[..., np.ndarray]] = {
    "broadcast_in_dim": _broadcast,
    "rev": lambda x, dimensions: np.flip(x, dimensions),
    "slice": _slice,
    "transpose": lambda x, permutation: np.transpose(x, permutation),
}


def only_moves(equation: Equation, inputs: Sequence[Value]) -> bool:
    """Returns True if :func:`moved` computes an equation of one small array on one device."""
    if equation.name not in MOVES or len(inputs) != 1 or not isinstance(inputs[0], Pair):
        return False
    sizes = (math.prod(a.shape) for a in (*equation.in_avals, *equation.out_avals))
    if max(sizes) > LARGEST or has_explicit_mesh():
        return False
    leaves = (x for x in jax.tree.leaves(inputs[0]) if isinstance(x, jax.Array))
    return all(isinstance(x, Tracer) or len(x.devices()) == 1 for x in leaves)


def moved(equation: Equation, x: Pair) -> Pair:
    """Returns the result, flat and padded; of tracers one that has only its type."""
    shape, length = equation.in_avals[0].shape, padded_size(math.prod(equation.out_avals[0].shape))
    found = []

    def move(leaf: jax.Array) -> jax.Array:
        if isinstance(leaf, Tracer):
            return jnp.zeros(length, leaf.dtype)
        own = np.asarray(leaf).reshape(-1)[: math.prod(shape)].reshape(shape)
        found.append(MOVES[equation.name](own, **equation.params))
        return flat(found[-1], length)

    low, reference = jax.tree.map(move, x.low), move(x.reference)
    tainted = x.tainted
    if equation.name in DROPS and found and not isinstance(tainted, Tracer) and tainted:
        *lows, wide = found
        lost = [~np.isfinite(y) & np.isfinite(wide) for y in lows]
        tainted = np.bool_(any(y.any() for y in lost))
    return Pair(low, reference, tainted, x.constant, x.literal)
