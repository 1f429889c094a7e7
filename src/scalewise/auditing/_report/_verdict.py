"""The verdict of a report: one sentence that says whether the function works in low precision."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from ..._output import counted
from .._run._outcome import OutputError, output_name
from .._search._findings import Finding
from .._search._measure import is_slight, near
from .._thresholds import CHANGE_WRONG, MANY_DECIDED, UPDATES_LOST, decides_otherwise, unusable
from ._summary import Summary

TRAINING = re.compile("train|optimi|learn|fit", re.IGNORECASE)
STEP = re.compile("step|update", re.IGNORECASE)  # of a training loop or of a simulation


def verdict(report: Summary) -> str:
    """Returns whether the function trains or computes, the cause if not, the fix, and the rest.

    Example:
        >>> import jax.numpy as jnp, scalewise as sw
        >>> def half(x):
        ...     return x / 2
        >>> verdict(sw.audit(half, "fp16")(jnp.ones(3)))
        'Yes: half computes in fp16 without error.'
    """
    answer, decided = _answer(report), any(x.decided for x in report.findings)
    remedy = more = ""
    if not _is_harmless(report, report.error) or decided:
        fault = _cause(report)
        answer += f"{': ' if _fixed(report) else '; '}{fault}" if fault else ""
        remedy, more = _remedy(report), _rest(report)
    told = [] if decided else [_decided(report, report.decided)]
    told = [text for text in (*told, _infinite(report)) if text not in answer]
    if report.interrupted:
        told.append(f"interrupted after {counted(report.trials, 'trial')}")
    elif report.untried and report.trials:
        told.append(f"no trials were left for {counted(report.untried, 'more finding')}")
    if _fixed(report) and remedy:
        return ". ".join((answer, "; ".join(filter(None, (remedy, more, *told))))) + "."
    return "; ".join(filter(None, (answer, remedy, more, *told))) + "."


def _fixed(report: Summary) -> list[Finding]:
    return [x for x in report.findings if x.fix is not None]


def _decided(report: Summary, found: Sequence[tuple[str, int, int]]) -> str:
    if not found:
        return ""
    path, differ, size = max(found, key=lambda x: x[1] / x[2])
    if path in report.sums:
        return f"{output_name(path)}, a sum, differs by {differ:,} of {size:,}"
    some = "the only element" if size == 1 else f"{differ:,} of {size:,} elements"
    return f"{some} of {output_name(path)} {'differs' if differ == 1 else 'differ'}"


def _infinite(report: Summary) -> str:
    if not report.infinite:
        no_digits = report.reference == "float32" and len(report.noise) == len(report.outputs) > 0
        return "reference='float64' has more digits" if no_digits else ""
    if not report.incomparable:
        infinite = counted(report.infinite, "number")
        return f"{infinite} of the outputs infinite in the reference run too"
    outputs = report.incomparable
    are = f"{outputs[0]} is" if len(outputs) == 1 else f"{len(outputs)} outputs are"
    return f"{are} infinite in the reference run too and can't be compared"


def cause(report: Summary) -> str:
    """Returns the cause of what goes wrong in one sentence, with numbers; "" without one."""
    found = _lost(report) or next((x for x in report.findings if x.fix is not None), None)
    if found is None or _is_harmless(report, report.error):
        return ""
    return f"{named(found)[:1].upper()}{named(found)[1:]}: {found.evidence}."


def no_fix(report: Summary) -> str:
    if any(x.tried for x in (*report.findings, *report.unfixed)):
        return f"None of the fixes tried helps the outputs ({counted(report.trials, 'trial')})."
    if report.trials and _by_chance(report):
        return "No fix was tried, since so few may differ by chance."
    if report.error <= OutputError(0, 1e-6):
        return "No fix was tried, since no operation needs one."
    if not report.trials or not near(report.error, report.error_float32):
        return "No fix was tried."
    if report.error_float32.non_finite:
        left = report.error_float32
        return f"No fix was tried, since {report.wide} for every operation leaves {left} too."
    return f"No fix was tried, since the error comes in with {report.unfixable}."


def against_rounding(error: OutputError, precision: int) -> str:
    """``error 0.05, 102 times one rounding (0.00049)``, or how many numbers are not finite; of
    decisions the share that differs."""
    unit = 2.0**-precision
    if error.non_finite:
        return f"{counted(error.non_finite, 'number')} of the outputs not finite"
    if error.decided:
        return f"{error} of the elements differ" if error.relative else "no element differs"
    if error.relative == 0:
        return "no error"
    if error.relative <= unit:
        return f"error {error.relative:.2g}, within one rounding ({unit:.2g})"
    factor = error.relative / unit
    times = f"{factor:,.0f}" if 10 <= factor < 1e6 else f"{factor:.2g}"
    return f"error {error.relative:.2g}, {times} times one rounding ({unit:.2g})"


def _is_harmless(report: Summary, error: OutputError) -> bool:
    """Returns True if the error is within one rounding, and no change of carried state is lost."""
    small = error.non_finite == 0 and error.relative <= 2.0**-report.precision
    lost = report.updates_lost >= UPDATES_LOST or report.lost_changes
    return small and not lost and not _wrong_gradients(report)


def _wrong_gradients(report: Summary) -> bool:
    """Returns whether the gradients of a training step are unusable, though outputs that are hardly
    changed don't show it."""
    limit = CHANGE_WRONG if report.scaled else unusable(report.precision)
    return float(report.gradients) >= limit


