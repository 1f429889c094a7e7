"""Two changes at once, where neither helps alone: the same numbers are broken by two causes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from .._run._session import Error
from ._findings import Finding
from ._fixes import Fix

FINDINGS = 4  # of which pairs are made: six at most
RESERVE = 6  # runs that are kept for them, a third of all if there are few
SMALLER = 3  # runs that may go into making each part smaller


@dataclasses.dataclass(frozen=True)
class Spare:
    """A finding that nothing mended alone, and what was tried for it.

    Attributes:
        what: the finding.
        options: changes, smallest first.
        tried: some of them, and the error that each left alone.
        base: what they were tried on top of.
        before: the error without any.
    """

    what: Finding
    options: tuple[Fix, ...]
    tried: tuple[tuple[Fix, Error], ...]
    base: Any
    before: Error

    @property
    def best(self) -> Fix:
        """The change to pair: a loss scale, or the widest that did no harm alone."""
        scales = [fix for fix, _ in self.tried if fix.words.startswith("loss scale")]
        harmless = [fix for fix, error in self.tried if error <= self.before]
        return (scales or harmless or [fix for fix, _ in self.tried])[-1]

    def smaller(self, fix: Fix) -> list[Fix]:
        """Changes that make less float32."""
        return [x for x in self.options if 0 < x.size < fix.size][:SMALLER]

    def alone(self, fix: Fix) -> Error | None:
        """What one of them left, if it was tried."""
        return next((error for known, error in self.tried if known is fix), None)


def pairs(spare: Sequence[Spare]) -> Iterator[tuple[Spare, Spare]]:
    """Of the first FINDINGS with changes that aren't the same, the most promising two first."""
    few = list({x.best.words: x for x in reversed(spare)}.values())[::-1][:FINDINGS]
    places = [(i, j) for j in range(len(few)) for i in range(j)]
    for i, j in sorted(places, key=sum):
        yield few[i], few[j]


def both(a: Fix, b: Fix) -> Fix:
    """One change and then the other."""
    return Fix(f"{a.words}; {b.words}", lambda now: b.change(a.change(now)))
