"""Stored arrays in ``flax.serialization``, once a program has imported it."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import jax

from .._types import PyTree

Class = TypeVar("Class", bound=type)
KINDS: list[type] = []  # whose arrays flax.serialization doesn't know yet


def stored_array(cls: Class) -> Class:
    """Registers a class of arrays as a pytree, and for ``flax.serialization``.

    The class calls :func:`serializable` whenever it makes an array.
    """
    KINDS.append(cls)
    return jax.tree_util.register_pytree_node_class(cls)


def serializable() -> None:
    """Registers the stored arrays for ``flax.serialization``, if the program has imported it."""
    if not KINDS:
        return
    flax: Any = sys.modules.get("flax.serialization")
    if flax is None or not hasattr(flax, "register_serialization_state"):
        return

    def state(x: Any) -> dict[str, PyTree]:
        children, _ = x.tree_flatten()
        return {str(i): flax.to_state_dict(child) for i, child in enumerate(children)}

    def restored(x: Any, state: dict[str, PyTree]) -> PyTree:
        children, static = x.tree_flatten()
        new = [flax.from_state_dict(c, state[str(i)]) for i, c in enumerate(children)]
        return type(x).tree_unflatten(static, new)

    while KINDS:
        flax.register_serialization_state(KINDS.pop(), state, restored, override=True)
