"""Two changes at once, where neither helps alone: the same numbers are broken by two causes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from ._findings import Finding
from ._fixes import Fix
from ._session import Error

FINDINGS = 4  # of which pairs are made: six at most
RESERVE = 6  # runs that are kept for them, a third of all if there are few
SMALLER = 3  # runs that may go into making each part smaller


@dataclasses.dataclass(frozen=True)
class Spare:
    """A finding that nothing mended alone, and what was tried for it.

    Attributes:
        what: the finding.
        tried: changes, smallest first, and the error that each left alone.
        base: what they were tried on top of.
    """

    what: Finding
    tried: tuple[tuple[Fix, Error], ...]
    base: Any

    @property
    def best(self) -> Fix:
        """The change that left least error alone; of equals the widest, which mends most."""
        least = min(error for _, error in self.tried)
        return [fix for fix, error in self.tried if error == least][-1]

    def smaller(self, fix: Fix) -> list[Fix]:
        """What was tried before a change."""
        known = [fix for fix, _ in self.tried]
        return known[: known.index(fix)][:SMALLER]

    def alone(self, fix: Fix) -> Error:
        """What one of them left."""
        return next(error for known, error in self.tried if known is fix)


def pairs(spare: Sequence[Spare]) -> Iterator[tuple[Spare, Spare]]:
    """Of the first FINDINGS, the most promising two first."""
    few = spare[:FINDINGS]
    places = [(i, j) for j in range(len(few)) for i in range(j)]
    for i, j in sorted(places, key=sum):
        yield few[i], few[j]


def both(a: Fix, b: Fix) -> Fix:
    """One change and then the other."""
    return Fix(f"{a.words}; {b.words}", lambda now: b.change(a.change(now)))
