"""Transformations that are written above a function, with options or without."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

Result = TypeVar("Result")
"""What a function that is transformed returns."""
P = ParamSpec("P")


class Decorator(Protocol[P]):
    """A transformation that takes the function now, or only its options and the function later."""

    __name__: str

    @overload
    def __call__(
        self, f: Callable[..., Result], *args: P.args, **kwargs: P.kwargs
    ) -> Callable[..., Result]: ...

    @overload
    def __call__(
        self, **options: Any
    ) -> Callable[[Callable[..., Result]], Callable[..., Result]]: ...


def as_decorator(transformation: Callable[Concatenate[Callable, P], Callable]) -> Decorator[P]:
    """Lets a transformation be written above a function: ``@autoscale(recipe="fp8")``.

    Args:
        transformation: its first parameter is ``f``, the function. Called without ``f``, it returns
            a function that takes ``f``.
    """

    @functools.wraps(transformation)
    def call(*args: Any, **kwargs: Any) -> Callable:
        if args and not callable(args[0]):
            name = transformation.__name__
            option = [*inspect.signature(transformation).parameters][1]
            raise TypeError(
                f"{name}: f is {args[0]!r}; expected a function. A decorator takes options by "
                f"name: @{name}({option}={args[0]!r})"
            )
        if args or "f" in kwargs:
            return transformation(*args, **kwargs)
        return functools.partial(call, **kwargs)

    return cast(Any, call)
