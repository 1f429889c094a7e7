"""The fix that computes some operations in a wider format, and how it is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from .._run._equation_statistics import Equations, EquationStatistics
from ._fixes import Fix
from ._setting import Setting


def widened(
    word: str,
    what: str,
    equations: Equations,
    *,
    cause: EquationStatistics | None = None,
    limits: Sequence[float] = (),
) -> Fix:
    indices, limits = tuple(e.index for e in equations), tuple(limits)
    text = f"{word} for {what}"
    if limits:
        text += f", with {word}'s limit in place of {max(map(abs, limits)):g}"

    def change(now: Setting) -> Setting:
        return now.widened(indices).without_limits(limits)

    return Fix(text, change, len(indices), indices=indices, limits=limits, cause=cause)


def with_exact(some: Equations, every: Equations) -> list[EquationStatistics]:
    """Returns operations, and those of their lines that made no error: whole lines are widened."""
    there, chosen = {_place(e) for e in some}, {e.index for e in some}
    rest = [e for e in every if _place(e) in there and e.index not in chosen]
    return [*some, *(e for e in rest if not (e.introduced or e["overflowed"] or e["nan"]))]


def _place(equation: EquationStatistics) -> tuple[str | None, int, str]:
    return equation.file, equation.line, equation.direction


def described(some: Equations, every: Equations) -> str:
    """Returns ``lines 3 and 7``, or ``the mul and sub at lines 3 and 7`` if they have others."""
    there, chosen = {_place(e) for e in some}, {e.index for e in some}
    rest = [e for e in every if _place(e) in there and e.index not in chosen]
    places = sorted({(e.file, e.line) for e in some if e.file and e.line})
    if not places:
        return f"{len(some)} operations"
    if len({file for file, _ in places}) > 1:
        where = joined(f"{Path(file).name}:{line}" for file, line in places)
    else:
        where = f"line{'s' * (len(places) > 1)} {joined(str(line) for _, line in places)}"
    return f"the {joined(dict.fromkeys(e.primitive for e in some))} at {where}" if rest else where


def joined(words: Iterable[str]) -> str:
    """Returns ``a``, ``a and b`` or ``a, b and c``."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
