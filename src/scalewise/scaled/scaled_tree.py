"""``jax.tree``'s functions on pytrees in which a ScaledArray is one leaf.

Example:
    >>> import jax.numpy as jnp
    >>> tree = {"w": ScaledArray(jnp.float16([1, 2]), 4.0), "step": 3}
    >>> map(lambda x: x.shape if is_scaled(x) else x, tree)
    {'step': 3, 'w': (2,)}
"""

from __future__ import annotations

import functools
from typing import TypeGuard

import jax

from ._array import ScaledArray


def is_scaled(x: object) -> TypeGuard[ScaledArray]:
    """Returns whether an object is a :class:`ScaledArray`."""
    return isinstance(x, ScaledArray)


map = functools.partial(jax.tree.map, is_leaf=is_scaled)
leaves = functools.partial(jax.tree.leaves, is_leaf=is_scaled)
structure = functools.partial(jax.tree.structure, is_leaf=is_scaled)
flatten = functools.partial(jax.tree.flatten, is_leaf=is_scaled)
unflatten = jax.tree.unflatten
all = functools.partial(jax.tree.all, is_leaf=is_scaled)
