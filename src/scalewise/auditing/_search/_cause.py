"""The cause of an error that a fix removes: the operation that a finding names, and its kind."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ..._jax import jex
from .._run._equation_statistics import EquationStatistics
from .._run._outcome import Outcome, OutputError
from .._thresholds import AMPLIFIED_SHOWN, DEPTH, ENOUGH, GAIN, HIDDEN, MANY_SWAMPED, NEEDED
from ._apply import FormatChoice
from ._findings import Finding, constant_finding
from ._fixes import Fix
from ._groups import Group, is_out_of_range
from ._kinds import FINDING_KINDS, made_here, numbers_lost
from ._literals import Literal, written
from ._measure import key_of
from ._trials import Search


def at_cause(search: Search, what: Finding, fix: Fix) -> Finding:
    """Returns the finding where the error is made, if the fix is there and not here."""
    if fix.kind is not None and fix.kind.name == "loss_scale":
        return _smallest_gradients(search, what)
    if what.kind == "decision" and _is_refuted(search, what):
        what = _largest_error(search, what, fix, "decision")
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
    if not beyond and not flushed:
        cause = _needed(search, fix, cause, wide)
    here = (e.index for e in search.outcome.equations if (e.file, e.line) == (what.file, what.line))
    overflows = bool(beyond) and not Group((cause,)).is_singular(search.fmt)
    hidden = overflows and not FINDING_KINDS[what.kind].out_of_range
    before = is_out_of_range(cause) and cause.index < min(here, default=0)
    if not what.equations and (hidden or before):
        return dataclasses.replace(search.finding_at(cause), tried=what.tried)
    places = {(cause.file, cause.line)}
    if what.kind != "amplified":
        places |= {(e.file, e.line) for e in wide}
    led = not flushed and _is_led_to(search, what, cause)
    if (what.file, what.line) in places and not led:
        return amplified_after(search, _same_line(search, what, cause), fix)
    constant = next((x for x in search.literals if (x.file, x.line) in places), None)
    if not what.equations and constant is not None:
        return dataclasses.replace(constant_finding(constant), tried=what.tried)
    moved = dataclasses.replace(search.finding_at(cause), tried=what.tried)
    if cause.index not in search.causes.back(what.equations):
        return amplified_after(search, moved, fix)  # another fault
    return _carried_to(search, what, moved, cause, fix)


def _is_led_to(search: Search, what: Finding, cause: EquationStatistics) -> bool:
    """Returns True if operands within the range make results NaN or infinite: by an error of
    another line, or by a cancellation."""
    own = Group(tuple(search.causes.equations[i] for i in what.equations))
    if is_out_of_range(cause) or not own.equations or not own.is_undefined(search.fmt):
        return False
    return cause.line != what.line or search.finding_at(cause).kind == "cancellation"


def _same_line(search: Search, what: Finding, cause: EquationStatistics) -> Finding:
    """Returns the finding of a line's own event, or of the operation that makes its error."""
    own = search.finding_at(cause)
    carried = FINDING_KINDS[what.kind].carried_in and FINDING_KINDS[own.kind].event
    here = (what.file, what.line) == (cause.file, cause.line)
    other = here and bool(what.equations) and cause.index not in what.equations
    if other and (carried or what.kind == "precision"):
        return dataclasses.replace(own, tried=what.tried)
    return what


def _needed(
    search: Search, fix: Fix, cause: EquationStatistics, wide: Sequence[EquationStatistics]
) -> EquationStatistics:
    """Returns the operation of a line without which the fix doesn't help: the largest relative
    error may be that of a small addend."""
    place, before = (cause.file, cause.line), search.outcome.error
    line = [e for e in wide if (e.file, e.line) == place and e.introduced]
    if len(line) < 2 or not isinstance(search.current, FormatChoice):
        return cause
    for e in sorted(line, key=lambda e: (e is not cause, -e.introduced))[:NEEDED]:
        own = search.current.formats[e.index]
        without = fix.change(search.current).with_format([e.index], own)
        error = search.tried.get(key_of(without))
        if error is None and search.trials <= search.reserve:
            return cause
        if not search.better(error or search.run(without).error, before, ENOUGH):
            return e
    return cause


