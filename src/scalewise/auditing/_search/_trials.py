"""The state of a search for fixes: settings are tried, their errors measured, fixes accepted."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any

from ...formats import FP32, Format, Saturation
from ...primitives import having
from .._bisect import fewest
from .._run._causes import Causes
from .._run._compared import decides
from .._run._equation_statistics import EquationStatistics, Operands
from .._run._outcome import Outcome, OutputError
from .._run._session import Session
from .._run._specialize import Low, kind_of_run
from .._thresholds import (
    FEW_DECIDED,
    MANY_DECIDED,
    NARROWER,
    NARROWING,
    ROUNDING,
    SMALL,
    decides_otherwise,
    unusable,
)
from ._apply import AuditedArithmetic, FormatChoice
from ._findings import Finding, finding, place_of
from ._fixes import Fix, described, library_calls, whole_calls, widened
from ._groups import Group, groups
from ._literals import Constants, Literal
from ._measure import better, fixed, is_slight, key_of, near, same
from ._rewrites import Rewrite, rewrites

WHOLE_NUMBERS = having("whole")


@dataclasses.dataclass(frozen=True)
class Failed:
    """A finding that no single fix helped, and what was tried for it."""

    what: Finding  # the finding
    options: tuple[Fix, ...]  # its fixes, the smallest first
    tried: tuple[tuple[Fix, OutputError], ...]  # those that were tried, and the error with each
    base: Any  # the setting that they were tried on
    before: OutputError  # the error with that setting

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


@dataclasses.dataclass
class Search:
    """The state of a search, which tries settings and accepts fixes on top of each other."""

    session: Session
    fmt: Format
    constants: Constants
    trials: int
    saturate: Saturation
    # with a fix that helped, the largest effect on the outputs first; then, if much of the error is
    # left, others, untried ones last
    found: list[Finding] = dataclasses.field(default_factory=list)
    unfixed: list[Finding] = dataclasses.field(default_factory=list)
    lost_changes: list[str] = dataclasses.field(default_factory=list)
    left_out: frozenset[str] = frozenset()  # outputs whose error isn't looked at: see leave_out
    decisions: bool = False  # whether outputs of integers and predicates alone are looked at
    harmless: list[Literal] = dataclasses.field(default_factory=list)  # what the format makes of it
    current: Any = dataclasses.field(init=False)  # the setting with the fixes accepted so far
    outcome: Outcome = dataclasses.field(init=False)  # of its run
    # with float32 for every operation, if that was run
    float32: Outcome = dataclasses.field(init=False)
    float32_error: OutputError = dataclasses.field(default_factory=lambda: OutputError(0, 0.0))
    beyond: set[int] = dataclasses.field(default_factory=set)  # see :class:`Context`
    reserve: int = 0  # trials reserved for pairs: no finding is begun unless more are left
    final: bool = False  # whether pairs were tried, so that the whole program may be changed
    failed: list[Failed] = dataclasses.field(default_factory=list)
    # by key: errors of settings that were tried, and outcomes of runs before they are needed
    tried: dict[Hashable, OutputError] = dataclasses.field(default_factory=dict)
    results: dict[Hashable, Outcome] = dataclasses.field(default_factory=dict)
    grouped: tuple[Outcome, Sequence[Group]] | None = None  # the last outcome grouped, and that
    # by index, equations whose flushed numbers aren't the cause of the outcome's error
    harmless_underflows: set[int] = dataclasses.field(default_factory=set)

    def start(self) -> FormatChoice:
        return FormatChoice(
            self.session.formats(), double=self.fmt.mantissa_bits >= FP32.mantissa_bits
        )

    @property
    def done(self) -> bool:
        return self.is_least(self.outcome.error)

    def is_least(self, error: OutputError) -> bool:
        return self.is_near(error) or error <= OutputError(0, self.rounding)

    def is_near(self, error: OutputError) -> bool:
        """Returns whether float32 for all operations leaves about as much error. Of decisions it
        counts as such if there are many and only one or two differ, which may be chance."""
        few = error.decided and error.relative < unusable(self.fmt.precision)
        return near(error, self.float32_error) or (few and error.relative <= self.by_chance)

    @functools.cached_property
    def by_chance(self) -> float:
        return FEW_DECIDED / max(1, *(size for *_, size in self.outcome.decided))

    def better(self, after: OutputError, before: OutputError, share: float) -> bool:
        """Compares two errors (see :func:`better`) without what float32 leaves of them; the whole
        errors, if they may be many roundings' or next to nothing can be removed."""
        whole = self.is_small or near(before, self.float32_error)
        floor = 0.0 if whole else self.float32_error.relative
        return better(after.beyond(floor), before.beyond(floor), share)

    @property
    def rounding(self) -> float:
        """The error of outputs that are rounded once, root mean square; under a recipe, of outputs
        of products with rounded operands."""
        return (ROUNDING if self.session.kind.elementwise else 1.0) * float(self.fmt.eps)

    @property
    def is_harmless(self) -> bool:
        return self.outcome.error <= OutputError(0, float(self.fmt.eps) / 2)

    @property
    def is_small(self) -> bool:
        return self.may_be_roundings(self.outcome.error)

    def may_be_roundings(self, error: OutputError) -> bool:
        several = SMALL if self.session.kind.elementwise else 1.0
        return not error.non_finite and error.relative <= several * float(self.fmt.eps)

    @property
    def is_slight(self) -> bool:
        return is_slight(self.outcome.error, float(self.fmt.eps))

    @property
    def kind(self) -> Low:
        """The kind of run that the setting makes: a fix may leave a recipe without formats for
        results, for example."""
        adjustable = self.session.adjustable
        return self.session.kind if adjustable else kind_of_run(self.current)

    @property
    def word(self) -> str:
        return self.current.word if isinstance(self.current, FormatChoice) else "float32"

    @functools.cached_property
    def operands(self) -> Operands:
        return self.session.dataflow.operands

    @functools.cached_property
    def rewrites(self) -> list[Rewrite]:
        if not self.session.adjustable:
            return []
        operands = self.session.dataflow.within_loops
        return rewrites(self.session.lockstep.recorded, operands)

    @property
    def limits(self) -> list[float]:
        return sorted(self.session.lockstep.limits)

    @property
    def causes(self) -> Causes:
        return self.outcome.causes

    def groups_in(self, outcome: Outcome) -> Sequence[Group]:
        if self.grouped is None or self.grouped[0] is not outcome:
            found = groups(outcome.equations, self.fmt, outcome.causes)
            self.grouped = outcome, [g for g in found if not self.is_returned(g)]
        return self.grouped[1]

    def is_returned(self, group: Group) -> bool:
        """Returns whether a group is of decisions that the program returns, and whose errors are
        looked at. Any error before them shows there, so that they are no cause."""
        decided = self.outcome.error.decided and group.total("differ") > 0
        return decided and all(e.is_output for e in group.equations)

    def finding_of(self, group: Group, refuted: str = "") -> Finding:
        if {*group.indices} <= self.harmless_underflows:
            refuted = "underflow"
        found = finding(group, self.fmt, self.saturate, refuted)
        before = self.causes.producers(group.first.index) if found.kind == "decision" else []
        if len(before) == 1 and before[0].primitive in WHOLE_NUMBERS and before[0].file:
            return dataclasses.replace(found, **place_of(before[0]))
        return found

    @property
    def literals(self) -> Sequence[Literal]:
        return self.constants.changed

    def rounded_constants(self, equation: EquationStatistics) -> list[tuple[float, float]]:
        """Returns the numbers of the program that an operation reads and the format rounds, and
        what it makes of them."""
        path = self.session.lockstep.recorded[equation.index].path
        kept = {old for old, _ in self.current.constants}
        numbers = [x for x in self.constants.read.get(path, ()) if x not in kept]
        pairs = ((x, float(self.fmt.decode(self.fmt.encode(x)))) for x in numbers)
        return [(x, y) for x, y in pairs if math.isfinite(x) and y not in (x, 0)]

    def finding_at(self, equation: EquationStatistics) -> Finding:
        """Returns the finding of what one equation does, apart from the error carried in."""
        drifting = Group((equation,), self.causes.amplification(equation))
        return self.finding_of(drifting if drifting.drifts else Group((equation,)))

    def run(self, setting: Any) -> Outcome:
        self.trials -= 1
        if isinstance(setting, FormatChoice):
            outcome = setting.run(self.session)
        else:
            outcome = self.session.with_low(setting).run()
        outcome = self._measured(outcome)
        self.tried[key_of(setting)] = outcome.error
        return outcome

    def leave_out(self) -> bool:
        """Leaves out outputs that are as good as with float32 for all operations, or whose error
        many roundings may add up to: they may hide others. Returns False if no others are left."""
        wide = dict(self.float32.outputs)
        left_out = frozenset(
            path for path, e in self.outcome.outputs
            if near(e, wide[path]) or self.may_be_roundings(e)
        )  # fmt: skip
        if left_out <= self.left_out or len(left_out) == len(wide):
            return False
        self._look_at_all_but(left_out)
        return True

    def look_at_all(self) -> None:
        if self.left_out or self.decisions:
            self._look_at_all_but(frozenset(), decides(self.session.program))

    def look_at_decisions(self) -> bool:
        """Looks at the outputs of integers and predicates alone, if much of one differs though the
        others are as they should be; returns whether it does."""
        usable = self.outcome.error < OutputError(0, unusable(self.fmt.precision))
        much = decides_otherwise(self.outcome.decided, self.fmt.precision, MANY_DECIDED)
        if self.decisions or not usable or not much:
            return False
        self._look_at_all_but(frozenset(), decisions=True)
        return True

    def _look_at_all_but(self, left_out: frozenset[str], decisions: bool = False) -> None:
        self.left_out, self.decisions = left_out, decisions
        self.tried, self.results, self.failed, self.harmless_underflows = {}, {}, [], set()
        self.outcome = self._measured(self.outcome)
        if self.session.adjustable:
            self.float32_error = self._measured(self.float32).error

    def _measured(self, outcome: Outcome) -> Outcome:
        errors = [e for path, e in outcome.outputs if path not in self.left_out]
        if self.decisions:
            errors = outcome.decision_errors
        return dataclasses.replace(outcome, error=OutputError.of(errors))

    def untried(self, fix: Fix) -> Any:
        try:
            setting = fix.change(self.current)
        except ValueError:
            return None
        return None if key_of(setting) in self.tried else setting

    def accept(self, fix: Fix, after: Outcome, findings: Sequence[Finding]) -> None:
        order = max((x.order for x in self.found), default=0) + 1
        self.unfixed = [x for x in self.unfixed if not any(same(x, y) for y in findings)]
        for i, x in enumerate(self.found):  # this fix has that finding's own one
            if x.fix and x.fix.indices and {*x.fix.indices} < {*fix.indices}:
                before = OutputError(x.non_finite_before, x.error_before)
                own = dataclasses.replace(x, fix=self.accepted(fix))
                self.found[i] = fixed(own, order, before, after.error)
        self.found += [fixed(x, order, self.outcome.error, after.error) for x in findings]
        self.failed, self.harmless_underflows = [], set()
        self.current, self.outcome = fix.change(self.current), after

    def accepted(self, fix: Fix) -> Fix:
        return dataclasses.replace(fix, origin=self.origin)

    @property
    def origin(self) -> AuditedArithmetic:
        session = self.session
        recorded = {path: (i, session.lockstep.recorded[i].name)
                    for path, i in session.lockstep.indices.items()}  # fmt: skip
        start = self.start() if session.adjustable else None
        return AuditedArithmetic(session.low, start, recorded)

    def accepted_findings(self, found: Sequence[Finding]) -> list[Finding]:
        return [dataclasses.replace(x, fix=self.accepted(x.fix)) for x in found if x.fix]

    def by_line(self, fix: Fix) -> dict[tuple[str | None, int], list[EquationStatistics]]:
        """Returns the operations of a fix by line; those of a library's whole call are one line."""
        some = self.operations(fix)
        whole = whole_calls(some, self.outcome.equations)
        found: dict[tuple[str | None, int], list[EquationStatistics]] = {}
        for e in some:
            place = (e.caller, 0) if e.caller in whole else (e.file, e.line)
            found.setdefault(place, []).append(e)
        return found

    def operations(self, fix: Fix) -> list[EquationStatistics]:
        chosen = set(fix.indices)
        return [e for e in self.outcome.equations if e.index in chosen]

    def fewer_lines(self, fix: Fix, after: Outcome) -> tuple[Fix, Outcome]:
        most = 2 * after.error.relative
        if not self.outcome.error.non_finite:  # at least half of what the fix removes
            most = min(most, (after.error.relative + self.outcome.error.relative) / 2)
        limit = OutputError(after.error.non_finite, most)
        found, end = (fix, after), max(self.reserve, self.trials - NARROWING)

        def helps(lines: list[list[EquationStatistics]]) -> bool:
            nonlocal found
            few = [e for line in lines for e in line]
            text = described(few, self.outcome.equations)
            narrow = widened(self.word, text, few, cause=fix.cause, limits=fix.limits)
            setting = self.untried(narrow) if few and self.trials > end else None
            if setting is None:
                return False
            outcome = self.run(setting)
            enough = outcome.error <= limit or self.is_least(outcome.error)
            if enough:
                found = dataclasses.replace(narrow, kind=fix.kind), outcome
            return enough

        lines: dict[tuple[str | None, int], list[EquationStatistics]] = {}
        for e in self.operations(fix):
            lines.setdefault((e.file, e.line), []).append(e)
        fewest(list(lines.values()), helps)
        few = {e.index: e for e in self.operations(found[0])}
        for call in library_calls(list(few.values()), self.outcome.equations).values():
            few |= {e.index: e for e in call}
        if few.keys() == set(fix.indices):
            return fix, after
        if len(few) > len(found[0].indices):
            helps([list(few.values())])
        return found
