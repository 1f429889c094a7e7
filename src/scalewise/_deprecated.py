"""Old public names, each kept for one release: they warn and do what the new names do."""

from __future__ import annotations

import dataclasses
import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warns, at the caller's caller, that ``old`` is now called ``new``."""
    message = f"{old} is deprecated and will be removed: use {new}"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)


def renamed_attribute(old: str, new: str) -> Any:
    """Returns a property that reads the attribute ``new`` and warns that ``old`` is its old name.

    Example:
        >>> class Report:
        ...     equations = ()
        ...     rows = renamed_attribute("rows", "equations")
    """

    def read(self: Any) -> Any:
        warn_renamed(f"{type(self).__name__}.{old}", new)
        return getattr(self, new)

    return property(read)


def renamed_arguments(**names: str) -> Callable[[T], T]:
    """Returns a decorator of a function or dataclass that also accepts old names of arguments.

    A dataclass gets a read-only attribute under each old name, too, and ``dataclasses.replace``
    accepts it.

    Args:
        names: each old name with the new one.

    Example:
        >>> @renamed_arguments(wire="comm_format")
        ... def send(x, *, comm_format=None):
        ...     return x, comm_format
        >>> send(1, comm_format="fp16")
        (1, 'fp16')
    """

    def decorate(target: Any) -> Any:
        function = target.__init__ if isinstance(target, type) else target
        fields = (
            {f.name for f in dataclasses.fields(target) if f.init}
            if isinstance(target, type)
            else None
        )

        @functools.wraps(function)
        def accepting(*args: Any, **kwargs: Any) -> Any:
            for old in names.keys() & kwargs.keys():
                new, call = names[old], target.__name__
                replaces = fields is not None and fields <= kwargs.keys()
                if new in kwargs and not replaces:  # dataclasses.replace passes every field
                    raise TypeError(f"{call}: {old}= is the old name of {new}=, which is given too")
                warn_renamed(f"{call}({old}=...)", f"{new}=")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        if not isinstance(target, type):
            return accepting
        target.__init__ = accepting
        for old, new in names.items():
            setattr(target, old, renamed_attribute(old, new))
        return target

    return decorate


def renamed_exports(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a ``__getattr__`` for ``module`` that finds its exports under their old names.

    Args:
        module: ``__name__`` of the module.
        names: each old name with the new one, which the module has.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", names[name])
        return getattr(sys.modules[module], names[name])

    return find