def constant_is_harmless(search: Search, constant: Literal, fix: Fix, after: Outcome) -> bool:
    """Returns True if wider formats help with the constant as the narrow one has it: make as many
    numbers finite, or else remove at least half of the error that they do without it."""
    if not fix.indices or math.isnan(constant.rounded) or search.trials <= 0:
        return False
    setting = fix.change(search.current).with_constant(constant.number, constant.rounded)
    error = search.run(setting).error
    if search.outcome.error.non_finite:
        return not search.better(after.error, error, GAIN)
    return error < _half_fixed(search, after)


def _half_fixed(search: Search, after: Outcome) -> OutputError:
    return OutputError(0, (search.outcome.error.relative + after.error.relative) / 2)


def unless_refuted(search: Search, shown: Finding, what: Finding, fix: Fix) -> Finding:
    """Returns the finding; if it is of numbers that are flushed and keeping these doesn't help,
    one of the largest error that is made where the fix is, and of what amplifies it to where it was
    ``shown``."""
    if what.kind == "overflow" and _is_flushed_instead(search, what):
        here = tuple(search.causes.equations[i] for i in what.equations)
        return dataclasses.replace(search.finding_of(Group(here), "overflow"), tried=what.tried)
    refuted = what.kind == "underflow" and fix.indices and _is_refuted(search, what)
    if not refuted:
        return what
    other = _largest_error(search, what, fix)
    again = other.kind == "underflow"
    if again and (other.equations == what.equations or _is_refuted(search, other)):
        other = _largest_error(search, what, fix, "underflow")
    if other.kind != "precision" or not FINDING_KINDS[shown.kind].carried_in:
        return other
    made, by = (search.causes.equations[x.equations[0]] for x in (other, shown))
    amplified = _amplification(made, by)
    evidence = made_here(made) + amplified
    return dataclasses.replace(other, kind="amplified", evidence=evidence) if amplified else other


def _is_flushed_instead(search: Search, what: Finding) -> bool:
    """Returns True if it is the numbers that are flushed, of operations that overflow as well, that
    spoil the outputs: a product that is divided by, say."""
    flushed = any(search.causes.equations[i]["flushed"] for i in what.equations)
    if not flushed or not isinstance(search.current, FormatChoice) or search.trials <= 0:
        return False
    after = search.run(search.current.without_underflow(what.equations))
    return search.better(after.error, search.outcome.error, ENOUGH)


def of_constants(search: Search, what: Finding, fix: Fix, after: Outcome) -> Finding | None:
    """Returns the finding as one of rounded constants, such as the coefficients of a filter. They
    are the cause if keeping them in float32 lowers the error, and if the fix with the constants
    rounded removes less than half of the error that it removes otherwise."""
    kind, before, now = FINDING_KINDS[what.kind], search.outcome.error, search.current
    if kind.severe or before.non_finite or search.is_small or search.trials <= 0:
        return None
    if not what.equations or not isinstance(now, FormatChoice):
        return None
    rounded = [(e, search.rounded_constants(e)) for e in search.operations(fix)]
    numbers = dict(x for _, some in rounded for x in some)
    converts = [e.index for e, some in rounded if some and e.primitive == "convert_element_type"]
    rounds, now = fix.change(now), now.widened(converts)
    for number, near in numbers.items():
        rounds, now = rounds.with_constant(number, near), now.with_constant(number, number)
    if not numbers or search.run(rounds).error < _half_fixed(search, after):
        return None
    if search.trials <= 0 or not search.better(search.run(now).error, before, GAIN):
        return None
    lost = [max((abs(1 - y / x) for x, y in some), default=0) for _, some in rounded]
    one, some = rounded[lost.index(max(lost))]
    texts = [f"{written(x)} becomes {y:.6g}" for x, y in some]
    found = search.finding_of(Group((one,)))
    evidence = f"the constant {', '.join(texts)}"
    return dataclasses.replace(found, kind="precision", evidence=evidence, tried=what.tried)


def _is_refuted(search: Search, what: Finding) -> bool:
    """Returns True if the run without the event that a finding names has the same error."""
    finite = not search.outcome.error.non_finite
    tested = isinstance(search.current, FormatChoice) and finite and what.equations
    if not tested or search.trials <= 0:
        return False
    if what.kind == "decision":
        if any(search.causes.equations[i].looped for i in what.equations):
            return False  # a loop's own condition can't be imposed
        after = search.run(search.current.imposed(what.equations))
    else:
        after = _without_underflow(search, what.equations)
    refuted = not search.better(after.error, search.outcome.error, GAIN)
    if refuted and what.kind == "underflow":
        search.harmless_underflows |= {*what.equations}
    return refuted


