"""Fixes that only help together: pairs, lines whose faults show one by one, several faults."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from .._run._equation_statistics import EquationStatistics
from .._run._session import Outcome, OutputError
from ._findings import Finding, constant_finding
from ._fixes import Fix
from ._groups import Group
from ._measure import ENOUGH, GAIN, better, key_of
from ._pairs import Failed, both, joint_findings, pairs
from ._setting import Setting
from ._trials import Trials
from ._widening import described, widened

LINES = 8  # lines whose faults may show one by one
WHOLE = 2  # trials left for another format for the whole program, while lines are tried
FAULTS = 3  # lines of a fix that may each be at fault
Place = tuple[str | None, int]  # file and line


@dataclasses.dataclass
class JointFixes(Trials):
    """Tries fixes of several findings, or of several lines, together."""

    def _try_pairs(self) -> bool:
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
        alone = []
        for own, fix in zip(failed, parts, strict=True):
            error = own.error_alone(fix) if own.base is self.current else None
            if error is None and self.trials > 0:
                error = self._try(fix.change(self.current)).error
            alone.append(error or OutputError(0, math.nan))
        whats = [x.what for x in failed]
        return self._accepted_findings(joint_findings(whats, parts, alone, both(*parts)))

    def _try_lines(self) -> bool:
        """Accepts float32 for a few lines that only help together; returns False if none do.

        Nothing is counted behind the first infinity: faults show one by one. So the heaviest line
        of a run is added, and the program run again, which shows the next one, until the error is
        small. Then lines that aren't needed are left out, as by delta debugging (Zeller and
        Hildebrandt, 2002).
        """
        before, outcome = self.outcome.error, self.outcome
        if not isinstance(self.current, Setting) or not better(self.float32_error, before, ENOUGH):
            return False
        base, constants = self.current, [x for x in self.failed if not x.what.equations]
        for constant in constants:
            self.current = constant.options[0].change(self.current)
        found = self._enough_lines(before, outcome)
        if found is None:
            self.current = base
            return False
        added, fix, after = found
        self.current = base
        kept = [g for g in added if set(g.indices) & set(fix.indices)]
        what = self._finding(kept[0])
        alone = self._try(fix.change(base)) if constants and self.trials > 0 else None
        if not constants or (alone and alone.error <= after.error):
            what = dataclasses.replace(what, fix=self._accepted(fix))
            self._accept(fix, alone or after, [what])
            return True
        parts = [*(x.options[0] for x in constants), fix]
        whole = functools.reduce(both, parts)
        unknown = OutputError(0, math.nan)
        errors = [x.error_alone(x.options[0]) or unknown for x in constants]
        errors.append(alone.error if alone else unknown)
        whats = [*(x.what for x in constants), what]
        self._accept(
            whole, after, self._accepted_findings(joint_findings(whats, parts, errors, whole))
        )
        return True

    def _enough_lines(
        self, before: OutputError, outcome: Outcome
    ) -> tuple[list[Group], Fix, Outcome] | None:
        """Returns the lines that were added until they helped, float32 for those of them that are
        needed, and the outcome with it; None if too few trials are left, or no line is."""
        self.reserve, added = WHOLE, []
        chosen: dict[int, EquationStatistics] = {}
        while self.trials > self.reserve and len(added) < LINES:
            ranked = self._groups(outcome)
            group = next((g for g in ranked if not chosen.keys() & set(g.indices)), None)
            if group is None:
                return None
            added.append(group)
            chosen |= {e.index: e for e in _on_line_of(group, outcome.equations)}
            few = list(chosen.values())
            fix = widened(self._word, described(few, self.outcome.equations), few)
            setting = self._untried(fix)
            if setting is None:
                continue
            outcome = self._try(setting)
            if better(outcome.error, before, ENOUGH):
                return added, *self._fewer_lines(fix, outcome)
        return None

    def _faults(self, what: Finding, fix: Fix) -> list[Finding]:
        """Returns a finding for each line of a fix, if each of a few is at fault by itself.

        That is, there is a finding at each, and each line's own fix helps, but leaves more than the
        fix of all; or each has numbers out of range once the others are fixed. Otherwise some
        lines only carry the error, and there is one finding: at the line whose own fix helps most
        if this one's doesn't help, or else none here.
        """
        here, by_line = (what.file, what.line), self._by_line(fix)
        places = {(g.first.file, g.first.line): g for g in self._groups(self.outcome)[::-1]}
        if not 1 < len(by_line) <= FAULTS or here not in by_line or not by_line.keys() <= {*places}:
            return []
        order = sorted(by_line, key=lambda place: place != here)
        parts, alone = {}, {}
        for place in order:
            text = described(by_line[place], self.outcome.equations)
            parts[place] = widened(self._word, text, by_line[place])
            setting = parts[place].change(self.current)
            if key_of(setting) not in self.tried and self.trials > self.reserve:
                self._try(setting)
            alone[place] = self.tried.get(key_of(setting), self.outcome.error)
        whats = {x: what if x == here else self._finding(places[x]) for x in order}
        helps = [better(alone[place], self.outcome.error, GAIN) for place in order]
        hidden = {} if all(helps) else self._one_after_another(by_line)
        whats, order = (hidden, list(hidden)) if hidden else (whats, order)
        if all(helps) or hidden:
            found = [whats[place] for place in order]
            own, errors = [parts[place] for place in order], [alone[place] for place in order]
            return self._accepted_findings(joint_findings(found, own, errors, fix))
        best = min(order, key=alone.__getitem__)
        if not helps[0] and better(alone[best], self.outcome.error, ENOUGH):
            return self._accepted_findings([dataclasses.replace(whats[best], fix=fix)])
        return []

    def _one_after_another(
        self, by_line: dict[Place, list[EquationStatistics]]
    ) -> dict[Place, Finding]:
        """Returns what happens at each line of a fix once the lines before are float32, if that are
        numbers out of range at each: one fault then hides the next. Else an empty dict."""
        found: dict[Place, Finding] = {}
        setting, outcome = self.current, self.outcome
        while len(found) < len(by_line):
            events = (
                g for g in self._groups(outcome)
                if (g.first.file, g.first.line) in by_line.keys() - found.keys()
                and (g.total("overflowed") or g.total("nan"))
            )  # fmt: skip
            group = next(events, None)
            if group is None:
                return {}
            place = group.first.file, group.first.line
            lost = (x for x in self.literals if (x.file, x.line) == place and not x.slight)
            constant = next(lost, None)
            found[place] = constant_finding(constant) if constant else self._finding(group)
            part = widened(self._word, "", by_line[place])
            setting = part.change(setting)
            if len(found) < len(by_line):
                if self.trials <= self.reserve:
                    return {}
                outcome = self._try(setting)
        return found


def _on_line_of(group: Group, equations: Sequence[EquationStatistics]) -> list[EquationStatistics]:
    here = group.first
    if here.file is None:
        return list(group.equations)
    return [e for e in equations if (e.file, e.line) == (here.file, here.line)]
