"""The formats that ``keep`` gives to primitives and scopes of their own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from ..formats import BlockFormat, Format
from ..interpret import CONTRACTIONS, Equation, warn_kernel

# The transformations that JAX writes into a name stack around the user's names.
TRANSFORMS = re.compile(r"\b(?:transpose|jvp|vmap|jit|rematted_computation|checkpoint|remat)\b")

Default = TypeVar("Default")
Scope: TypeAlias = str | re.Pattern[str]  # what names equations in ``Recipe.keep``
Kept: TypeAlias = object  # what ``keep`` gives them: a format, None for float32, or settings


class FormatOverrides:
    """The ``keep`` of a recipe, with a record of which names have matched."""

    def __init__(self, keep: Iterable[tuple[Scope, Kept]]):
        self.keep = tuple(keep)
        self.met: set[Scope] = set()
        self.names: set[str] = set()
        self.scopes: set[str] = set()
        self.places = Places()

    def find(self, equation: Equation, default: Default) -> Format | BlockFormat | Default | None:
        """Returns the format that ``keep`` gives to an equation, or the default."""
        found = self.first(equation, default)
        return default if _is_setting(found) else found  # pyright: ignore[reportReturnType]

    def setting(self, equation: Equation) -> Any:
        """Returns what ``keep`` gives to an equation that is no format; None for nothing."""
        found = self.first(equation, None)
        return found if _is_setting(found) else None

    @property
    def have_settings(self) -> bool:
        """Whether ``keep`` gives anything but formats."""
        return any(_is_setting(kept) for _, kept in self.keep)

    def first(self, equation: Equation, default: Default) -> Kept | Default:
        """Returns what the first name that matches an equation has, or the default."""
        if not self.keep:
            return default
        parts = scope_parts(equation.scope)
        self.names.add(equation.name)
        self.scopes.add("/".join(parts))
        place = self.places.of(equation)
        found = [
            (n, f)
            for n, f in self.keep
            if n == equation.name or _within(n, parts) or (isinstance(n, str) and place.matches(n))
        ]
        self.met |= {n for n, _ in found}
        return found[0][1] if found else default

    def warn(self, equation: Equation, what: str = "") -> None:
        """Warns of an equation without a rule, unless ``keep`` leaves it unrounded."""
        if self.find(equation, "rounded") is not None:
            advice = f" Name it in the recipe, keep={{{equation.name!r}: 'fp32'}}, if so."
            warn_kernel(equation, "autoscale", advice, what)

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
                shown, what = first, "is neither a primitive, nor a scope, nor a line"
            raise ValueError(
                f"{name}: keep names {shown!r}, which {what} where this function rounds anything. "
                f"These primitives are: {names}; these scopes: {scopes}"
            )


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a contraction is: its scope, its line (``"model.py:12"``), and its number there.

    The number counts the contractions of one line in one scope, in the order of the program and
    from 1; 0 in a backward pass, which has no order of its own.
    """

    scope: str
    line: str
    number: int = 0

    def matches(self, name: str) -> bool:
        """Returns whether a name of ``keep`` names this place by its line.

        That is ``"model.py:12"``, ``"model.py:12#2"`` for the second contraction there, and both
        behind a scope and a space.
        """
        for line in (self.line, f"{self.line}#{self.number}") if self.line else ():
            scope = name.removesuffix(line)
            if scope != name and (not scope or scope[-1] == " "):
                return not scope or _within(scope[:-1], self.scope.split("/"))
        return False


class Places:
    def __init__(self):
        self.met: dict[tuple[str, str], list[tuple[int, ...]]] = {}

    def of(self, equation: Equation) -> Place:
        source = equation.caller or equation.source
        line = f"{Path(source[0]).name}:{source[1]}" if source else ""
        scope = "/".join(scope_parts(equation.scope))
        if equation.name not in CONTRACTIONS or equation.direction == "backward":
            return Place(scope, line)
        paths = self.met.setdefault((scope, line), [])
        if equation.path not in paths:  # a loop's body may be traced more than once
            paths.append(equation.path)
        return Place(scope, line, 1 + paths.index(equation.path))


def scope_parts(scope: str) -> list[str]:
    """Returns the user's names in a name stack, outermost first, without JAX's transformations."""
    return [p for p in re.split(r"[/()]+", TRANSFORMS.sub("", scope)) if p]


def _is_setting(kept: object) -> bool:
    return kept is not None and not isinstance(kept, Format | BlockFormat)


def _within(name: Scope, parts: list[str]) -> bool:
    if isinstance(name, re.Pattern):
        return bool(parts) and name.search("/".join(parts)) is not None
    wanted = name.split("/")
    n = len(wanted)
    return any(parts[i : i + n] == wanted for i in range(len(parts) - n + 1))
