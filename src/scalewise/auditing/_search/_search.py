"""The search for fixes: the balance sheet says where an error is made, runs what helps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..._output import Tell, counted, place
from ...formats import FP32, Format, Saturation
from .._run._causes import Causes
from .._run._outcome import NO_ERROR, Outcome, OutputError
from .._run._session import Session
from .._tape._specialize import Low, kind_of_run
from .._thresholds import (
    ENOUGH,
    MOST_OF_ERROR,
    SHARE_SHOWN,
    SHOWN,
    TRIED,
    unusable,
)
from . import _fix_kinds, _recipe_fix_kinds  # noqa: F401  # they register fixes, in this order
from ._apply import AuditedArithmetic, FormatChoice
from ._evidence import finding_of, literal_of
from ._findings import Finding, finding
from ._fixes import Context, Fix, proposals
from ._groups import Group, groups, is_out_of_range
from ._kinds import FINDING_KINDS
from ._literals import Constants, Literal
from ._measure import better, fixed, key_of, near, same
from ._rewrites import Rewrite, norms, rewrites
from ._trial import Place, StageError, Suspect, Trial, helps
from ._widening import wide, widen


@dataclasses.dataclass
class Search:
    """The state of a search, which accepts fixes on top of each other.

    Attributes:
        trials: how many runs are left.
        found: findings with a fix that helped, in the order in which they were found; then, of
            faults without one, those that were tried.
        unfixed: other findings.
        tell: shows what is tried.
        interrupted: whether the user ended the search by Ctrl-C.
    """

    session: Session
    fmt: Format
    constants: Constants
    trials: int
    saturate: Saturation
    tell: Tell = lambda text: None
    interrupted: bool = False
    found: list[Finding] = dataclasses.field(default_factory=list)
    unfixed: list[Finding] = dataclasses.field(default_factory=list)
    lost_changes: list[str] = dataclasses.field(default_factory=list)
    now: Trial = dataclasses.field(init=False)  # the run with the fixes accepted so far
    all_wide: FormatChoice | None = None  # float32 for every operation, under a format
    double: bool = False  # whether fixes compute in float64: float32 fails as well
    tried: set[Hashable] = dataclasses.field(default_factory=set)

    # -- runs --------------------------------------------------------------------------------------

    def trial(self, setting: Any, outcome: Outcome | None = None) -> Trial:
        found = Trial(self.session, self.fmt, setting)
        if outcome is not None:
            found.__dict__["outcome"] = outcome
        return found

    def attempt(self, fix: Fix, *, again: bool = False) -> Trial | None:
        """Returns the run with a fix more; None if it was tried, unless it is run ``again``, or is
        impossible, or none is left."""
        try:
            setting = fix.change(self.current)
        except ValueError:
            return None
        if self.trials <= 0 or (key_of(setting) in self.tried and not again):
            return None
        self.tried.add(key_of(setting))
        self.trials -= 1
        self.tell(f"error {self.outcome.error}; {fix} ({counted(self.trials, 'trial')} left)")
        found = self.trial(setting)
        try:
            return found if found.stages else None
        except ValueError:  # with another constant, a loop may be too long
            return None

    def run(self, setting: Any) -> Outcome:
        self.trials -= 1
        return self.trial(setting).outcome

    def start(self) -> FormatChoice:
        return FormatChoice(self.session.formats(), double=self.double)

    @property
    def current(self) -> Any:
        return self.now.setting

    @property
    def outcome(self) -> Outcome:
        return self.now.outcome

    # -- what is known of the program --------------------------------------------------------------

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
    def rewrites(self) -> list[Rewrite]:
        operands = self.session.dataflow.within_loops
        return rewrites(self.session.recorded, operands)

    @functools.cached_property
    def norms(self) -> Sequence[tuple[int, ...]]:
        return norms(self.session.recorded, self.session.dataflow.operands)

    @property
    def limits(self) -> list[float]:
        return sorted(self.session.limits)

    @property
    def causes(self) -> Causes:
        return self.outcome.causes

    @property
    def float32_error(self) -> OutputError:
        """The error with float32 for every operation; 0 if it was of no interest."""
        of_interest = self.is_harmful or "wide" in self.__dict__
        return self.wide.error if self.all_wide and of_interest else NO_ERROR

    @functools.cached_property
    def wide(self) -> Outcome:
        """The run with float32 for every operation."""
        return self.run(self.all_wide)

    @property
    def is_harmful(self) -> bool:
        error = self.outcome.error
        return bool(error.non_finite or error.relative > 2.0**-self.fmt.precision)

    @property
    def literals(self) -> Sequence[Literal]:
        return self.constants.changed

    def groups_in(self, outcome: Outcome) -> Sequence[Group]:
        return groups(outcome.equations, self.fmt, outcome.causes)

    def finding_of(self, group: Group) -> Finding:
        return finding(group, self.fmt, self.saturate)

    def suspects(self, trial: Trial, name: str) -> list[Suspect]:
        """Returns the lines that make the error of a stage, the largest share first. Of a program
        that cuts numbers off at its dtype's largest one, the operation that makes them is meant."""
        found = trial.suspects(name)
        if not self.limits:
            return found
        outcome, rows = trial.outcome, []
        for suspect in found:
            worst = suspect.worst
            before = outcome.causes.back((worst.index,)) if worst is not None else ()
            beyond = [e for e in outcome.equations if e.index in before and is_out_of_range(e)]
            if suspect.cause == "constant" and beyond:
                e = beyond[0]
                rows.append(
                    Suspect((e,), e, "overflow", suspect.share, (e.file, e.line), (e.file, e.line))
                )
            else:
                rows.append(suspect)
        return rows

    # -- fixes -------------------------------------------------------------------------------------

    def accepted(self, fix: Fix) -> Fix:
        return dataclasses.replace(fix, origin=self.origin)

    @property
    def origin(self) -> AuditedArithmetic:
        session = self.session
        recorded = {path: (i, session.recorded[i].name) for path, i in session.indices.items()}
        start = self.start() if session.adjustable else None
        return AuditedArithmetic(session.low, start, recorded)

    def accept(
        self, fix: Fix, after: Trial | Outcome, findings: Sequence[Finding], stage: str = ""
    ) -> None:
        order = max((x.order for x in self.found), default=0) + 1
        before = self.outcome.error
        self.unfixed = [x for x in self.unfixed if not any(same(x, y) for y in findings)]
        if isinstance(after, Outcome):
            after = self.trial(fix.change(self.current), after)
        error = after.outcome.error
        if (decided := self.now.stage(stage).error).decided:
            before, error = decided, after.stage(stage).error
        self.found += [
            fixed(dataclasses.replace(x, fix=self.accepted(x.fix or fix)), order, before, error)
            for x in findings
        ]
        self.now = after
        self.session.before = after.outcome.made


