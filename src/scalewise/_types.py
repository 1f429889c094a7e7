"""Types of arguments that JAX and Python define without a name of their own."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

Kept = TypeVar("Kept", covariant=True)
Given = TypeVar("Given", contravariant=True)

PyTree: TypeAlias = Any
"""Containers nested in any way, of arrays and other leaves (see ``jax.tree_util``)."""

TreeDef: TypeAlias = Any
"""The structure of a pytree, a ``jax.tree_util.PyTreeDef``, which is no type for type checkers."""

Json: TypeAlias = Any
"""What ``json`` reads or writes: None, a bool, a number, a string, or a list or dict of these."""

AxisName: TypeAlias = Hashable | Sequence[Hashable]
"""The name of a mapped axis, or a sequence of names, as ``jax.lax.psum`` takes it."""


class Converted(Generic[Kept, Given]):
    """The type of a dataclass's field that ``__post_init__`` converts: kept, and given.

    Type checkers read a field of this type as a descriptor: an argument of ``__init__`` and of
    ``dataclasses.replace`` may be any value of the second type, the attribute is of the first.
    """

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: Any, /) -> Kept: ...
        def __set__(self, instance: object, value: Given, /) -> None: ...


def kept(*default: Any) -> Any:
    """Returns the default of a ``Converted`` field, as it is kept, or the field of one without.

    mypy reads descriptors in fields with a default alone, so that to type checkers all have one.
    """
    return default[0] if default else dataclasses.field()
