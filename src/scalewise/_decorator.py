"""Transformations as decorators, and functions of a function's arguments that return a report."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

Result = TypeVar("Result")
"""What a function that is transformed returns."""
Params = ParamSpec("Params")
"""The parameters of a function that is transformed."""
Target = TypeVar("Target")
"""What an audit's fixes change: a policy, a recipe or a function."""
Found = TypeVar("Found", covariant=True)
P = ParamSpec("P")


class Decorator(Protocol[P]):
    """A transformation that takes the function now, or only its options and the function later."""

    __name__: str

    @overload
    def __call__(
        self, f: Callable[Params, Result], *args: P.args, **kwargs: P.kwargs
    ) -> Callable[Params, Result]: ...

    @overload
    def __call__(
        self, **options: Any
    ) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]: ...


def as_decorator(transformation: Callable[Concatenate[Any, P], Any]) -> Decorator[P]:
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


class Pending(Generic[Params, Found]):
    """A function of ``f``'s arguments that returns what is found out about ``f``.

    Example:
        >>> def explained(x): ...
        >>> Pending(explained, "explain").show()
        Traceback (most recent call last):
        ...
        AttributeError: explain(f, ...) is a function of f's arguments; call it with them first:
        explain(f, ...)(x).show
    """

    def __init__(self, call: Callable[Params, Found], name: str):
        self._call, self._name = call, name

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Found:
        return self._call(*args, **kwargs)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        raise AttributeError(
            f"{self._name}(f, ...) is a function of f's arguments; call it with them first: "
            f"{self._name}(f, ...)(x).{attribute}"
        )

    def __repr__(self) -> str:
        return f"<{self._name}(f, ...): a function of f's arguments>"