def _without_underflow(search: Search, indices: Sequence[int]) -> Outcome:
    """Returns the run in which no results of some equations are flushed or lose bits below the
    normal range, nor those that only then do, since their operands were zero or had lost them."""
    before = {e.index: e for e in search.outcome.equations}
    kept, after = {*indices}, search.run(search.current.without_underflow(indices))

    def loses_more(e: EquationStatistics) -> bool:
        made = before[e.index].introduced if e.index in before else 0.0
        flushed = before[e.index]["flushed"] if e.index in before else 0.0
        return e["flushed"] > 2 * flushed or (e["subnormal"] > 0 and e.introduced > 2 * made)

    for _ in range(HIDDEN):
        more = {e.index for e in after.equations if loses_more(e)}
        enough = search.better(after.error, search.outcome.error, GAIN) or more <= kept
        if enough or search.trials <= 0:
            break
        kept |= more
        after = search.run(search.current.without_underflow(sorted(kept)))
    return after


def _largest_error(search: Search, what: Finding, fix: Fix, refuted: str = "") -> Finding:
    wide = [e for e in search.outcome.equations if e.index in set(fix.indices)]
    if not wide:
        return what
    most = Group((max(wide, key=lambda e: e.introduced),))
    moved = dataclasses.replace(search.finding_of(most, refuted), tried=what.tried)
    return amplified_after(search, moved, fix)


def _carried_to(
    search: Search, what: Finding, moved: Finding, cause: EquationStatistics, fix: Fix
) -> Finding:
    if FINDING_KINDS[what.kind].out_of_range:
        moved = amplified_after(search, moved, fix)
        if moved.kind == "precision":  # a rounding like any other: what it leads to is the event
            made = f", from the error of {cause.introduced:.2g} made at {moved.where}"
            elsewhere = cause.introduced and moved.where != what.where
            return dataclasses.replace(what, evidence=what.evidence + (made if elsewhere else ""))
        if what.kind == "underflow" and _is_refuted(search, what):
            return moved
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
        by = search.causes.equations[what.equations[0]]
        cancels = None if event else _cancellation(search, by, fix)
        if cancels is not None:
            return cancels
        amplified = _amplification(cause, by)
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
    cancels = _cancellation(search, by, fix, here)
    if cancels is not None:
        return cancels
    if swamps and search.finding_at(by).kind != "cancellation":
        return what  # what is added is small wherever the sum is read
    moved, amplified = search.finding_at(made), _amplification(made, by)
    if not amplified:
        return what
    if FINDING_KINDS[moved.kind].out_of_range:
        return dataclasses.replace(moved, evidence=moved.evidence + amplified)
    return dataclasses.replace(moved, kind="amplified", evidence=made_here(made) + amplified)


def _cancellation(
    search: Search, by: EquationStatistics, fix: Fix, here: tuple[str | None, int] | None = None
) -> Finding | None:
    """Returns the finding of where an error's digits are lost, if that is ``here`` or on a line of
    the fix that makes errors too."""
    fixed = search.operations(fix)
    for e in (by, *search.causes.path(by.index)):
        place, before = (e.file, e.line), search.causes.back((e.index,))
        line = [x for x in fixed if (x.file, x.line) == place and x.index in before]
        makes = any(x.introduced for x in line)
        if (makes or place == here) and (found := search.finding_at(e)).kind == "cancellation":
            return found
    return None


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
        if not search.is_returned(Group((e,)))
        and e["differ"] > 2 * left.get(e.index, 0.0)
        and {*fix.indices} & {e.index, *search.causes.back((e.index,), DEPTH)}
    ]  # fmt: skip
    if not undone:
        return None
    most = search.finding_of(Group((max(undone, key=lambda e: e["differ"] - left[e.index]),)))
    looped = any(e.looped for e in undone)  # a loop's own condition can't be imposed
    if isinstance(search.current, FormatChoice) and not looped and search.trials > 0:
        imposed = search.run(search.current.imposed([e.index for e in undone]))
        if not search.better(imposed.error, search.outcome.error, ENOUGH):
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
    moved = dataclasses.replace(search.finding_at(small), tried=what.tried)
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