def find_fixes(search: Search, start: Outcome) -> OutputError:
    """Explains one failing part of the outputs after another, until none fails or no fix helps, or
    the user interrupts: what was found by then stays.

    Returns:
        The error with all fixes.
    """
    session, by_table = search.session, search.session.adjustable
    search.double = search.fmt.mantissa_bits >= FP32.mantissa_bits
    search.now = search.trial(search.start() if by_table else session.low, start)
    session.before = start.made
    search.tried.add(key_of(search.current))
    if search.trials <= 0 or session.kind.run is None:
        search.unfixed += _left(search, search.now)
        return start.error
    if by_table:
        _choose_width(search, start)
    given_up: set[str] = set()
    try:
        _explain_all(search, given_up)
    except KeyboardInterrupt:
        search.interrupted = True
    left = _failing(search, given_up)
    if left is not None:  # no trial is
        search.found += _unexplained(search, left, tried=False)
    if not (search.now.fails or search.interrupted):
        _explain_hidden(search)
    return search.outcome.error


def _choose_width(search: Search, start: Outcome) -> None:
    """Lets fixes compute in float32, or in float64 if float32 for every operation is as wrong, and
    float64 isn't."""
    search.all_wide = _all_wide(search)
    fails = start.error.non_finite or start.error.relative >= unusable(search.fmt.precision)
    if search.double or not fails or not near(start.error, search.wide.error):
        return
    search.double, in_float32 = True, search.wide
    search.all_wide = _all_wide(search)
    del search.wide
    if not better(search.wide.error, start.error, ENOUGH):
        search.double, search.wide = False, in_float32
        search.all_wide = _all_wide(search)
    search.now = search.trial(search.start(), start)


