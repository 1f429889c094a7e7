"""Functions of a function's arguments that return a report; types of transformations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

Result = TypeVar("Result")
"""What a function that is transformed returns."""
Params = ParamSpec("Params")
"""The parameters of a function that is transformed."""
Target = TypeVar("Target")
"""What an audit's fixes change: a policy, a recipe or a function."""
Found = TypeVar("Found", covariant=True)


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
