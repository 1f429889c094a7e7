"""The search for fixes that help: each is applied, the program run again, its error measured."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from ..._types import Saturation
from ...formats import FP32, Format
from .._run._equation_statistics import EquationStatistics
from .._run._gradients import Operands
from .._run._session import Outcome, OutputError, Session
from ._apply import Origin
from ._causes import Causes
from ._findings import Finding, constant_finding, finding
from ._fix_kinds import CARRIED_IN, described, run_of, widened
from ._fixes import Context, Fix, proposals
from ._groups import Group, groups
from ._kinds import KINDS
from ._literals import Literal
from ._measure import (
    CLEAR,
    ENOUGH,
    GAIN,
    better,
    enough,
    fixed,
    gain,
    is_slight,
    key_of,
    near,
    same,
)
from ._norms import norms
from ._pairs import RESERVE, Failed, both, joint_findings, pairs
from ._rewrites import Rewrite, rewrites
from ._setting import Setting

ROUNDING = 0.5  # the largest error of one rounding, as a share of the format's eps
ROUNDED = ("format", "policy")
# The errors of many operations add up to some roundings of the output. Below these multiples of one
# an operation's own rounding isn't a finding: without others, and beside others.
FEW_ROUNDINGS, MANY_ROUNDINGS = 1.0, 3.0
BEFORE_WIDEST = 2  # fixes of a finding that may fail before the widest is tried
SMALL = 3.0  # up to so many eps an error is taken for that of many roundings, unless a fix is CLEAR
EVENT = 1e5  # the weight from which numbers overflow, or become NaN
NARROWING = 8  # trials that may be spent on finding the lines of a fix that matter
LINES = 8  # lines whose faults may hide each other
WHOLE = 2  # trials left for another format for the whole program, while lines are tried
FAULTS = 3  # lines of a fix that may each be at fault
UNTRIED_SHOWN = 12  # findings listed if no fix may be tried
UNFIXED_SHOWN = 6  # findings listed if none of the fixes tried helped


@dataclasses.dataclass
class Search:
    """Tries fixes for findings, each on top of those accepted before.

    Attributes:
        session: the program.
        literals: the constants that the format changes.
        trials: how many runs may still be made.
        masks: constants for masks of which the format holds one, but not the sum of two.
        found: findings with a fix that helped, the largest effect on the outputs first. If much of
            the error is left, unfixed findings follow; untried ones come last.
        unfixed: findings with evidence but without a fix that helped.
        float32_error: with float32 for every operation, if that was run.
        current, outcome: the setting with the fixes accepted so far, and the outcome of its run.
        reserve: trials reserved for pairs: no finding is begun unless more are left.
        final: whether pairs were tried, so that the whole program may be changed.
        failed: findings that no single fix helped.
        tried: the errors of settings that were tried, by key.
        results: outcomes by key, of runs that were made before the search needed them.
    """

    session: Session
    fmt: Format
    literals: Sequence[Literal]
    trials: int
    saturate: Saturation
    masks: Sequence[float] = ()
    found: list[Finding] = dataclasses.field(default_factory=list)
    unfixed: list[Finding] = dataclasses.field(default_factory=list)
    current: Any = dataclasses.field(init=False)
    outcome: Outcome = dataclasses.field(init=False)
    float32_error: OutputError = dataclasses.field(default_factory=lambda: OutputError(0, 0.0))
    reserve: int = 0
    final: bool = False
    failed: list[Failed] = dataclasses.field(default_factory=list)
    tried: dict[Hashable, OutputError] = dataclasses.field(default_factory=dict)
    results: dict[Hashable, Outcome] = dataclasses.field(default_factory=dict)

    def run(self, start: Outcome) -> OutputError:
        """Searches until no fix helps or no trials are left; returns the error with all fixes."""
        self.outcome = start
        by_table, low = self.session.adjustable, self.session.low
        self.current = self._start() if by_table else low
        self.tried[key_of(self.current)] = start.error
        if self.trials <= 0 or run_of(low) is None:
            shown = self._groups(start)[:UNTRIED_SHOWN]
            self.unfixed += [self._finding(g) for g in shown]
            return start.error
        self.reserve = min(RESERVE, self.trials // 3)
        if by_table:
            float32 = self.current.widened(range(len(self.current.formats)))
            for literal in self.literals:
                float32 = float32.with_constant(literal.number, literal.number)
            self.results[key_of(float32)] = outcome = self._try(float32)
            self.float32_error = outcome.error
        self._search_findings()
        paired = True
        while paired and self.trials > 0 and not self._done and not self._is_small:
            paired = self._try_pairs() or self._try_lines()
            self.reserve, self.final = 0, not paired
            self._search_findings()
        self.found.sort(key=gain, reverse=True)
        if not self._done and not self._is_small:
            self._list_unfixed()
        self.unfixed.sort(key=lambda x: not x.tried)
        return self.outcome.error

    def _start(self) -> Setting:
        """Returns the setting without fixes."""
        return Setting(self.session.formats(), double=self.fmt.mantissa_bits >= FP32.mantissa_bits)

    @property
    def _done(self) -> bool:
        return self._is_least(self.outcome.error)

    def _is_least(self, error: OutputError) -> bool:
        """Returns True if an error is that of float32 operations, or of one rounding."""
        return near(error, self.float32_error) or error <= OutputError(0, self._rounding)

    @property
    def _rounding(self) -> float:
        """The largest error of outputs that are rounded once; under a recipe, of outputs of
        products with rounded operands."""
        return (ROUNDING if run_of(self.session.low) in ROUNDED else 1.0) * float(self.fmt.eps)

    def _is_worth_trying(self, group: Group, what: Finding) -> bool:
        """Returns False for a finding whose error is that of any program in the format."""
        error = self.outcome.error
        if self._is_small and run_of(self.session.low) != "format":
            return group.weight(self.fmt) >= EVENT
        if KINDS[what.kind].event or error.non_finite:
            return group.weight(self.fmt) >= EVENT or not self._is_least(error)
        few = MANY_ROUNDINGS if self.found else FEW_ROUNDINGS
        return error.relative > few * self._rounding

    @property
    def _is_small(self) -> bool:
        """Whether the error may be the sum of many roundings, as in any program."""
        error = self.outcome.error
        several = SMALL if run_of(self.session.low) in ROUNDED else 1.0
        return not error.non_finite and error.relative <= several * float(self.fmt.eps)

    @property
    def _is_slight(self) -> bool:
        return is_slight(self.outcome.error, float(self.fmt.eps))

    @property
    def _word(self) -> str:
        return self.current.word if isinstance(self.current, Setting) else "float32"

    @functools.cached_property
    def _operands(self) -> Operands:
        return self.session.lockstep.operands

    @functools.cached_property
    def _rewrites(self) -> list[Rewrite]:
        if not self.session.adjustable:
            return []
        return rewrites(self.session.lockstep.recorded, self._operands)

    @property
    def _causes(self) -> Causes:
        return Causes(self._operands, self.outcome.equations)

    def _groups(self, outcome: Outcome) -> list[Group]:
        return groups(outcome.equations, self.fmt, Causes(self._operands, outcome.equations))

    def _search_findings(self) -> None:
        """Tries fixes for constants, then for one finding after another, the heaviest first, until
        the error is near that of float32; starts over after each fix that is accepted."""
        self._search_constants()
        tried: set[tuple[int, ...]] = set()
        failures: collections.Counter[str] = collections.Counter()  # so that directions alternate
        while self.trials > self.reserve and not self._done:
            found = self._groups(self.outcome)
            fresh = [g for g in found if g.indices not in tried]
            if not fresh:
                break
            group = min(fresh, key=lambda g: failures[g.first.direction])
            what = self._finding(group)
            tried.add(group.indices)
            if not self._is_worth_trying(group, what):
                continue
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
            if literal.slight and not (self.final or self._explains_error(literal)):
                continue
            if self._done:
                return
            if literal.masks and not self.outcome.error.non_finite:
                continue  # infinite as a mask is meant to be
            if (what.file, what.line, what.evidence) not in done:
                context = self._context(Group(()), what)
                context = dataclasses.replace(context, literal=literal)
                clear = ENOUGH if literal.slight else CLEAR  # its error is known not to be others'
                self._try_fixes(what, proposals("constant", context), clear)

    def _explains_error(self, literal: Literal) -> bool:
        """Returns True if all of the error may be that of a constant."""
        error = self.outcome.error
        return not error.non_finite and error.relative <= 2 * literal.error

    def _fixes(self, group: Group, what: Finding) -> Iterator[Fix]:
        gradients = [e for e in self.outcome.equations if e.index in self.session.loss_scaled]
        written = norms(self.session.lockstep.recorded) if self.session.adjustable else ()
        context = self._context(group, what)
        replaced = dict(self.current.constants) if self.session.adjustable else {}
        masks = [number for number in self.masks if number not in replaced]
        context = dataclasses.replace(
            context, gradients=gradients, norms=written, rewrites=self._rewrites, masks=masks,
            slight=self._is_slight,
        )  # fmt: skip
        return proposals(run_of(self.session.low) or "", context)

    def _context(self, group: Group, what: Finding) -> Context:
        low, equations = self.session.low, self.outcome.equations
        kind, causes = KINDS[what.kind], self._causes
        return Context(group, kind, self.current, low, equations, final=self.final, causes=causes)

    def _list_unfixed(self) -> None:
        """Appends events without a fix to the findings: the error that is left has a cause too."""
        left: list[Finding] = []
        for group in self._groups(self.outcome)[:UNFIXED_SHOWN]:
            what = self._finding(group)
            if KINDS[what.kind].event and (not self._is_slight or group.weight(self.fmt) >= EVENT):
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
        if isinstance(setting, Setting):
            outcome = setting.run(self.session)
        else:
            outcome = self.session.with_low(setting).run()
        self.tried[key_of(setting)] = outcome.error
        return outcome

    def _try_fixes(self, what: Finding, changes: Iterator[Fix], clear: float = CLEAR) -> bool:
        """Accepts the fix that helps most for its cost; returns False if none helps enough.

        Of an error that many roundings may add up to it must leave at most the share ``clear``.
        """
        before = self.outcome.error
        tried: list[tuple[Fix, OutputError]] = []
        helped: list[tuple[Fix, Outcome]] = []
        options = list(changes)
        pending, probe = list(options), None
        patience = 0 if self.failed else BEFORE_WIDEST
        while pending:
            if len(tried) >= patience and not helped and probe is None:
                probe = max(pending, key=lambda fix: fix.size)
                if probe.size:
                    pending = [probe, *(fix for fix in pending if fix is not probe)]
            fix = pending.pop(0)
            setting = fix.change(self.current)
            after = self.results.get(key_of(setting))
            if after is None:
                if self.trials <= 0 or key_of(setting) in self.tried:
                    continue
                after = self._try(setting)
            tried.append((fix, after.error))
            helps = better(after.error, before, GAIN) and self._beats_narrower(fix, after)
            if helps:
                helped.append((fix, after))
            if fix is probe and not helps:  # if the widest doesn't help, a narrower one won't
                pending = [fix for fix in pending if not fix.size]
            least = enough(after.error, before) or self._is_least(after.error)
            if helps and least and fix is not probe:
                break
        what = dataclasses.replace(what, tried=bool(tried))
        best = self._best(helped)
        last = self.final and not self.found
        required = clear if self._is_small else GAIN if last else ENOUGH
        if best and not better(best[1].error, before, required):
            # it helps a little: kept for the final pass, since a pair may do more
            self.results[key_of(best[0].change(self.current))] = best[1]
            best = None
        if best is None:
            if tried:
                self.failed.append(Failed(what, tuple(options), tuple(tried), self.current, before))
            if tried or not any(same(what, x) for x in self.unfixed):
                self.unfixed = [x for x in self.unfixed if not same(what, x)] + [what]
            return False
        fix, after = self._fewer_lines(*best)
        what = self._at_cause(what, fix)
        found = self._faults(what, fix) or [dataclasses.replace(what, fix=self._accepted(fix))]
        self._accept(fix, after, found)
        return True

    def _best(self, helped: Sequence[tuple[Fix, Outcome]]) -> tuple[Fix, Outcome] | None:
        """Returns the cheapest of the fixes that help almost as much as the best one."""
        if not helped:
            return None
        least = min(after.error for _, after in helped)
        close = [
            (fix, after)
            for fix, after in helped
            if after.error.non_finite <= least.non_finite
            and (after.error.relative <= 2 * least.relative or self._is_least(after.error))
        ]
        return min(close, key=lambda x: x[0].size)

    def _fewer_lines(self, fix: Fix, after: Outcome) -> tuple[Fix, Outcome]:
        """Narrows float32 for several lines to the lines that matter, by bisection."""
        kept, budget = list(self._by_line(fix).values()), NARROWING
        size = len(kept) // 2
        limit = OutputError(after.error.non_finite, 2 * after.error.relative)
        while size and budget and self.trials > self.reserve:
            for start in range(0, len(kept), size):
                rest = kept[:start] + kept[start + size :]
                if not rest or not budget or self.trials <= self.reserve:
                    continue
                few = [e for line in rest for e in line]
                text = described(few, self.outcome.equations)
                narrow = widened(self._word, text, few, cause=fix.cause)
                setting = self._untried(narrow)
                if setting is None:
                    continue
                budget -= 1
                outcome = self._try(setting)
                if outcome.error <= limit or self._is_least(outcome.error):
                    fix, after, kept = dataclasses.replace(narrow, kind=fix.kind), outcome, rest
                    break
            else:
                size //= 2
            size = min(size, len(kept) // 2)
        return fix, after

    def _at_cause(self, what: Finding, fix: Fix) -> Finding:
        """Returns the finding where the error is made, if the fix is there and not here."""
        if not what.equations:  # a constant
            return what
        wide = [e for e in self.outcome.equations if e.index in set(fix.indices)]
        here = (what.file, what.line)
        cause = fix.cause or max(wide, key=lambda e: e.introduced, default=None)
        if cause is None or here in {(e.file, e.line) for e in (cause, *wide)}:
            return what
        moved = self._finding(Group((cause,)))
        if what.kind not in CARRIED_IN:
            return dataclasses.replace(moved, tried=what.tried)
        event, evidence = KINDS[moved.kind].event, f"error made here {cause.introduced:.2g}"
        if event:
            evidence = f"{moved.evidence}, {evidence}"
        if what.kind == "decision":
            kind, evidence = what.kind, f"{evidence}; at {what.where} {what.evidence}"
        else:
            error = self._causes.equations[what.equations[0]].inherited
            factor = error / max(cause.inherited, 1e-30)
            kind = moved.kind if event else "amplified"
            evidence += f", amplified {factor:.0f} times by {what.primitive} at {what.where}"
        return dataclasses.replace(moved, kind=kind, evidence=evidence, tried=what.tried)

    def _faults(self, what: Finding, fix: Fix) -> list[Finding]:
        """Returns a finding for each line of a fix, if each of a few is at fault by itself.

        That is, there is a finding at each, and each line's own fix helps, but leaves more than the
        fix of all. Otherwise some lines only carry the error, and there is one finding: none here.
        """
        here, by_line = (what.file, what.line), self._by_line(fix)
        places = {(g.first.file, g.first.line): g for g in self._groups(self.outcome)[::-1]}
        if not 1 < len(by_line) <= FAULTS or here not in by_line or not by_line.keys() <= {*places}:
            return []
        whats, parts, alone = [], [], []
        for place in sorted(by_line, key=lambda place: place != here):
            text = described(by_line[place], self.outcome.equations)
            parts.append(widened(self._word, text, by_line[place]))
            whats.append(what if place == here else self._finding(places[place]))
            setting = parts[-1].change(self.current)
            if key_of(setting) not in self.tried and self.trials > self.reserve:
                self._try(setting)
            error = self.tried.get(key_of(setting))
            if error is None or not better(error, self.outcome.error, GAIN):
                return []
            alone.append(error)
        return self._accepted_findings(joint_findings(whats, parts, alone, fix))

    def _by_line(self, fix: Fix) -> dict[tuple[str | None, int], list[EquationStatistics]]:
        """Returns the operations that a fix widens, by file and line."""
        found: dict[tuple[str | None, int], list[EquationStatistics]] = {}
        for e in self.outcome.equations:
            if e.index in set(fix.indices):
                found.setdefault((e.file, e.line), []).append(e)
        return found

    def _beats_narrower(self, fix: Fix, after: Outcome) -> bool:
        """Returns True if the narrower alternative is measurably worse, or there is none."""
        if fix.without is None or self.trials <= 0:
            return True
        setting = fix.without.change(self.current)
        if key_of(setting) not in self.results:
            self.results[key_of(setting)] = self._try(setting)
        return better(after.error, self.results[key_of(setting)].error, GAIN)

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

    def _try_lines(self) -> bool:
        """Accepts float32 for a few lines that only help together; returns False if none do.

        Faults hide each other: behind the first infinity nothing is counted. So the heaviest line
        of a run is added, and the program run again, which shows the next one, until the error is
        small. Then lines that aren't needed are left out, as by delta debugging (Zeller and
        Hildebrandt, 2002).
        """
        before, outcome = self.outcome.error, self.outcome
        if not isinstance(self.current, Setting) or not better(self.float32_error, before, ENOUGH):
            return False
        self.reserve, added = WHOLE, []
        chosen: dict[int, EquationStatistics] = {}
        while self.trials > self.reserve and len(added) < LINES:
            ranked = self._groups(outcome)
            group = next((g for g in ranked if not chosen.keys() & set(g.indices)), None)
            if group is None:
                return False
            added.append(group)
            chosen |= {e.index: e for e in _on_line_of(group, outcome.equations)}
            few = list(chosen.values())
            fix = widened(self._word, described(few, self.outcome.equations), few)
            setting = self._untried(fix)
            if setting is None:
                continue
            outcome = self._try(setting)
            if better(outcome.error, before, ENOUGH):
                fix, after = self._fewer_lines(fix, outcome)
                kept = [g for g in added if set(g.indices) & set(fix.indices)]
                what = dataclasses.replace(self._finding(kept[0]), fix=self._accepted(fix))
                self._accept(fix, after, [what])
                return True
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
        alone = []
        for own, fix in zip(failed, parts, strict=True):
            error = own.error_alone(fix) if own.base is self.current else None
            if error is None and self.trials > 0:
                error = self._try(fix.change(self.current)).error
            alone.append(error or OutputError(0, math.nan))
        whats = [x.what for x in failed]
        return self._accepted_findings(joint_findings(whats, parts, alone, both(*parts)))

    def _accepted_findings(self, found: Sequence[Finding]) -> list[Finding]:
        return [dataclasses.replace(x, fix=self._accepted(x.fix)) for x in found if x.fix]

    def _accepted(self, fix: Fix) -> Fix:
        """Returns the fix as users can apply it."""
        session = self.session
        recorded = {path: (i, session.lockstep.recorded[i].name)
                    for path, i in session.lockstep.indices.items()}  # fmt: skip
        start = self._start() if session.adjustable else None
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


def _on_line_of(group: Group, equations: Sequence[EquationStatistics]) -> list[EquationStatistics]:
    """Returns the equations of a group's source line, or the group's if that isn't known."""
    here = group.first
    if here.file is None:
        return list(group.equations)
    return [e for e in equations if (e.file, e.line) == (here.file, here.line)]
