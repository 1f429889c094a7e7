"""The cause of an error that a fix removes: the operation that a finding names, and its kind."""

from __future__ import annotations

import dataclasses
import math

from ..._jax import jex
from .._run._equation_statistics import EquationStatistics
from .._run._outcome import Outcome
from .._thresholds import AMPLIFIED_SHOWN, DEPTH, ENOUGH, GAIN, MANY_SWAMPED
from ._apply import FormatChoice
from ._findings import Finding, constant_finding
from ._fixes import Fix
from ._groups import Group, is_out_of_range
from ._kinds import FINDING_KINDS, made_here, numbers_lost
from ._literals import Literal
from ._measure import better
from ._trials import Search


def at_cause(search: Search, what: Finding, fix: Fix) -> Finding:
    """Returns the finding where the error is made, if the fix is there and not here."""
    if fix.kind is not None and fix.kind.name == "loss_scale":
        return _smallest_gradients(search, what)
    if what.kind == "decision" and _is_refuted(search, what):
        what = _largest_error(search, what, fix)
    wide = [e for e in search.outcome.equations if e.index in set(fix.indices)]
    cause = fix.cause
    beyond = [e for e in wide if is_out_of_range(e)]  # their errors aren't measured
    flushed = [e for e in wide if e["flushed"]] if search.outcome.error.non_finite else []
    if cause is None or flushed or (wide and cause.index not in fix.indices):
        cause = max(
            beyond or flushed or wide,
            key=lambda e: -e.index if beyond else e["flushed"] if flushed else e.introduced,
            default=None,
        )
    if cause is None:
        return what
    here = (e.index for e in search.outcome.equations if (e.file, e.line) == (what.file, what.line))
    overflows = bool(beyond) and not Group((cause,)).is_singular(search.fmt)
    hidden = overflows and not FINDING_KINDS[what.kind].out_of_range
    before = is_out_of_range(cause) and cause.index < min(here, default=0)
    if not what.equations and (hidden or before):
        return dataclasses.replace(search.finding_of(Group((cause,))), tried=what.tried)
    places = {(cause.file, cause.line)}
    if what.kind != "amplified":
        places |= {(e.file, e.line) for e in wide}
    if (what.file, what.line) in places:
        return amplified_after(search, what, fix)
    constant = next((x for x in search.literals if (x.file, x.line) in places), None)
    if not what.equations and constant is not None:
        return dataclasses.replace(constant_finding(constant), tried=what.tried)
    moved = dataclasses.replace(search.finding_of(Group((cause,))), tried=what.tried)
    if cause.index not in search.causes.back(what.equations, DEPTH):
        return amplified_after(search, moved, fix)  # another fault
    return _carried_to(search, what, moved, cause, fix)


def constant_is_harmless(search: Search, constant: Literal, fix: Fix, after: Outcome) -> bool:
    """Returns True if wider formats help as much with the constant as the narrow one has it."""
    if not fix.indices or math.isnan(constant.rounded) or search.trials <= 0:
        return False
    setting = fix.change(search.current).with_constant(constant.number, constant.rounded)
    return not better(after.error, search.run(setting).error, GAIN)


def unless_refuted(search: Search, what: Finding, fix: Fix) -> Finding:
    """Returns the finding; if it is of numbers that are flushed and keeping these doesn't help,
    one of the largest error that is made where the fix is."""
    refuted = what.kind == "underflow" and fix.indices and _is_refuted(search, what)
    return _largest_error(search, what, fix) if refuted else what


def _is_refuted(search: Search, what: Finding) -> bool:
    """Returns True if the run without the event that a finding names has the same error."""
    finite = not search.outcome.error.non_finite
    tested = isinstance(search.current, FormatChoice) and finite and what.equations
    if not tested or search.trials <= 0:
        return False
    if what.kind == "decision":
        if any(search.causes.equations[i].looped for i in what.equations):
            return False  # a loop's own condition can't be imposed
        without = search.current.imposed(what.equations)
    else:
        without = search.current.without_underflow(what.equations)
    return not better(search.run(without).error, search.outcome.error, GAIN)


def _largest_error(search: Search, what: Finding, fix: Fix) -> Finding:
    wide = [e for e in search.outcome.equations if e.index in set(fix.indices)]
    if not wide:
        return what
    most = Group((max(wide, key=lambda e: e.introduced),))
    moved = dataclasses.replace(search.finding_of(most, what.kind), tried=what.tried)
    return amplified_after(search, moved, fix)


