"""The one check a step: whether a whole pytree is finite, and the choice between two of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Tree = Any


def all_finite(tree: Tree, *, axis_name: Any = None) -> jax.Array:
    """Whether every float in a pytree is finite: a scalar boolean array.

    One pass over each leaf (its largest magnitude, into which XLA fuses what computed the leaf; a
    NaN stays one) and one scalar for all of them, so that the step pays no second pass and one
    synchronisation. Integers, booleans and keys are finite; so is an empty tree.

    Args:
        tree: gradients, say; float leaves of any width.
        axis_name: mapped axes (``jax.shard_map``, ``jax.pmap``) over whose members all have to be
            finite, so that each of them takes the same decision. Not needed where arrays are
            global, as under ``jit`` with shardings.

    Example:
        >>> import jax.numpy as jnp
        >>> bool(all_finite({"w": jnp.array([1.0, jnp.inf]), "n": jnp.int32(3)}))
        False
    """
    largest = [_largest(x) for x in jax.tree.leaves(tree) if is_float_array(x) and x.size]
    finite = jnp.isfinite(jnp.stack(largest)).all() if largest else jnp.asarray(True)
    if axis_name is not None:
        finite = jax.lax.pmin(finite.astype(jnp.int32), axis_name) > 0
    return finite


def choose(predicate: jax.Array, on_true: Tree, on_false: Tree) -> Tree:
    """One of two pytrees of the same structure, leaf by leaf: fused into what computes them."""

    def leaf(a: Any, b: Any) -> Any:
        return jnp.where(predicate, a, b) if is_array(a) or is_array(b) else a

    return jax.tree.map(leaf, on_true, on_false)


def is_array(x: Any) -> bool:
    """Whether a leaf is a number or an array of them: what a step can choose between."""
    return hasattr(x, "dtype") or isinstance(x, bool | int | float | complex)


def is_float_array(x: Any) -> bool:
    """Whether a leaf is a real float array of any width."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def at_least_float32(x: Any) -> jax.Array:
    """A float array in float32; float64 stays."""
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def _largest(x: Any) -> jax.Array:
    """Finite where all are, else infinite or NaN."""
    if x.dtype.itemsize == 2 and x.ndim and x.shape[-1] % 2 == 0:
        return _pairs_sign(x)
    if x.dtype.itemsize < 2:  # no backend compares FP8
        x = x.astype(jnp.float32)
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def _pairs_sign(x: jax.Array) -> jax.Array:
    """Infinite where one isn't finite, by two halves at a time.

    An exponent of ones overflows into the sign bit if its lowest bit is added. XLA on CPU reduces
    halves by first writing what it reduces to memory, but fuses a minimum of float32.
    """
    ones = int(np.asarray(np.inf, x.dtype).view(np.uint16))
    lowest = 1 << jnp.finfo(x.dtype).nmant
    pairs = lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint32)
    sums = (pairs & np.uint32(ones * 0x10001)) + np.uint32(lowest * 0x10001)
    either = (sums | (sums << np.uint32(16))) & np.uint32(0x80000000)
    one = lax.bitcast_convert_type(either | np.uint32(0x3F800000), jnp.float32)  # 1 or -1
    return jnp.where(jnp.min(one) > 0, np.float32(0), np.float32(np.inf))
