"""What a line with a share of the error does: the kind of its finding, and the numbers for it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from .._run._equation_statistics import EquationStatistics
from .._thresholds import AMPLIFIED
from ._findings import Finding, constant_finding, finding
from ._groups import Group, is_out_of_range
from ._kinds import FINDING_KINDS, made_here
from ._literals import Literal
from ._trial import StageError, Suspect, Trial

if TYPE_CHECKING:
    from ._search import Search

# The kinds that a cause of the balance sheet may be, the first that has evidence; else the first.
KINDS = {
    "overflow": ("nan", "overflow", "saturation"),
    "underflow": ("underflow",),
    "swamping": ("swamping",),
}
LOCAL = ("accumulation", "saturation", "underflow", "swamping")  # of a rounding's own


def finding_of(search: Search, suspect: Suspect, trial: Trial, stage: StageError) -> Finding:
    literal = literal_of(search, suspect)
    if literal is not None:
        return constant_finding(literal)
    rows = {e.index: e for e in trial.outcome.equations}
    worst = suspect.worst if suspect.worst is not None else (suspect.equations or (None,))[0]
    if worst is None:
        return _elsewhere(suspect)
    worst = rows.get(worst.index, worst)
    alike = [e for e in rows.values() if _is_like(e, worst)]
    group = Group(tuple(alike) or (worst,))
    own = finding(group, search.fmt, search.saturate)
    if not suspect.cause:
        return own
    own = dataclasses.replace(own, scope=worst.scope)
    for name in KINDS.get(suspect.cause, ()):
        if FINDING_KINDS[name].found(group, search.saturate, search.fmt):
            return _of_kind(own, name, group, search)
    if suspect.cause in KINDS:
        return _of_kind(own, KINDS[suspect.cause][-1 if search.saturate else 0], group, search)
    if is_out_of_range(worst):
        return own
    return _carried(search, own, worst, group, suspect, trial, stage)


def _of_kind(own: Finding, name: str, group: Group, search: Search) -> Finding:
    kind = FINDING_KINDS[name]
    return dataclasses.replace(own, kind=name, evidence=kind.evidence(group, search.fmt))


def literal_of(search: Search, suspect: Suspect) -> Literal | None:
    """Returns the constant of a line that the format changes, if that is the cause."""
    if not search.session.adjustable or suspect.cause != "constant":
        return None
    kept = {old for old, _ in search.current.constants}
    here = (x for x in search.literals if (x.file, x.line) == suspect.place)
    return next((x for x in here if x.number not in kept), None)


def _is_like(e: EquationStatistics, worst: EquationStatistics) -> bool:
    names = ("file", "line", "primitive", "part", "quantizes")
    return worst.file is not None and all(getattr(e, x) == getattr(worst, x) for x in names)


def _elsewhere(suspect: Suspect) -> Finding:
    file, line = suspect.place
    return Finding("precision", file, line, "", "", "", "", "forward", None, 0.0, 0.0, "")


def _carried(
    search: Search, own: Finding, worst: EquationStatistics, group: Group, suspect: Suspect,
    trial: Trial, stage: StageError,
) -> Finding:  # fmt: skip
    """Returns the finding of an error that is made here and grows, or decides, elsewhere."""
    made = made_here(worst)
    if suspect.cause == "constant":
        numbers = [f"{x:g} becomes {y:g}" for x, y in rounded_constants(search, worst)]
        text = f"the format rounds its constants ({', '.join(numbers[:3])})" if numbers else made
        return dataclasses.replace(own, kind="precision", evidence=text)
    after = [
        e for e in trial.outcome.equations if worst.index in trial.outcome.causes.back((e.index,))
    ]
    if suspect.cause == "decision":
        turned = next((e for e in after if e["differ"]), None)
        text = made
        if turned is not None:
            what = FINDING_KINDS["decision"].evidence(Group((turned,)), search.fmt)
            text = f"{made}; at {turned.short} {what}" if turned is not worst else what
        return dataclasses.replace(own, kind="decision", evidence=text)
    spoiled = next((e for e in after if is_out_of_range(e)), None)
    if stage.error.non_finite and spoiled is not None:
        other = finding(Group((spoiled,)), search.fmt, search.saturate)
        text = f"{made}; from it {spoiled.primitive} at {spoiled.short}: {other.evidence}"
        return dataclasses.replace(own, kind=other.kind, evidence=text)
    for name in LOCAL:
        if FINDING_KINDS[name].found(group, search.saturate, search.fmt):
            return _of_kind(own, name, group, search)
    factor = suspect.share * stage.error.relative / worst.introduced if worst.introduced else 0.0
    by = max((e for e in after if e["cancelled"]), key=lambda e: e.inherited, default=None)
    if by is not None and (by.file, by.line) == (worst.file, worst.line):
        return _of_kind(own, "cancellation", Group((by,)), search)
    if factor >= AMPLIFIED:
        where = f" by {by.primitive} at {by.short}" if by is not None else ""
        text = f"{made}, amplified {factor:.0f} times{where}"
        return dataclasses.replace(own, kind="amplified", evidence=text)
    return _of_kind(own, "precision", group, search)


def rounded_constants(search: Search, equation: EquationStatistics) -> list[tuple[float, float]]:
    """Returns the numbers of the program that an operation reads and the format rounds, and what it
    makes of them."""
    path = search.session.lockstep.recorded[equation.index].path
    numbers = search.constants.read.get(path, ())
    pairs = ((x, float(search.fmt.decode(search.fmt.encode(x)))) for x in numbers)
    return [(x, y) for x, y in pairs if x != y]
