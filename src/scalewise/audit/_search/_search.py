"""The search for fixes that help: each is applied, the program run again, its error measured."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from ..._types import Saturation
from ...formats import Format
from .._run._session import Outcome, OutputError, Session
from ._apply import Origin
from ._findings import Finding, constant_finding, finding
from ._fix_kinds import run_of
from ._fixes import Context, Fix, proposals
from ._groups import Group, groups
from ._kinds import KINDS
from ._literals import Literal
from ._measure import ENOUGH, GAIN, better, enough, fixed, gain, key_of, near, same
from ._norms import norms
from ._pairs import RESERVE, Failed, both, pairs
from ._setting import Setting

UNTRIED_SHOWN = 12  # findings listed if no fix may be tried
UNFIXED_SHOWN = 6  # findings listed if none of the fixes tried helped


@dataclasses.dataclass
class Search:
    """Tries fixes for findings, each on top of those accepted before.

    Attributes:
        session: the program.
        literals: the constants that the format changes.
        trials: how many runs may still be made.
        found: findings with a fix that helped, the largest effect on the outputs first. If much of
            the error is left, unfixed findings follow; untried ones come last.
        unfixed: findings with evidence but without a fix that helped.
        float32_error: with float32 for every operation, if that was run.
        current, outcome: the setting with the fixes accepted so far, and the outcome of its run.
        reserve: trials reserved for pairs: no finding is begun unless more are left.
        final: whether pairs were tried, so that the whole program may be changed.
        failed: findings that no single fix helped.
        tried: the keys of settings that were tried.
        results: outcomes by key, of runs that were made before the search needed them.
    """

    session: Session
    fmt: Format
    literals: Sequence[Literal]
    trials: int
    saturate: Saturation
    found: list[Finding] = dataclasses.field(default_factory=list)
    unfixed: list[Finding] = dataclasses.field(default_factory=list)
    current: Any = dataclasses.field(init=False)
    outcome: Outcome = dataclasses.field(init=False)
    float32_error: OutputError = dataclasses.field(default_factory=lambda: OutputError(0, 0.0))
    reserve: int = 0
    final: bool = False
    failed: list[Failed] = dataclasses.field(default_factory=list)
    tried: set[Hashable] = dataclasses.field(default_factory=set)
    results: dict[Hashable, Outcome] = dataclasses.field(default_factory=dict)

    def run(self, start: Outcome) -> OutputError:
        """Searches until no fix helps or no trials are left; returns the error with all fixes."""
        self.outcome = start
        by_table, low = self.session.adjustable, self.session.low
        self.current = Setting(self.session.formats()) if by_table else low
        self.tried.add(key_of(self.current))
        if self.trials <= 0 or run_of(low) is None:
            shown = groups(start.equations, self.fmt)[:UNTRIED_SHOWN]
            self.unfixed += [self._finding(g) for g in shown]
            return start.error
        self.reserve = min(RESERVE, self.trials // 3)
        if by_table:
            float32 = self.current.in_float32(range(len(self.current.formats)))
            for literal in self.literals:
                if not literal.masks:
                    float32 = float32.with_constant(literal.number, literal.number)
            self.results[key_of(float32)] = outcome = self._try(float32)
            self.float32_error = outcome.error
        self._search_findings()
        paired = True
        while paired and self.trials > 0 and not self._done:
            paired = self._try_pairs()
            self.reserve, self.final = 0, not paired
            self._search_findings()
        self.found.sort(key=gain, reverse=True)
        if not self._done:
            self._list_unfixed()
        self.unfixed.sort(key=lambda x: not x.tried)
        return self.outcome.error

    @property
    def _done(self) -> bool:
        return near(self.outcome.error, self.float32_error)

    def _search_findings(self) -> None:
        """Tries fixes for constants, then for one finding after another, the heaviest first, until
        the error is near that of float32; starts over after each fix that is accepted."""
        self._search_constants()
        tried: set[tuple[int, ...]] = set()
        failures: collections.Counter[str] = collections.Counter()  # so that directions alternate
        while self.trials > self.reserve and not self._done:
            found = groups(self.outcome.equations, self.fmt)
            fresh = [g for g in found if g.indices not in tried]
            if not fresh:
                break
            group = min(fresh, key=lambda g: failures[g.first.direction])
            what = self._finding(group)
            tried.add(group.indices)
            failures[what.direction] += 1
            if self._try_fixes(what, self._fixes(group, what)):
                tried.clear()
                failures.clear()
                self._search_constants()

    def _search_constants(self) -> None:
        """Tries fixes for the constants that the format changes and that have none yet."""
        done = {(x.file, x.line, x.evidence) for x in self.found}
        for literal in self.literals if self.session.adjustable else ():
            what = constant_finding(literal)
            if literal.slight and not self.final:
                continue
            if self._done:
                return
            if not literal.masks and (what.file, what.line, what.evidence) not in done:
                context = self._context(Group(()), what)
                context = dataclasses.replace(context, literal=literal)
                self._try_fixes(what, proposals("constant", context))

    def _fixes(self, group: Group, what: Finding) -> Iterator[Fix]:
        gradients = [e for e in self.outcome.equations if e.index in self.session.loss_scaled]
        written = norms(self.session.lockstep.recorded) if self.session.adjustable else ()
        context = self._context(group, what)
        context = dataclasses.replace(context, gradients=gradients, norms=written)
        return proposals(run_of(self.session.low) or "", context)

    def _context(self, group: Group, what: Finding) -> Context:
        low, equations = self.session.low, self.outcome.equations
        return Context(group, KINDS[what.kind], self.current, low, equations, final=self.final)

    def _list_unfixed(self) -> None:
        """Appends events without a fix to the findings: the error that is left has a cause too."""
        left: list[Finding] = []
        for group in groups(self.outcome.equations, self.fmt)[:UNFIXED_SHOWN]:
            what = self._finding(group)
            if KINDS[what.kind].event:
                error = self.outcome.error
                tried = any(x.equations == what.equations for x in self.unfixed)
                what = dataclasses.replace(
                    what, error_before=float(error), non_finite_before=error.non_finite, tried=tried
                )
                left.append(what)
                self.unfixed = [x for x in self.unfixed if x.equations != what.equations]
        self.found += sorted(left, key=lambda x: not x.tried)

    def _finding(self, group: Group) -> Finding:
        return finding(group, self.fmt, self.saturate)

    def _try(self, setting: Any) -> Outcome:
        self.trials -= 1
        self.tried.add(key_of(setting))
        if isinstance(setting, Setting):
            return setting.run(self.session)
        return self.session.with_low(setting).run()

    def _try_fixes(self, what: Finding, changes: Iterator[Fix]) -> bool:
        """Accepts the first fix that helps enough, else the best; returns False if none helps."""
        before = self.outcome.error
        best: tuple[Fix, Outcome] | None = None
        tried: list[tuple[Fix, OutputError]] = []
        options = list(changes)
        for fix in self._selected(options, before):
            setting = fix.change(self.current)
            after = self.results.get(key_of(setting))
            if after is None:
                if self.trials <= 0 or key_of(setting) in self.tried:
                    continue
                after = self._try(setting)
            tried.append((fix, after.error))
            if (
                better(after.error, before, GAIN)
                and (best is None or better(after.error, best[1].error, ENOUGH))
                and self._beats_narrower(fix, after)
            ):
                best = fix, after
            if best is not None and enough(best[1].error, before):
                break
        what = dataclasses.replace(what, tried=bool(tried))
        if best and not self.final and not better(best[1].error, before, ENOUGH):
            # it helps a little: kept for the final pass, since a pair may do more
            self.results[key_of(best[0].change(self.current))] = best[1]
            best = None
        if best is None:
            if tried:
                self.failed.append(Failed(what, tuple(options), tuple(tried), self.current, before))
            if tried or not any(same(what, x) for x in self.unfixed):
                self.unfixed = [x for x in self.unfixed if not same(what, x)] + [what]
            return False
        fix, after = best
        self._accept(fix, after, [dataclasses.replace(what, fix=self._accepted(fix))])
        return True

    def _beats_narrower(self, fix: Fix, after: Outcome) -> bool:
        """Returns True if the narrower alternative is measurably worse, or there is none."""
        if fix.without is None or self.trials <= 0:
            return True
        setting = fix.without.change(self.current)
        if key_of(setting) not in self.results:
            self.results[key_of(setting)] = self._try(setting)
        return better(after.error, self.results[key_of(setting)].error, GAIN)

    def _selected(self, options: list[Fix], before: OutputError) -> list[Fix]:
        """After a failed fix, tries the widest float32 fix first, and drops the others of this kind
        if it doesn't help."""
        widest = max(options, key=lambda fix: fix.size, default=None)
        if not self.failed or widest is None or not widest.size:
            return options
        setting = widest.change(self.current)
        if key_of(setting) not in self.tried:
            if self.trials <= 0:
                return []
            self.results[key_of(setting)] = outcome = self._try(setting)
            if better(outcome.error, before, GAIN):
                return options
        return [fix for fix in options if not fix.size or fix is widest]

    def _try_pairs(self) -> bool:
        """Accepts the first pair of fixes that helps enough; returns False if none does."""
        before = self.outcome.error
        for a, b in pairs(self.failed):
            fix = both(a.best, b.best)
            setting = self._untried(fix)
            if setting is None or self.trials <= 0:
                continue
            after = self._try(setting)
            if better(after.error, before, ENOUGH):
                parts, after = self._narrowed((a, b), (a.best, b.best), after)
                self._accept(both(*parts), after, self._pair_findings((a, b), parts))
                return True
            if better(after.error, before, GAIN):
                self.results[key_of(setting)] = after
        return False

    def _narrowed(self, failed: Sequence[Failed], parts: tuple[Fix, Fix], after: Outcome):
        """Replaces each fix of a pair by the narrowest one with which the pair helps as much."""
        before = self.outcome.error
        for i, one in enumerate(failed):
            for fix in one.narrower(parts[i]):
                tried = (fix, parts[1]) if i == 0 else (parts[0], fix)
                setting = self._untried(both(*tried))
                if self.trials <= 0 or setting is None:
                    continue
                outcome = self._try(setting)
                equal = outcome.error.relative <= max(2 * after.error.relative, float(self.fmt.eps))
                if better(outcome.error, before, ENOUGH) and equal:
                    parts, after = tried, outcome
                    break
        return parts, after

    def _pair_findings(self, failed: Sequence[Failed], parts: tuple[Fix, Fix]) -> list[Finding]:
        """Returns a pair's findings, each with its own fix first and the error with that alone."""
        found = []
        for own, other, fix, second in zip(failed, failed[::-1], parts, parts[::-1], strict=True):
            alone = own.error_alone(fix) if own.base is self.current else None
            if alone is None and self.trials > 0:
                alone = self._try(fix.change(self.current)).error
            alone = alone or OutputError(0, math.nan)
            pair = both(*parts)
            text = f"{fix}, together with {second} ({other.what.where})"
            pair = dataclasses.replace(pair, text=text, kind=fix.kind)
            what = dataclasses.replace(own.what, fix=self._accepted(pair))
            found.append(
                dataclasses.replace(
                    what, error_alone=float(alone), non_finite_alone=alone.non_finite
                )
            )
        return found

    def _accepted(self, fix: Fix) -> Fix:
        """Returns the fix as users can apply it."""
        session = self.session
        recorded = {path: (i, session.lockstep.recorded[i].name)
                    for path, i in session.lockstep.indices.items()}  # fmt: skip
        start = Setting(session.formats()) if session.adjustable else None
        return dataclasses.replace(fix, origin=Origin(session.low, start, recorded))

    def _untried(self, fix: Fix) -> Any:
        """Returns the setting with a fix; None if its parts conflict, or it was tried."""
        try:
            setting = fix.change(self.current)
        except ValueError:
            return None
        return None if key_of(setting) in self.tried else setting

    def _accept(self, fix: Fix, after: Outcome, findings: Sequence[Finding]) -> None:
        """Continues with a fix that helped."""
        order = max((x.order for x in self.found), default=0) + 1
        self.unfixed = [x for x in self.unfixed if not any(same(x, y) for y in findings)]
        self.found += [fixed(x, order, self.outcome.error, after.error) for x in findings]
        self.failed = []
        self.current, self.outcome = fix.change(self.current), after
