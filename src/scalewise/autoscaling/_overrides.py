"""The formats that a recipe's ``keep`` gives to primitives and scopes of their own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeAlias, TypeVar

from ..formats import BlockFormat, Format
from ..interpret import Equation, warn_kernel

# The transformations that JAX writes into a name stack around the user's names.
TRANSFORMS = re.compile(r"\b(?:transpose|jvp|vmap|jit|rematted_computation|checkpoint|remat)\b")

Default = TypeVar("Default")
Scope: TypeAlias = str | re.Pattern[str]  # what names equations in ``Recipe.keep``


class FormatOverrides:
    """The ``keep`` of a recipe, with a record of which names have matched."""

    def __init__(self, keep: Iterable[tuple[Scope, Format | BlockFormat | None]]):
        self.keep = tuple(keep)
        self.met: set[Scope] = set()
        self.names: set[str] = set()
        self.scopes: set[str] = set()

    def find(self, equation: Equation, default: Default) -> Format | BlockFormat | Default | None:
        """Returns the format that ``keep`` gives to an equation, or the default."""
        if not self.keep:
            return default
        parts = scope_parts(equation.scope)
        self.names.add(equation.name)
        self.scopes.add("/".join(parts))
        found = [(n, f) for n, f in self.keep if n == equation.name or _within(n, parts)]
        self.met |= {n for n, _ in found}
        return found[0][1] if found else default

    def check(self, name: str) -> None:
        """Raises ValueError if a name of ``keep`` has matched nothing."""
        unmet = [n for n, _ in self.keep if n not in self.met]
        if unmet:
            names, scopes = (
                ", ".join(sorted(filter(None, x))) or "none" for x in (self.names, self.scopes)
            )
            first = unmet[0]
            if isinstance(first, re.Pattern):
                shown, what = first.pattern, "is found in no scope"
            else:
                shown, what = first, "is neither a primitive nor a scope"
            raise ValueError(
                f"{name}: keep names {shown!r}, which {what} where this function rounds anything. "
                f"These primitives are: {names}; these scopes: {scopes}"
            )


def warn_opaque(equation: Equation) -> None:
    """Warns if floats pass through a kernel or Python function that ``keep`` doesn't name.

    Neither can have a rule: both compute on unrounded plain numbers, whatever the recipe says.
    """
    warn_kernel(
        equation, "autoscale", f" Name it in the recipe, keep={{{equation.name!r}: 'fp32'}}, if so."
    )


def scope_parts(scope: str) -> list[str]:
    """Returns the user's names in a name stack, outermost first, without JAX's transformations."""
    return [p for p in re.split(r"[/()]+", TRANSFORMS.sub("", scope)) if p]


def _within(name: Scope, parts: list[str]) -> bool:
    if isinstance(name, re.Pattern):
        return bool(parts) and name.search("/".join(parts)) is not None
    wanted = name.split("/")
    n = len(wanted)
    return any(parts[i : i + n] == wanted for i in range(len(parts) - n + 1))
