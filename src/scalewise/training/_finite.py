"""Checks whether a pytree is finite, in one pass, and selects between two pytrees."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .._check import checked
from .._types import AxisName, PyTree


@checked
def all_finite(tree: PyTree, *, axis_name: AxisName = None) -> jax.Array:
    """Returns a scalar boolean array: True if every float in a pytree is finite.

    Takes the largest magnitude of each leaf (which XLA fuses with the computation of the leaf, and
    which is NaN if an element is) and tests all of them at once. Integers, booleans and keys count
    as finite; so does an empty tree.

    Args:
        tree: gradients, for example; float leaves of any width.
        axis_name: mapped axes (``jax.shard_map``, ``jax.pmap``) along which all trees have to be
            finite, so that every device gets the same answer. Not needed for global arrays, as
            under ``jit`` with shardings.

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


def tree_where(predicate: jax.Array, on_true: PyTree, on_false: PyTree) -> PyTree:
    def leaf(a: PyTree, b: PyTree) -> PyTree:
        return jnp.where(predicate, a, b) if is_array(a) or is_array(b) else a

    return jax.tree.map(leaf, on_true, on_false)


def is_array(x: object) -> bool:
    """Returns whether a leaf is a number or an array of numbers."""
    return hasattr(x, "dtype") or isinstance(x, bool | int | float | complex)


def is_float_array(x: PyTree) -> bool:
    """Returns whether a leaf is a real float array of any width."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def floats_as(dtype: DTypeLike, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.astype(dtype) if is_float_array(x) else x, tree)


def at_least_float32(x: jax.Array) -> jax.Array:
    """Returns a float array in float32; float64 stays."""
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def _largest(x: jax.Array) -> jax.Array:
    """Returns a float32 scalar that is finite if all elements are."""
    if x.dtype.itemsize == 2 and x.ndim and x.shape[-1] % 2 == 0:
        return _pairs_sign(x)
    if x.dtype.itemsize < 2:  # no backend compares FP8
        x = x.astype(jnp.float32)
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def _pairs_sign(x: jax.Array) -> jax.Array:
    """Returns infinity if a 16-bit element isn't finite, else 0; tests two elements at a time.

    If all exponent bits are ones, adding the lowest of them carries into the sign bit. XLA on CPU
    writes 16-bit operands of a reduction to memory first, but fuses a minimum of float32.
    """
    ones = int(np.asarray(np.inf, x.dtype).view(np.uint16))
    lowest = 1 << jnp.finfo(x.dtype).nmant
    pairs = lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint32)
    sums = (pairs & np.uint32(ones * 0x10001)) + np.uint32(lowest * 0x10001)
    carry = (sums | (sums << np.uint32(16))) & np.uint32(0x80000000)
    one = lax.bitcast_convert_type(carry | np.uint32(0x3F800000), jnp.float32)  # 1 or -1
    return jnp.where(jnp.min(one) > 0, np.float32(0), np.float32(np.inf))