def _answer(report: Summary) -> str:
    error, low = report.error, report.low
    yes = "trains" if _trains(report) else "computes"
    size = against_rounding(error, report.precision)
    if error.decided:
        return _decisions(report)
    if error.non_finite or math.isnan(error.relative):
        size = counted(error.non_finite, "number") + " not finite"
        size = size if error.non_finite else "its error is NaN"
        return f"No: {report.function} breaks in {low} ({size})"
    if report.wrong_changes:
        return f"No: {report.function} does not train in {low} ({report.wrong_changes[0]})"
    refused = f"No: {report.function} loses accuracy in {low}"
    if error.relative >= unusable(report.precision):
        return f"{refused} (error {error.relative:.2g})"
    if report.updates_lost >= UPDATES_LOST:
        lost = f"{report.updates_lost:.0%} of the optimizer's additions change nothing"
        return f"No: {report.function} hardly {yes} in {low} ({lost})"
    if report.lost_changes:
        return (
            f"No: {report.function} loses changes of its state in {low} ({report.lost_changes[0]})"
        )
    if _wrong_gradients(report):
        return f"{refused} (error {report.gradients} of the gradients)"
    if decides_otherwise(report.decided, report.precision, MANY_DECIDED):
        some = _decided(report, report.decided)
        return f"No: {report.function} makes other decisions in {low} ({some})"
    if 0 < len(report.noise) == len(report.outputs):
        none = f"no number that {report.function} returns has a correct digit in {report.reference}"
        made = f"{size}, of the numbers that they are made of"
        return f"Neither yes nor no: {none} (in {low}, {made})"
    if report.incomparable and _is_harmless(report, error):
        if len(report.incomparable) == len(report.outputs):
            none = f"{report.function} returns no finite number, zeros aside"
            return f"Neither yes nor no: {none}"
        return f"Neither yes nor no: {report.function} {yes} in {low} with {size} elsewhere"
    if _is_harmless(report, error):
        other = decides_otherwise(report.decided, report.precision)
        answer = "" if other else "Yes: "  # a count may be one off
        size = f"with {size}" if error.relative else "without error"
        return f"{answer}{report.function} {yes} in {low} {size}"
    limits = dict.fromkeys(report.started_at_zero, CHANGE_WRONG)
    least = unusable(report.precision)
    worse = [(path, x) for path, x in report.outputs if x.relative >= limits.get(path, least)]
    if worse:
        path, worst = max(worse, key=lambda x: x[1])
        return f"{refused} ({output_name(path)} has error {worst.relative:.2g})"
    return f"{report.function} {yes} in {low} with {size}"


def _decisions(report: Summary) -> str:
    """Returns the answer for a function that returns integers and predicates alone."""
    error, low, f = report.error, report.low, report.function
    if 0 < len(report.noise) == len(report.outputs):
        none = f"rounding errors of {report.reference} make the decisions of {f}"
        return f"Neither yes nor no: {none}"
    if error.relative >= unusable(report.precision):
        many = any(size >= MANY_DECIDED for *_, size in report.decided)  # a count may be one off
        answer = "No: " if many else ""
        return f"{answer}{f} makes other decisions in {low} ({_decided(report, report.decided)})"
    if not error.relative:
        return f"Yes: {f} makes the same decisions in {low} as in {report.reference}"
    answer = "Yes: " if _is_harmless(report, error) else ""
    some = _decided(report, report.decided)
    return f"{answer}{f} makes nearly the same decisions in {low} ({some})"


