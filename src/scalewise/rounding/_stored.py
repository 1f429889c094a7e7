"""``StoredArray``, the base class of arrays that are stored as other arrays."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any, ClassVar, Self, TypeVar

import jax
import numpy as np
from jax import export
from jax.typing import DTypeLike

from .._types import PyTree
from ..formats import Format

Node = TypeVar("Node")
KINDS: list[type[StoredArray]] = []  # which flax.serialization doesn't know yet


def exportable(cls: type[Node]) -> type[Node]:
    """Lets ``jax.export`` serialize a pytree; its static part is of tuples, numbers, formats."""
    export.register_pytree_node_serialization(
        cls,
        serialized_name=f"{cls.__module__.partition('.')[0]}.{cls.__name__}",
        serialize_auxdata=lambda static: json.dumps(static, default=_format_fields).encode(),
        deserialize_auxdata=lambda text: _static(json.loads(bytes(text))),
    )
    return cls


def _format_fields(value: object) -> dict[str, Any]:
    if not isinstance(value, Format):
        raise TypeError(f"jax.export: no function of a pytree with {value!r} can be serialized")
    return dataclasses.asdict(value)


def _static(value: Any) -> Any:
    if isinstance(value, dict):
        return Format(**value)
    return tuple(map(_static, value)) if isinstance(value, list) else value


class StoredArray:
    """An array stored as other arrays: a pytree, whose value is computed when it is read.

    A subclass is a frozen dataclass. Its fields are the pytree's children, but for those in
    ``STATIC``. ``flax.serialization`` saves and restores it, once a program has imported that, and
    ``jax.export`` serializes functions of it.
    """

    STATIC: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls):
        KINDS.append(cls)
        jax.tree_util.register_pytree_node_class(cls)
        if cls.__module__.startswith(__name__.partition(".")[0]):
            exportable(cls)

    def __post_init__(self):
        _serializable()

    def value(self) -> jax.Array:
        """Returns the plain array."""
        raise NotImplementedError

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        value = np.asarray(self.value())
        return value if dtype is None else value.astype(dtype)

    def __jax_array__(self) -> jax.Array:
        return self.value()

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        children = tuple(getattr(self, name) for name in self._children())
        static = tuple(getattr(self, name) for name in self.STATIC)
        return children, static[0] if len(static) == 1 else static or None

    @classmethod
    def tree_unflatten(cls, static: Any, children: tuple[Any, ...]) -> Self:
        _serializable()
        self = object.__new__(cls)  # leaves may be any object while a tree is mapped: no checks
        fields = zip(cls._children(), children, strict=True)
        own = (static,) if len(cls.STATIC) == 1 else static or ()
        for name, value in (*fields, *zip(cls.STATIC, own, strict=True)):
            object.__setattr__(self, name, value)
        return self

    @classmethod
    def _children(cls) -> tuple[str, ...]:
        fields: Any = cls
        return tuple(f.name for f in dataclasses.fields(fields) if f.name not in cls.STATIC)


def _serializable() -> None:
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
