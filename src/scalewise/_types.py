"""Types of arguments that JAX and Python define without a name of their own."""

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

PyTree: TypeAlias = Any
"""Containers nested in any way, of arrays and other leaves (see ``jax.tree_util``)."""

TreeDef: TypeAlias = Any
"""The structure of a pytree, a ``jax.tree_util.PyTreeDef``, which is no type for type checkers."""

Json: TypeAlias = Any
"""What ``json`` reads or writes: None, a bool, a number, a string, or a list or dict of these."""

AxisName: TypeAlias = Hashable | Sequence[Hashable]
"""The name of a mapped axis, or a sequence of names, as ``jax.lax.psum`` takes it."""
