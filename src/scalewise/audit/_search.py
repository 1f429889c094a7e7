"""The search for changes that help: each is applied, the program run again, its error measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from ..formats import Format
from ._exceptions import changeable, exceptions
from ._findings import Finding, Group, finding, groups
from ._fixes import Fix, Setting, constant_finding, constant_fixes, fixes
from ._lanes import Rounded
from ._literals import Literal
from ._norms import norms
from ._session import Error, Outcome, Session

ENOUGH = 0.5  # a fix that halves the error is taken before wider ones are tried
GAIN = 0.95  # and one that leaves more than this of it is none
IDLE = 12  # findings listed where nothing is tried
LEFT = 6  # and where nothing that was tried helped
EVENTS = ("nan", "overflow", "saturation", "underflow", "swamping")


@dataclasses.dataclass
class Search:
    """Findings whose fixes change the outputs, each fix on top of those before; then the others.

    Attributes:
        session: what is run.
        literals: that change in the format.
        trials: how many runs may still be made.
        found: findings with a fix that helped, what it did to the outputs most first; then, if much
            of the error is left, what no change mended, and last what none was tried for.
        idle: findings with evidence but without a fix that helped.
        now, outcome: the fixes found so far, and what a run with them gives.
    """

    session: Session
    fmt: Format
    literals: Sequence[Literal]
    trials: int
    saturate: bool | str
    found: list[Finding] = dataclasses.field(default_factory=list)
    idle: list[Finding] = dataclasses.field(default_factory=list)
    now: Any = dataclasses.field(init=False)
    outcome: Outcome = dataclasses.field(init=False)

    def run(self, start: Outcome) -> Error:
        """Looks until no change helps or trials are used up; the error with all fixes applied."""
        self.outcome = start
        self.now = Setting(self.session.formats()) if self.session.adjustable else self.session.low
        if self.trials <= 0 or not (self.session.adjustable or changeable(self.session.low)):
            self.idle += [self._finding(g) for g in groups(start.rows)[:IDLE]]
            return start.error
        floor = Error(0, 0.0)
        if self.session.adjustable:
            literals = [x for x in self.literals if not x.masks]
            wide = self.now.wide(range(len(self.now.formats)))
            for literal in literals:
                wide = wide.replaced(literal.number, literal.number)
            floor = self._try(wide).error
            for literal in literals:
                options = constant_fixes(literal, self.outcome.rows, self.now, self.fmt)
                self._attempt(constant_finding(literal), options)
        self._look(floor)
        self.found.sort(key=_gain, reverse=True)
        if not _near(self.outcome.error, floor):
            self._unmended()
        self.idle.sort(key=lambda x: not x.tried)
        return self.outcome.error

    def _look(self, floor: Error) -> None:
        """One finding after another, the most promising first, until the error is near that."""
        tried: set[tuple[int, ...]] = set()
        while self.trials > 0 and not _near(self.outcome.error, floor):
            fresh = [g for g in groups(self.outcome.rows) if g.indices not in tried]
            if not fresh:
                break
            what = self._finding(fresh[0])
            tried.add(fresh[0].indices)
            if self._attempt(what, self._options(fresh[0], what.kind)):
                tried.clear()

    def _options(self, group: Group, kind: str) -> Iterator[Fix]:
        low, rows = self.session.low, self.outcome.rows
        if not isinstance(low, Rounded):
            return exceptions(group, kind, self.now)
        written = norms(self.session.lockstep.seen)
        return fixes(group, kind, rows, self.now, low, written)

    def _unmended(self) -> None:
        """What is left of the error has a cause too: findings without a fix."""
        left: list[Finding] = []
        for group in groups(self.outcome.rows)[:LEFT]:
            what = self._finding(group)
            if what.kind in EVENTS:
                error = self.outcome.error
                tried = any(x.rows == what.rows for x in self.idle)
                what = dataclasses.replace(
                    what, error_before=float(error), broken_before=error.broken, tried=tried
                )
                left.append(what)
                self.idle = [x for x in self.idle if x.rows != what.rows]
        self.found += sorted(left, key=lambda x: not x.tried)

    def _finding(self, group: Group) -> Finding:
        return finding(group, self.fmt, self.saturate)

    def _try(self, setting: Any) -> Outcome:
        self.trials -= 1
        if isinstance(setting, Setting):
            return setting.run(self.session)
        return self.session.with_lane(setting).run()

    def _attempt(self, what: Finding, options: Iterator[Fix]) -> bool:
        """Whether a change helps: the first that helps enough, else the one that helps most."""
        before = self.outcome.error
        best: tuple[Fix, Outcome] | None = None
        for fix in options:
            if self.trials <= 0:
                break
            after = self._try(fix.setting)
            if _better(after.error, before, GAIN) and (
                best is None or _better(after.error, best[1].error, ENOUGH)
            ):
                best = fix, after
            if best is not None and _better(best[1].error, before, ENOUGH):
                break
        what = dataclasses.replace(what, tried=True)
        if best is None:
            self.idle.append(what)
            return False
        fix, after = best
        what = dataclasses.replace(what, order=len(self.found) + 1)
        self.found.append(_with(what, fix.words, before, after.error))
        self.now, self.outcome = fix.setting, after
        return True


def _near(error: Error, floor: Error) -> bool:
    return error.broken <= floor.broken and error.relative <= 1.5 * floor.relative + 1e-7


def _better(after: Error, before: Error, share: float) -> bool:
    """Whether an error is at most a share of another: first what isn't finite, then the rest."""
    if before.broken:
        return after.broken <= share * before.broken
    return after.broken == 0 and after.relative <= share * before.relative


def _with(what: Finding, fix: str, before: Error, after: Error) -> Finding:
    return dataclasses.replace(
        what,
        fix=fix,
        error_before=float(before),
        error_after=float(after),
        broken_before=before.broken,
        broken_after=after.broken,
    )


def _gain(what: Finding) -> tuple[int, float]:
    """What a fix did to the outputs: numbers made finite, then the factor taken off the error."""
    mended = what.broken_before - what.broken_after
    if what.broken_before or not what.error_before:
        return mended, 0.0
    return mended, what.error_before / max(what.error_after, 1e-300)