def _choose_again(search: Search) -> None:
    """Lets further fixes compute in float32 if that is enough with those accepted."""
    narrow = search.fmt.mantissa_bits < FP32.mantissa_bits
    if not (narrow and search.trials > 0 and getattr(search.current, "double", False)):
        return
    setting = dataclasses.replace(search.current, double=False)
    as_before = (setting.formats == search.start().formats) | np.isnan(setting.formats)
    after = search.run(_widened(search, setting, np.flatnonzero(as_before.all(axis=1)).tolist()))
    if not after.error.non_finite and after.error.relative < unusable(search.fmt.precision):
        search.now = search.trial(setting, search.outcome)


def _all_wide(search: Search) -> FormatChoice:
    return _widened(search, search.start(), range(len(search.start().formats)))


def _widened(search: Search, setting: FormatChoice, indices: Sequence[int]) -> FormatChoice:
    every = setting.widened(indices)
    for literal in search.literals:
        every = every.with_constant(literal.number, literal.number)
    return every.without_limits(search.limits)


def largest_share(search: Search) -> str:
    """Returns which line makes most of an error that needs no fix; "" if none does."""
    one = 2.0**-search.fmt.precision
    stages = [x for x in search.now.stages if not x.fails and x.error.relative > one]
    lead = next(iter(search.suspects(search.now, stages[0].name)), None) if stages else None
    file, line = lead.of_user if lead is not None else (None, 0)
    if lead is None or file is None or lead.share < MOST_OF_ERROR:
        return ""
    return f"{min(lead.share, 1):.0%} of it is made at {place(file, line)}"


def _explain_all(search: Search, given_up: set[str]) -> None:
    while (stage := _failing(search, given_up)) is not None and search.trials > 0:
        if _explain(search, stage):
            _choose_again(search)
        else:
            given_up.add(stage.name)
            search.found += _unexplained(search, stage, tried=True)
    if not search.found and search.session.adjustable and _rewrite(search):
        _explain_all(search, given_up)


def _rewrite(search: Search) -> bool:
    """Accepts a rewrite where float32 for every operation leaves the error; returns False if none
    helps."""
    stage = next((x for x in search.now.stages if x.fails), None)
    for suspect in search.suspects(search.now, stage.name)[:TRIED] if stage else ():
        assert stage is not None
        what = finding_of(search, suspect, search.now, stage)
        rewritten = (x for x in _options(search, suspect, what, "format") if x.rewrites)
        if _accept_first(search, stage, what, rewritten, partial(_is_better, stage)):
            return True
    return False


def _unexplained(search: Search, stage: StageError, *, tried: bool) -> list[Finding]:
    """Returns findings without a fix."""
    new = (x for x in _left(search, search.now, stage) if not any(same(x, y) for y in search.found))
    return [
        dataclasses.replace(
            x, tried=tried, error_before=float(stage.error),
            non_finite_before=stage.error.non_finite, decided=stage.error.decided,
        )
        for x in new
    ]  # fmt: skip


def _explain_hidden(search: Search) -> None:
    """Looks at what is wrong by half, though larger numbers hide it in the outputs, or in the loss
    and the gradients of a training step."""
    for stage in search.now.stages[:1]:
        for suspect in search.now.hidden(stage.name):
            place = suspect.place

            def shows_it_no_more(
                trial: Trial, stage: StageError = stage, place: Place = place
            ) -> bool:
                left = {x.place for x in trial.hidden(stage.name)}
                return place not in left and trial.stage(stage.name).error <= stage.error

            what = finding_of(search, suspect, search.now, stage)
            text = f"{what.evidence}; larger numbers hide it in the outputs"
            what = dataclasses.replace(what, evidence=text)
            runs = ("format", "") if search.session.adjustable else (search.kind.run or "",)
            options = (fix for run in runs for fix in _options(search, suspect, what, run))
            if not _accept_first(search, stage, what, options, shows_it_no_more):
                search.found.append(dataclasses.replace(what, tried=True))


