"""``jax.tree``'s functions on pytrees in which a ScaledArray is one leaf.

Example:
    >>> import jax.numpy as jnp
    >>> tree = {"w": ScaledArray(jnp.float16([1, 2]), 4.0), "step": 3}
    >>> map(lambda x: x.shape if is_scaled(x) else x, tree)
    {'step': 3, 'w': (2,)}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeGuard

import jax

from .._types import PyTree, TreeDef
from ._array import ScaledArray


def is_scaled(x: object) -> TypeGuard[ScaledArray]:
    """Returns whether an object is a :class:`ScaledArray`."""
    return isinstance(x, ScaledArray)


def map(f: Callable, tree: PyTree, *rest: PyTree) -> PyTree:
    """Applies ``f`` to each leaf, as ``jax.tree.map`` does."""
    return jax.tree.map(f, tree, *rest, is_leaf=is_scaled)


def leaves(tree: PyTree) -> list[PyTree]:
    """Returns the leaves, as ``jax.tree.leaves`` does."""
    return jax.tree.leaves(tree, is_leaf=is_scaled)


def structure(tree: PyTree) -> TreeDef:
    """Returns the structure above the leaves, as ``jax.tree.structure`` does."""
    return jax.tree.structure(tree, is_leaf=is_scaled)


def flatten(tree: PyTree) -> tuple[list[PyTree], TreeDef]:
    """Returns leaves and structure, as ``jax.tree.flatten`` does."""
    return jax.tree.flatten(tree, is_leaf=is_scaled)


def unflatten(structure: TreeDef, leaves: Iterable[PyTree]) -> PyTree:
    """Returns the tree of a structure and leaves, as ``jax.tree.unflatten`` does."""
    return jax.tree.unflatten(structure, leaves)


def all(tree: PyTree) -> bool:
    """Returns whether every leaf is true, as ``jax.tree.all`` does."""
    return jax.tree.all(tree, is_leaf=is_scaled)