def _carried_to(
    search: Search, what: Finding, moved: Finding, cause: EquationStatistics, fix: Fix
) -> Finding:
    if FINDING_KINDS[what.kind].out_of_range:
        moved = amplified_after(search, moved, fix)
        evidence = f"{moved.evidence}; at {what.where} {what.evidence}"
        return dataclasses.replace(moved, evidence=evidence)
    if not FINDING_KINDS[what.kind].carried_in:
        return amplified_after(search, moved, fix)
    if moved.kind == "cancellation":  # exact itself: what it leaves is the error carried in
        return moved
    event, evidence = FINDING_KINDS[moved.kind].event, made_here(cause)
    if event and search.outcome.error.non_finite:  # its error isn't what made them so
        return moved
    if event:
        evidence = f"{moved.evidence}, {evidence}"
    if what.kind == "decision":
        kind = moved.kind if event else what.kind
        evidence = f"{evidence}; at {what.where} {what.evidence}"
    else:
        amplified = _amplification(cause, search.causes.equations[what.equations[0]])
        kind = "amplified" if amplified and not event else moved.kind
        evidence += amplified
    return dataclasses.replace(moved, kind=kind, evidence=evidence)


def amplified_after(search: Search, what: Finding, fix: Fix) -> Finding:
    swamps = what.kind == "swamping" and not any(_loses(search, i) for i in what.equations)
    if not (what.kind == "precision" or swamps) or not what.equations:
        return what
    here = (what.file, what.line)
    line = [e.index for e in search.causes.equations.values() if (e.file, e.line) == here]
    found = search.causes.amplified({*what.equations, *set(line) & set(fix.indices)})
    if found is None:
        return what
    made, by = found
    for e in (by, *search.causes.path(by.index)):  # where the digits are lost, on this line
        cancels = search.finding_of(Group((e,)))
        if cancels.kind == "cancellation" and (e.file, e.line) == here:
            return cancels
    if swamps and search.finding_of(Group((by,))).kind != "cancellation":
        return what  # what is added is small wherever the sum is read
    moved, amplified = search.finding_of(Group((made,))), _amplification(made, by)
    if not amplified:
        return what
    if FINDING_KINDS[moved.kind].out_of_range:
        return dataclasses.replace(moved, evidence=moved.evidence + amplified)
    return dataclasses.replace(moved, kind="amplified", evidence=made_here(made) + amplified)


def _loses(search: Search, index: int) -> bool:
    """Returns whether an addition loses what it adds, wherever its sum is read: in a loop, or if
    most sums of two arrays equal one of them. In ``(1 + x) - 1`` the subtraction is at fault."""
    e = search.causes.equations[index]
    arrays = not any(isinstance(x, jex.Literal) for x in search.outcome.recorded[index].eqn.invars)
    return e.looped or (arrays and e.share("swamped") >= MANY_SWAMPED)


def decided_after(search: Search, what: Finding, fix: Fix, after: Outcome) -> Finding | None:
    """Returns the finding as one of a decision, if the error reaches the outputs through one."""
    if FINDING_KINDS[what.kind].out_of_range or what.kind == "decision" or not what.equations:
        return None
    left = {e.index: e["differ"] for e in after.equations}
    undone = [
        e for e in search.outcome.equations
        if e["differ"] > 2 * left.get(e.index, 0.0)
        and {*fix.indices} & {e.index, *search.causes.back((e.index,), DEPTH)}
    ]  # fmt: skip
    if not undone:
        return None
    most = search.finding_of(Group((max(undone, key=lambda e: e["differ"] - left[e.index]),)))
    looped = any(e.looped for e in undone)  # a loop's own condition can't be imposed
    if isinstance(search.current, FormatChoice) and not looped and search.trials > 0:
        imposed = search.run(search.current.imposed([e.index for e in undone]))
        if not better(imposed.error, search.outcome.error, ENOUGH):
            return None
    elif what.kind != "precision":
        return None
    seen = f"; at {most.where} {most.evidence}"
    evidence = what.evidence.removesuffix(seen) + seen
    return dataclasses.replace(what, kind="decision", evidence=evidence)


def _smallest_gradients(search: Search, what: Finding) -> Finding:
    if FINDING_KINDS[what.kind].out_of_range:
        return what
    gradients = [e for e in search.outcome.equations if e.index in search.session.loss_scaled]
    small = max(gradients, key=lambda e: (e.share("flushed"), e.share("subnormal")))
    moved = dataclasses.replace(search.finding_of(Group((small,))), tried=what.tried)
    if moved.kind == "underflow":
        return moved
    if not small["subnormal"]:
        return what
    text = numbers_lost(Group((small,)), "subnormal")
    return dataclasses.replace(moved, kind="underflow", evidence=text)


def _amplification(made: EquationStatistics, by: EquationStatistics) -> str:
    """In a loop the numbers may shrink from one iteration to the next, and the errors of all of
    them together don't compare."""
    where = f"by {by.primitive} at {by.short}"
    factor = by.inherited / made.inherited if made.inherited else 0.0
    if factor == math.inf:
        return f", which is all that is left {where}"
    if made.looped or by.looped:
        return f", amplified {where}" if factor > 1 else ""
    return f", amplified {factor:.0f} times {where}" if factor >= AMPLIFIED_SHOWN else ""