def _trains(report: Summary) -> bool:
    """Returns True for a training step: a gradient, and an optimizer that reads it.

    Another method may read a gradient too, a simulation of forces say. It counts as an optimizer
    if it is optax's, or if the function is called so; for a step of something, if there is a
    product's weight gradient.
    """
    if not {"backward", "optimizer"} <= {e.direction for e in report.equations}:
        return False
    files = {e.file for e in report.equations if e.file and e.direction == "optimizer"}
    if any("optax" in Path(x).parts for x in files) or TRAINING.search(report.function):
        return True
    return bool(STEP.search(report.function)) and any(x.gradient for x in report.equations)


def _cause(report: Summary) -> str:
    wide, fixed, lost = report.error_float32, _fixed(report), _lost(report)
    if lost is not None:
        return named(lost)
    if report.trials and not fixed and _stays(report, report.error):
        if report.arguments and wide.non_finite:
            return f"cause: the arguments, rounded to {report.low} ({report.arguments[0]})"
        same = f"{report.wide} for every operation leaves {wide}"
        if report.wide != report.reference:
            return f"suspected cause: {report.wide} itself, or the arguments ({same})"
        own = " and ".join(filter(None, (report.low, report.complex_dtype)))
        return f"cause: {report.unfixable}, which stay in {own} ({same})"
    suspects = () if is_slight(report.error, 2.0 ** (1 - report.precision)) else report.unfixed
    worst = next(iter(report.findings or suspects), None)
    if worst is None and _by_chance(report):
        return ""
    if worst is None:
        return report.largest_share or "no operation stands out as the cause"
    return named(worst) if worst.fix else f"suspected cause: {named(worst)}"


def _stays(report: Summary, error: OutputError) -> bool:
    """Returns whether an error is as large with every operation in the wide dtype."""
    wide = report.error_float32
    if error.non_finite or wide.non_finite:
        return wide.non_finite >= max(error.non_finite, 1)
    return 0 < error.relative <= 1.5 * wide.relative


def _by_chance(report: Summary) -> bool:
    found = [*report.findings, *report.unfixed]
    few = 0 < report.error.relative < unusable(report.precision)
    return report.error.decided and few and not found and not _stays(report, report.error)


def _remedy(report: Summary) -> str:
    fixed = _fixed(report)
    if not fixed:  # the cause says what can't be fixed
        stays = report.trials and _stays(report, report.error) and _lost(report) is None
        return "" if stays else no_fix(report)[:1].lower() + no_fix(report)[1:].rstrip(".")
    lost = _lost(report)
    first = lost if lost is not None and lost.fix is not None else fixed[0]
    assert first.fix is not None
    others = len({x.order for x in fixed}) - 1  # findings that one fix helps have one order
    more = f" and {counted(others, 'more fix')}" if others else ""
    return f"Change: {first.fix.headline}{more}"


def _lost(report: Summary) -> Finding | None:
    if report.error.non_finite or report.error.relative >= unusable(report.precision):
        return None
    found = [*report.findings, *report.unfixed]
    texts = [x for x in found if any(lost in x.evidence for lost in report.lost_changes)]
    if report.updates_lost >= UPDATES_LOST:
        texts = [x for x in found if x.kind == "swamping" and x.direction == "optimizer"] or texts
    return next(iter(texts), None)


def _rest(report: Summary) -> str:
    """Returns the error that is left with all fixes, of what the answer is about."""
    fixed, after = _fixed(report), report.error_fixed
    if not fixed:
        return ""
    if any(x.decided for x in fixed) and not after.decided:
        return f"then {_decided(report, report.decided_fixed) or 'no element differs'}"
    if _wrong_gradients(report) and report.error.relative < unusable(report.precision):
        text = f"then error {report.gradients_fixed} of the gradients"
    elif after.non_finite:
        text = f"then {counted(after.non_finite, 'number')} not finite"
    else:
        text = (
            f"then {'error ' if after.relative else 'no error'}{str(after) * (after.relative > 0)}"
        )
    if after.non_finite and report.arguments and _stays(report, after):
        return f"{text}, made of the arguments ({report.arguments[0]})"
    left = next((x for x in report.findings if x.fix is None), None)
    small = not after.non_finite and after.relative <= 2.0**-report.precision
    if small or left is None or report.error_float32 >= after:
        return text
    return f"{text}, with {named(left)} left"


def named(finding: Finding) -> str:
    """``overflow in exp at model.py:12``; of a library's line, also which it is."""
    library = f" ({finding.library})" if finding.library else ""
    return f"{finding.kind} in {finding.primitive} at {finding.where}{library}"


def tried(finding: Finding) -> str:
    return "none of the fixes tried helps" if finding.tried else "no fix was tried"
