"""The search for changes that help: each is applied, the program run again, its error measured."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from ...formats import Format
from .._run._lanes import Rounded
from .._run._session import Error, Outcome, Session
from ._exceptions import changeable, exceptions
from ._findings import Finding, Group, finding, groups
from ._fixes import Fix, Setting, constant_finding, constant_fixes, fixes
from ._literals import Literal
from ._measure import ENOUGH, GAIN, better, enough, gain, key_of, mended, near, same
from ._norms import norms
from ._pairs import RESERVE, Spare, both, pairs

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
        floor: the error of float32 throughout, where that was run.
        now, outcome: the fixes found so far, and what a run with them gives.
        reserve: trials that are kept for pairs of changes: with no more no finding is begun.
        last: whether pairs were tried too: what changes all of the program is left for then.
        spare: findings that no change mended alone.
        seen: settings that were tried.
        known: what runs gave that were made ahead of their turn.
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
    floor: Error = dataclasses.field(default_factory=lambda: Error(0, 0.0))
    reserve: int = 0
    last: bool = False
    spare: list[Spare] = dataclasses.field(default_factory=list)
    seen: set[Hashable] = dataclasses.field(default_factory=set)
    known: dict[Hashable, Outcome] = dataclasses.field(default_factory=dict)

    def run(self, start: Outcome) -> Error:
        """Looks until no change helps or trials are used up; the error with all fixes applied."""
        self.outcome = start
        self.now = Setting(self.session.formats()) if self.session.adjustable else self.session.low
        self.seen.add(key_of(self.now))
        if self.trials <= 0 or not (self.session.adjustable or changeable(self.session.low)):
            self.idle += [self._finding(g) for g in groups(start.rows, self.fmt)[:IDLE]]
            return start.error
        self.reserve = min(RESERVE, self.trials // 3)
        self.floor = Error(0, 0.0)
        if self.session.adjustable:
            literals = [x for x in self.literals if not x.masks]
            wide = self.now.wide(range(len(self.now.formats)))
            for literal in literals:
                wide = wide.replaced(literal.number, literal.number)
            self.known[key_of(wide)] = self._try(wide)
            self.floor = self.known[key_of(wide)].error
        self._look()
        paired = True
        while paired and self.trials > 0 and not self._done:
            paired = self._pair()
            self.reserve, self.last = 0, not paired
            self._look()
        self.found.sort(key=gain, reverse=True)
        if not self._done:
            self._unmended()
        self.idle.sort(key=lambda x: not x.tried)
        return self.outcome.error

    @property
    def _done(self) -> bool:
        return near(self.outcome.error, self.floor)

    def _look(self) -> None:
        """Constants, then one finding after another, the most promising first, until the error is
        near that of float32 throughout; from the beginning after each that was mended."""
        self._constants()
        tried: set[tuple[int, ...]] = set()
        vain: collections.Counter[str] = collections.Counter()  # not all in one of the directions
        while self.trials > self.reserve and not self._done:
            fresh = [g for g in groups(self.outcome.rows, self.fmt) if g.indices not in tried]
            if not fresh:
                break
            group = min(fresh, key=lambda g: vain[g.first.direction])
            what = self._finding(group)
            tried.add(group.indices)
            vain[what.direction] += 1
            if self._attempt(what, self._options(group, what.kind)):
                tried.clear()
                vain.clear()
                self._constants()

    def _constants(self) -> None:
        """Those that the format changes and nothing mended yet."""
        mended = {(x.file, x.line, x.evidence) for x in self.found}
        for literal in self.literals if self.session.adjustable else ():
            what = constant_finding(literal)
            if literal.slight and not self.last:
                continue
            if self._done:
                return
            if not literal.masks and (what.file, what.line, what.evidence) not in mended:
                self._attempt(what, constant_fixes(literal, self.outcome.rows, self.fmt))

    def _options(self, group: Group, kind: str) -> Iterator[Fix]:
        low, rows = self.session.low, self.outcome.rows
        gradients = [row for row in rows if row.index in self.session.carrying]
        if not isinstance(low, Rounded):
            return exceptions(group, kind, self.now, gradients)
        written = norms(self.session.lockstep.seen)
        return fixes(group, kind, rows, low, written, gradients, self.last)

    def _unmended(self) -> None:
        """What is left of the error has a cause too: findings without a fix."""
        left: list[Finding] = []
        for group in groups(self.outcome.rows, self.fmt)[:LEFT]:
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
        self.seen.add(key_of(setting))
        if isinstance(setting, Setting):
            return setting.run(self.session)
        return self.session.with_lane(setting).run()

    def _attempt(self, what: Finding, changes: Iterator[Fix]) -> bool:
        """Whether a change helps: the first that helps enough, else the one that helps most."""
        before = self.outcome.error
        best: tuple[Fix, Outcome] | None = None
        tried: list[tuple[Fix, Error]] = []
        options = list(changes)
        for fix in self._promising(options, before):
            setting = fix.change(self.now)
            after = self.known.get(key_of(setting))
            if after is None:
                if self.trials <= 0 or key_of(setting) in self.seen:
                    continue
                after = self._try(setting)
            tried.append((fix, after.error))
            if (
                better(after.error, before, GAIN)
                and (best is None or better(after.error, best[1].error, ENOUGH))
                and self._merits(fix, after)
            ):
                best = fix, after
            if best is not None and enough(best[1].error, before):
                break
        what = dataclasses.replace(what, tried=bool(tried))
        if best and not self.last and not better(best[1].error, before, ENOUGH):
            # helps a little: two together may do more, and it is there to be taken at last
            self.known[key_of(best[0].change(self.now))] = best[1]
            best = None
        if best is None:
            if tried:
                self.spare.append(Spare(what, tuple(options), tuple(tried), self.now, before))
            if tried or not any(same(what, x) for x in self.idle):
                self.idle = [x for x in self.idle if not same(what, x)] + [what]
            return False
        fix, after = best
        self._keep(fix, after, [dataclasses.replace(what, fix=fix.words)])
        return True

    def _merits(self, fix: Fix, after: Outcome) -> bool:
        """Whether less than a change helps less."""
        if fix.without is None or self.trials <= 0:
            return True
        setting = fix.without.change(self.now)
        if key_of(setting) not in self.known:
            self.known[key_of(setting)] = self._try(setting)
        return better(after.error, self.known[key_of(setting)].error, GAIN)

    def _promising(self, options: list[Fix], before: Error) -> list[Fix]:
        """Options, once a finding was in vain: if float32 for most doesn't help, less won't."""
        widest = max(options, key=lambda fix: fix.size, default=None)
        if not self.spare or widest is None or not widest.size:
            return options
        setting = widest.change(self.now)
        if key_of(setting) not in self.seen:
            if self.trials <= 0:
                return []
            self.known[key_of(setting)] = outcome = self._try(setting)
            if better(outcome.error, before, GAIN):
                return options
        return [fix for fix in options if not fix.size or fix is widest]

    def _pair(self) -> bool:
        """Whether two changes help where each alone didn't: the first pair that helps enough."""
        before = self.outcome.error
        for a, b in pairs(self.spare):
            fix = both(a.best, b.best)
            setting = self._allowed(fix)
            if setting is None or self.trials <= 0:
                continue
            after = self._try(setting)
            if better(after.error, before, ENOUGH):
                parts, after = self._smaller((a, b), (a.best, b.best), after)
                self._keep(both(*parts), after, self._halves((a, b), parts))
                return True
            if better(after.error, before, GAIN):
                self.known[key_of(setting)] = after
        return False

    def _smaller(self, spares, parts: tuple[Fix, Fix], after: Outcome):
        """Each part made as small as still helps as much."""
        before = self.outcome.error
        for i, spare in enumerate(spares):
            for fix in spare.smaller(parts[i]):
                tried = (fix, parts[1]) if i == 0 else (parts[0], fix)
                setting = self._allowed(both(*tried))
                if self.trials <= 0 or setting is None:
                    continue
                outcome = self._try(setting)
                equal = outcome.error.relative <= max(2 * after.error.relative, float(self.fmt.eps))
                if better(outcome.error, before, ENOUGH) and equal:
                    parts, after = tried, outcome
                    break
        return parts, after

    def _halves(self, spares: Sequence[Spare], parts: tuple[Fix, Fix]) -> list[Finding]:
        """The findings of a pair, each with its own part first, and with what that did alone."""
        found = []
        for own, other, fix, second in zip(spares, spares[::-1], parts, parts[::-1], strict=True):
            alone = own.alone(fix) if own.base is self.now else None
            if alone is None and self.trials > 0:
                alone = self._try(fix.change(self.now)).error
            alone = alone or Error(0, math.nan)
            words = f"{fix.words}, together with {second.words} ({other.what.where})"
            found.append(
                dataclasses.replace(
                    own.what, fix=words, error_alone=float(alone), broken_alone=alone.broken
                )
            )
        return found

    def _allowed(self, fix: Fix) -> Any:
        """What a change leads to; None if its parts contradict each other, or it was tried."""
        try:
            setting = fix.change(self.now)
        except ValueError:
            return None
        return None if key_of(setting) in self.seen else setting

    def _keep(self, fix: Fix, after: Outcome, findings: Sequence[Finding]) -> None:
        """A change that helped stays."""
        order = max((x.order for x in self.found), default=0) + 1
        self.idle = [x for x in self.idle if not any(same(x, y) for y in findings)]
        self.found += [mended(x, order, self.outcome.error, after.error) for x in findings]
        self.spare = []
        self.now, self.outcome = fix.change(self.now), after
