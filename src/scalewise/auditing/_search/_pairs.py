"""Pairs of fixes, for two findings that spoil the same outputs: neither fix helps alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from .._run._session import OutputError
from ._findings import Finding
from ._fixes import Fix
from ._measure import key_of
from ._widening import joined

FINDINGS = 4  # of which pairs are made: at most six
RESERVE = 6  # trials reserved for pairs, or a third of all if that is less
NARROWER = 3  # trials that may be spent on narrowing each fix of a pair


@dataclasses.dataclass(frozen=True)
class Failed:
    """A finding that no single fix helped, and what was tried for it.

    Attributes:
        what: the finding.
        options: its fixes, the smallest first.
        tried: those that were tried, and the error with each.
        base: the setting that they were tried on.
        before: the error with that setting.
    """

    what: Finding
    options: tuple[Fix, ...]
    tried: tuple[tuple[Fix, OutputError], ...]
    base: Any
    before: OutputError

    @property
    def best(self) -> Fix:
        """The fix to combine: a loss scale, or the widest that didn't increase the error."""
        tried = sorted(self.tried, key=lambda x: x[0].size)
        scales = [fix for fix, _ in tried if fix.kind and fix.kind.combined_first]
        harmless = [fix for fix, error in tried if error <= self.before]
        return (scales or harmless or [fix for fix, _ in tried])[-1]

    def narrower(self, fix: Fix) -> list[Fix]:
        return [x for x in self.options if 0 < x.size < fix.size][:NARROWER]

    def error_alone(self, fix: Fix) -> OutputError | None:
        return next((error for other, error in self.tried if other is fix), None)


def pairs(failed: Sequence[Failed]) -> Iterator[tuple[Failed, Failed]]:
    different = {key_of(x.best.change(x.base)): x for x in reversed(failed)}
    few = list(different.values())[::-1][:FINDINGS]
    places = [(i, j) for j in range(len(few)) for i in range(j)]
    for i, j in sorted(places, key=sum):
        yield few[i], few[j]


def joint_findings(
    whats: Sequence[Finding], parts: Sequence[Fix], alone: Sequence[OutputError], whole: Fix
) -> list[Finding]:
    found = []
    for what, own, error in zip(whats, parts, alone, strict=True):
        others = [f"{x} ({y.where})" for x, y in zip(parts, whats, strict=True) if x is not own]
        text = f"{own}, together with {joined(others)}"
        fix = dataclasses.replace(whole, text=text, size=own.size, kind=own.kind or whole.kind)
        joint = dataclasses.replace(
            what, fix=fix, error_alone=float(error), non_finite_alone=error.non_finite
        )
        found.append(joint)
    return found


def both(a: Fix, b: Fix) -> Fix:
    return Fix(f"{a}; {b}", lambda now: b.change(a.change(now)))