def _failing(search: Search, given_up: Iterable[str]) -> StageError | None:
    """Returns the first part that is wrong: of the outputs as a whole or, where float32 for every
    operation leaves as much, of those of which it doesn't."""
    found: Iterable[StageError] = search.now.stages
    if not search.now.fails:
        return None
    if search.all_wide is not None and near(search.outcome.error, search.float32_error):
        own, wide = (dict(x.outputs) for x in (search.outcome, search.wide))
        found = [x for x in search.now.outputs if not near(own[x.name], wide[x.name])]
    failing = [x for x in found if x.fails and x.name not in given_up]
    first = next(iter(failing), None)
    lost = next((x for x in failing if x.error.non_finite), None)
    if first is None or lost is None or lost is first:
        return first
    # a part that isn't finite comes before an inexact one, unless that one's lines make it so
    shown = [x for x in search.suspects(search.now, first.name) if x.share >= SHARE_SHOWN]
    lead = next(iter(search.suspects(search.now, lost.name)), None)
    return first if lead and lead.of_user in {x.of_user for x in shown} else lost


def _left(search: Search, trial: Trial, stage: StageError | None = None) -> list[Finding]:
    """Returns findings of the lines that make most of the error."""
    failing = [stage] if stage else [x for x in trial.stages if x.fails][:1]
    found = [x for own in failing for x in search.suspects(trial, own.name)]
    shown = [x for x in found if x.share >= SHARE_SHOWN and (x.worst or x.cause == "constant")]
    return [finding_of(search, x, trial, failing[0]) for x in shown[:SHOWN]]


def _explain(search: Search, stage: StageError) -> bool:
    """Accepts a fix of what makes most of an error; returns False if none helps."""
    suspects = search.suspects(search.now, stage.name)
    if not search.session.adjustable:
        return any(_fix_line(search, stage, x, search.kind.run or "") for x in suspects[:TRIED])
    lead = suspects[0] if suspects else None
    return lead is not None and (
        _fix_line(search, stage, lead, "format")
        or widen(search, stage)
        or _fix_two(search, stage, lead)
    )


def _fix_two(search: Search, stage: StageError, lead: Suspect) -> bool:
    """Accepts two fixes that help together: one of a line, and one of the line that makes the error
    then. Returns False if no two do."""
    what, now, found = finding_of(search, lead, search.now, stage), search.now, search.found
    for fix in _options(search, lead, what, "format"):
        trial = search.attempt(fix, again=True)
        other = next(iter(search.suspects(trial, stage.name)), None) if trial else None
        if trial is None or other is None or other.of_user == lead.of_user:
            continue
        search.found = [*found]
        search.accept(fix, trial, [what], stage.name)
        if _fix_line(search, stage, other, "format"):
            first, second = search.found[len(found)], search.found[-1]
            text = f"{fix}, together with {second.fix}"
            search.found[len(found)] = dataclasses.replace(
                first, fix=dataclasses.replace(first.fix or fix, text=text, all_lines=fix.text),
                error_after=second.error_after, non_finite_after=second.non_finite_after,
            )  # fmt: skip
            return True
        search.found, search.now, search.session.before = found, now, now.outcome.made
    return False


def _fix_line(search: Search, stage: StageError, suspect: Suspect, run: str) -> bool:
    what, is_better = finding_of(search, suspect, search.now, stage), partial(_is_better, stage)
    return _accept_first(search, stage, what, _options(search, suspect, what, run), is_better)


def _is_better(stage: StageError, trial: Trial) -> bool:
    return helps(trial.stage(stage.name), stage)


def _options(search: Search, suspect: Suspect, what: Finding, run: str) -> Iterator[Fix]:
    """Yields the fixes that a line has in one kind of run, the smallest first."""
    context, literal = _context(search, suspect, what), literal_of(search, suspect)
    if not run:
        yield wide(search, [(suspect, what)])
    elif literal is None:
        yield from proposals(run, context) if context.group.equations else ()
    else:
        alike = [x for x in search.literals if x.number == literal.number]
        places = {(x.file, x.line) for x in alike}
        found = [
            fix for own in sorted(alike, key=lambda x: x is not literal)
            for fix in proposals(
                "constant", dataclasses.replace(context, literal=own, places=places)
            )
        ]  # fmt: skip
        yield from sorted(found, key=lambda fix: fix.size)


