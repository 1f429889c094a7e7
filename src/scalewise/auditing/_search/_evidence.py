"""What a line with a share of the error does: the kind of its finding, and the numbers for it."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from .._run._equation_statistics import EquationStatistics
from .._run._outcome import Outcome
from .._thresholds import AMPLIFIED
from ._findings import Finding, constant_finding, finding
from ._groups import ACCUMULATES, Group, is_out_of_range
from ._kinds import FINDING_KINDS, made_here
from ._literals import Literal, written
from ._trial import StageError, Suspect, Trial

if TYPE_CHECKING:
    from ._search import Search

# The kinds that a cause of the balance sheet may be, the first that has evidence; else the first.
KINDS = {
    "overflow": ("nan", "overflow", "saturation"),
    "underflow": ("underflow",),
    "swamping": ("swamping",),
}
CARRIED_IN = 30  # errors of a result that are as many times its own are carried in
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
    alike = alike or [worst]
    group = Group(tuple(alike), max(map(trial.outcome.causes.amplification, alike)))
    own = finding(group, search.fmt, search.saturate)
    if not suspect.cause:
        return own
    own = dataclasses.replace(own, scope=worst.scope)
    sums = worst.looped or worst.primitive in ACCUMULATES
    if suspect.cause in KINDS and not (suspect.cause == "swamping" and not sums):
        has = (x for x in KINDS[suspect.cause] if _has(search, x, group))
        name = next(has, KINDS[suspect.cause][-1 if search.saturate else 0])
        return _of_kind(own, name, group, search)
    if is_out_of_range(worst):
        return own
    return _carried(search, own, worst, group, suspect, trial, stage)


def _has(search: Search, name: str, group: Group) -> bool:
    return FINDING_KINDS[name].found(group, search.saturate, search.fmt)


def _of_kind(own: Finding, name: str, group: Group, search: Search) -> Finding:
    kind = FINDING_KINDS[name]
    return dataclasses.replace(own, kind=name, evidence=kind.evidence(group, search.fmt))


def literal_of(search: Search, suspect: Suspect) -> Literal | None:
    """Returns the constant of a line that the format changes, if that is the cause: also where JAX
    converts it to the format before it is used."""
    worst, cause = suspect.worst, suspect.cause
    converts = worst is not None and worst.primitive == "convert_element_type" and cause in KINDS
    if not search.session.adjustable or not (cause == "constant" or converts):
        return None
    kept = {old for old, _ in search.current.constants}
    here = (x for x in search.literals if (x.file, x.line) == suspect.place)
    fits = (x for x in here if cause in ("constant", x.kind))
    return next((x for x in fits if x.number not in kept), None)


def _is_like(e: EquationStatistics, worst: EquationStatistics) -> bool:
    names = ("file", "line", "operation", "part", "quantizes")
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
        numbers = [f"{written(x)} becomes {y:.6g}" for x, y in rounded_constants(search, worst)]
        what = "constant" if len(numbers) == 1 else "constants"
        text = f"the {what} {', '.join(numbers[:3])}" if numbers else made
        return dataclasses.replace(own, kind="precision", evidence=text)
    for name in LOCAL if suspect.cause in ("rounding", "decision") else ():
        # outside of loops, a sum that decides something has rounded away a number, not a total
        local = suspect.cause == "rounding" or name != "swamping" or worst.looped
        if local and _has(search, name, group):
            return _of_kind(own, name, group, search)
    after = _readers(trial.outcome, worst)
    by = next(
        (e for e in after if e["cancelled"] and e.inherited > CARRIED_IN * e.introduced), None
    )
    kind, text = "precision", ""
    if suspect.cause == "decision":
        turned, kind = next((e for e in after if e["differ"]), worst), "decision"
        what = FINDING_KINDS[kind].evidence(Group((turned,)), search.fmt)
        text = f"; at {turned.short} {what}" if turned is not worst else ""
    spoiled = next((e for e in after if is_out_of_range(e)), None)
    if stage.error.non_finite and spoiled is not None:
        other = finding(Group((spoiled,)), search.fmt, search.saturate)
        kind = other.kind
        text = f"; from it {spoiled.primitive} at {spoiled.short}: {other.evidence}"
    if by is not None and (by.file, by.line) == (worst.file, worst.line):
        what = FINDING_KINDS["cancellation"].evidence(Group((by,)), search.fmt)
        return dataclasses.replace(own, kind="cancellation", evidence=what + text)
    factor = by.inherited / worst.introduced if by is not None and worst.introduced else 0.0
    if by is not None and factor >= AMPLIFIED:
        text = f", amplified {factor:.0f} times by {by.primitive} at {by.short}{text}"
        return dataclasses.replace(own, kind="amplified", evidence=made + text)
    if kind == "precision" and suspect.cause == "swamping":
        return _of_kind(own, "swamping", group, search)
    factor = suspect.share * stage.error.relative / worst.introduced if worst.introduced else 0.0
    if kind == "precision" and factor >= AMPLIFIED:
        if factor < AMPLIFIED * worst["visits"]:
            text = f" in each of {worst['visits']:,.0f} iterations, which add up"
        else:
            kind, text = "amplified", f", amplified {factor:.0f} times"
    elif kind == "precision":
        return _of_kind(own, kind, group, search)
    return dataclasses.replace(own, kind=kind, evidence=made + text)


def _readers(outcome: Outcome, equation: EquationStatistics) -> list[EquationStatistics]:
    """Returns an operation and what is computed of its results, in the order of the program."""
    readers: dict[int, set[int]] = collections.defaultdict(set)
    for i, operands in outcome.dataflow.flow.items():
        for j in (j for operand in operands for j in operand):
            readers[j].add(i)
    found, pending = set(), {equation.index}
    while pending:
        found |= pending
        pending = {i for j in pending for i in readers[j]} - found
    return [e for e in outcome.equations if e.index in found]


def rounded_constants(search: Search, equation: EquationStatistics) -> list[tuple[float, float]]:
    """Returns the numbers of the program that an operation reads and the format rounds, and what it
    makes of them."""
    path = search.session.recorded[equation.index].path
    numbers = search.constants.read.get(path, ())
    pairs = ((x, float(search.fmt.decode(search.fmt.encode(x)))) for x in numbers)
    return [(x, y) for x, y in pairs if x != y]
