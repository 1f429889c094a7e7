"""Fixes for changes of carried state that are lost, which one call's outputs hardly show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from .._run._changes import Update
from .._run._outcome import Outcome
from .._thresholds import CHANGE_LOST, CHANGE_REGAINED, MOST, NOT_WORSE, UPDATES_LOST
from ._apply import FormatChoice
from ._findings import Finding, constant_finding
from ._fixes import Context, Fix, proposals
from ._groups import Group
from ._kinds import FINDING_KINDS
from ._literals import Literal
from ._measure import lost_updates
from ._search import Search
from ._updates import counters, decays, lost_contributions

Measure = Callable[[Outcome], float]


@dataclasses.dataclass(frozen=True)
class _Lost:
    """One finding, what a fix must halve, the change that is lost in a sentence, and the constant
    that loses it if there is one."""

    what: Finding
    group: Group
    measure: Measure
    change: str = ""
    literal: Literal | None = None


def search_lost_updates(search: Search) -> None:
    """A fix is accepted for the change that it regains. Changes that no trial is left for are
    findings without a fix."""
    seen: set[object] = {_key(x) for x in search.found}
    for _ in range(MOST):
        lost = next((x for x in _lost(search) if _key(x.what) not in seen), None)
        if lost is None:
            return
        seen.add(_key(lost.what))
        search.lost_changes += [lost.change] if lost.change else []
        search.unfixed = [x for x in search.unfixed if x.equations != lost.what.equations]
        if not _fixed(search, lost):
            tried = search.trials > 0 and isinstance(search.current, FormatChoice)
            error = search.outcome.error
            what = dataclasses.replace(
                lost.what, tried=tried, error_before=float(error),
                non_finite_before=error.non_finite,
            )  # fmt: skip
            search.found.append(what)


def _key(what: Finding) -> object:
    return what.equations or (what.file, what.line, what.evidence.partition(";")[0])


def _lost(search: Search) -> Iterator[_Lost]:
    outcome, session = search.outcome, search.session
    groups = search.groups_in(outcome)
    kept = {old for old, _ in search.current.constants} if session.adjustable else set()
    for literal, indices in decays(session, outcome, search.literals):
        if literal.number not in kept:
            what = constant_finding(literal)
            text = f"{what.evidence}; it scales what the next call gets"
            group = _group_of(groups, outcome, indices)
            yield _Lost(
                dataclasses.replace(what, evidence=text), group, _of(search, indices), text, literal
            )
    trained = session.steps > 1 or session.trained
    found = [x for x in session.updates(outcome) if x.lost and (trained or not x.whole or x.adds)]
    for update in found:
        if update.indices and update.path not in session.floors.changes:
            group = _group_of(groups, outcome, update.indices)
            measure = _of(search, update.indices)
            yield _Lost(_finding(search, group, update), group, measure, str(update))
    for index, text in counters(session, outcome, search.fmt):
        group = _group_of(groups, outcome, (index,))
        what = dataclasses.replace(search.finding_of(group), kind="swamping", evidence=text)
        yield _Lost(what, group, _swamped(group), text)
    for index in lost_contributions(session, outcome):
        group = _group_of(groups, outcome, (index,))
        yield _Lost(_finding(search, group), group, _swamped(group))
    if lost_updates(outcome.equations) >= UPDATES_LOST:
        for group in groups:
            e = group.first
            if e.direction == "optimizer" and e.is_output and group.swamped >= UPDATES_LOST:
                yield _Lost(_finding(search, group), group, lambda x: lost_updates(x.equations))


def _group_of(groups: Sequence[Group], outcome: Outcome, indices: tuple[int, ...]) -> Group:
    alone = Group(tuple(e for e in outcome.equations if e.index in indices))
    return next((g for g in groups if set(indices) & set(g.indices)), alone)


def _of(search: Search, indices: tuple[int, ...]) -> Measure:
    now = search.session.updates(search.outcome)
    paths = {x.path for x in now if set(x.indices) & set(indices)}

    def measure(outcome: Outcome) -> float:
        found = search.session.updates(outcome)
        return max((x.error for x in found if x.path in paths), default=0.0)

    return measure


def _swamped(group: Group) -> Measure:
    def measure(outcome: Outcome) -> float:
        here = [e for e in outcome.equations if e.index in group.indices]
        return max((e.share("swamped") for e in here), default=0.0)

    return measure


def _finding(search: Search, group: Group, update: Update | None = None) -> Finding:
    what = search.finding_of(group)
    parts = [FINDING_KINDS["swamping"].evidence(group, search.fmt)] if group.swamped else []
    parts += [str(update)] if update else []
    return dataclasses.replace(what, kind="swamping", evidence="; ".join(parts) or what.evidence)


def _fixed(search: Search, lost: _Lost) -> bool:
    """Accepts the smallest fix that regains the change, and at most twice as much of its error is
    left as with another one; returns False if none does."""
    before, error = lost.measure(search.outcome), search.outcome.error
    if not isinstance(search.current, FormatChoice):
        return False
    context = Context(
        lost.group, FINDING_KINDS[lost.what.kind], search.fmt, search.current,
        search.session.low, search.outcome.equations, literal=lost.literal, causes=search.causes,
    )  # fmt: skip
    kind = "constant" if lost.literal else "lost_updates"
    tried: list[tuple[Fix, Outcome, float]] = []
    for fix in proposals(kind, context):
        if search.trials <= 0:
            break
        after = search.run(fix.change(search.current))
        limit = NOT_WORSE * error.relative + float(search.fmt.eps)
        if after.error.non_finite <= error.non_finite and after.error.relative <= limit:
            tried.append((fix, after, lost.measure(after)))
            if tried[-1][-1] <= min(CHANGE_REGAINED * before, float(search.fmt.eps) / 2):
                break
    least = min((left for *_, left in tried), default=before)
    chosen = next((x for x in tried if x[-1] <= min(CHANGE_REGAINED * before, 2 * least)), None)
    if tried and lost.literal and before < CHANGE_LOST:  # the decay counts in later calls
        chosen = chosen or tried[-1]
    if chosen is None:
        return False
    fix, after, _ = chosen
    found = dataclasses.replace(lost.what, fix=search.accepted(fix))
    search.accept(fix, after, [found])
    return True