def _accept_first(
    search: Search, stage: StageError, what: Finding, options: Iterable[Fix],
    is_better: Callable[[Trial], bool],
) -> bool:  # fmt: skip
    """Accepts the first fix after which nothing is wrong any more, or else the best of those that
    help; returns False if none does."""
    helped: list[tuple[Fix, Trial]] = []
    for fix in options:
        trial = search.attempt(fix)
        if trial is not None and is_better(trial) and not (fix.undoes and search.found):
            helped.append((fix, trial))
            if trial.is_enough(stage.name):
                break
    if helped:
        fix, trial = _best(search, helped, stage.name)
        what = _rewritten(search, what, fix)
        search.accept(fix, trial, [what, *_others(search, stage, what, fix)], stage.name)
    return bool(helped)


def _rewritten(search: Search, what: Finding, fix: Fix) -> Finding:
    """Returns the finding of the cancellation that a rewrite removes, in place of a rounding of
    what cancels."""
    kind = FINDING_KINDS["cancellation"]
    cancels = [e for e in search.outcome.equations if e.index in fix.rewrites and e["cancelled"]]
    if not cancels or what.kind != "amplified":
        return what
    group = Group((max(cancels, key=lambda e: e["bits"]),))
    behind = "".join(what.evidence.partition(";")[1:])  # what the error makes in later operations
    evidence = kind.evidence(group, search.fmt) + behind
    return dataclasses.replace(search.finding_of(group), kind=kind.name, evidence=evidence)


def _others(search: Search, stage: StageError, what: Finding, fix: Fix) -> Iterator[Finding]:
    """Yields findings of other lines that make much of the error, and that a fix widens too."""
    for suspect in search.suspects(search.now, stage.name) if fix.indices else ():
        place, own = (what.file, what.line), {e.index for e in suspect.equations}
        shared = own and own <= {*fix.indices} and suspect.share >= SHARE_SHOWN
        if shared and suspect.place != place:
            yield finding_of(search, suspect, search.now, stage)


def _best(search: Search, helped: Sequence[tuple[Fix, Trial]], name: str) -> tuple[Fix, Trial]:
    """Returns the smallest fix of those that leave the fewest parts wrong, with an error near the
    least; one that undoes a whole policy or recipe, or changes a library's lines, only without
    others."""
    some = [x for x in helped if not x[0].undoes] or list(helped)
    fewest = min(sum(x.fails for x in trial.stages) for _, trial in some)
    some = [(fix, trial) for fix, trial in some if sum(x.fails for x in trial.stages) == fewest]
    of_library = {e.index for e in search.outcome.equations if e.caller}
    some = [x for x in some if not of_library & {*x[0].indices}] or some
    own = [trial.stage(name) for _, trial in some]
    least = min(x.error for x in own)
    close = [
        x for x, after in zip(some, own, strict=True)
        if after.error.non_finite <= least.non_finite
        and after.error.relative <= max(2 * least.relative, after.few)
    ]  # fmt: skip
    return min(close, key=lambda x: x[0].size)


def _context(search: Search, suspect: Suspect, what: Finding) -> Context:
    equations, session = search.outcome.equations, search.session
    own = {*what.equations} or {e.index for e in suspect.equations}
    group = Group(tuple(e for e in equations if e.index in own) or suspect.equations)
    kind, now, low = FINDING_KINDS[what.kind], search.current, session.low
    gradients = [e for e in equations if e.index in session.loss_scaled]
    context = Context(
        group, kind, search.fmt, now, low, equations, gradients=gradients, causes=search.causes
    )
    if not session.adjustable:
        return context
    replaced = dict(search.current.constants)
    return dataclasses.replace(
        context,
        norms=search.norms,
        rewrites=search.rewrites,
        masks=[x for x in search.constants.masks if x not in replaced],
        limits=search.limits,
    )
