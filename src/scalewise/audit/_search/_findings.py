"""Findings: what went wrong at one operation of one source line, in numbers and in a sentence."""

from __future__ import annotations

import dataclasses
import linecache
import math
from pathlib import Path

from ...formats import Format
from .._deprecated import renamed
from .._run._equation_statistics import Equations, EquationStatistics

CALLERS_SHOWN = 3
KINDS = ("nan", "overflow", "saturation", "underflow", "swamping", "cancellation", "precision")
FLUSHED, SWAMPED = 1e-3, 1e-2  # shares from which a finding is an underflow, or a swamping


@dataclasses.dataclass(frozen=True)
class Finding:
    """One operation of one source line, what went wrong there, and a fix that was tried.

    Attributes:
        kind: one of ``KINDS``.
        file, line, function: where the user wrote it; None, 0, "" if unknown.
        source: the line itself.
        primitive: the operation.
        scope: the name stack of the first of its equations.
        direction: "forward", "backward" or "optimizer".
        iteration: the iteration of the surrounding loop at which it first overflowed or became NaN;
            None outside of loops and where neither happened.
        introduced: relative error made here, against exact arithmetic on the same low inputs.
        inherited: relative error against the reference run: made here and carried in.
        evidence: what happened, in numbers.
        fix: a change under which the outputs' error was measured; None if no change helped.
        error_before, error_after: the outputs' error (relative, root mean square over them;
            infinite if some are non-finite) without and with the fix, on top of earlier fixes.
        non_finite_before, non_finite_after: how many numbers of the outputs are non-finite.
        error_alone, non_finite_alone: for one of two fixes that only help together, the same with
            this fix alone; NaN and 0 otherwise.
        equations: the indices of its equations.
        tried: whether fixes were tried.
        order: the position of its fix in the order of application, from 1; 0 without one.
        callers: ``path:line`` of each of the user's lines that call a library's ``file``.
    """

    kind: str
    file: str | None
    line: int
    function: str
    source: str
    primitive: str
    scope: str
    direction: str
    iteration: int | None
    introduced: float
    inherited: float
    evidence: str
    fix: str | None = None
    error_before: float = math.nan
    error_after: float = math.nan
    non_finite_before: int = 0
    non_finite_after: int = 0
    error_alone: float = math.nan
    non_finite_alone: int = 0
    equations: tuple[int, ...] = ()
    tried: bool = False
    order: int = 0
    callers: tuple[str, ...] = ()

    rows, broken_before = renamed("rows"), renamed("broken_before")
    broken_after, broken_alone = renamed("broken_after"), renamed("broken_alone")

    @property
    def where(self) -> str:
        """``file.py:12``."""
        return f"{Path(self.file).name}:{self.line}" if self.file else "unknown line"

    @property
    def called(self) -> str:
        """``called at model.py:3, model.py:9 and 2 more``; "" for a line of the user's own."""
        shown = ", ".join(Path(c).name for c in self.callers[:CALLERS_SHOWN])
        more = len(self.callers) - CALLERS_SHOWN
        return f"called at {shown}" + (f" and {more} more" if more > 0 else "") if shown else ""


@dataclasses.dataclass(frozen=True)
class Group:
    """The equations with the same source line, primitive and direction."""

    equations: tuple[EquationStatistics, ...]

    @property
    def first(self) -> EquationStatistics:
        return self.equations[0]

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(e.index for e in self.equations)

    def total(self, name: str) -> float:
        return sum(e[name] for e in self.equations)

    def share(self, name: str) -> float:
        size = self.total("added" if name in ("swamped", "cancelled") else "elements")
        return self.total(name) / size if size else 0.0

    def worst(self, name: str) -> float:
        return max(getattr(e, name) for e in self.equations)

    @property
    def amplifies(self) -> bool:
        """Whether additions here cancelled, so that most of a result is error carried in."""
        return any(map(_amplifies, self.equations))

    def kind(self, fmt: Format, saturate: bool | str) -> str:
        """Returns the first of ``KINDS`` for which there is evidence."""
        if self.total("nan"):
            return "nan"
        if self.total("overflowed"):
            return "saturation" if saturate is not False else "overflow"
        if self.share("flushed") >= FLUSHED:
            return "underflow"
        if self.share("swamped") >= SWAMPED:
            return "swamping"
        return "cancellation" if self.amplifies else "precision"

    def weight(self, fmt: Format) -> float:
        """Returns a guess of how much this group harms the outputs; the search starts at the
        largest.

        Additions that change nothing count by the error they make; inside a loop each counts fully.
        """
        score = 0.0
        for e in self.equations:
            if e["nan"] or e["overflowed"]:
                return 1e6 - e.index  # the earliest usually causes the others
            lost = 1.0 if e.looped else min(16 * e.introduced / float(fmt.eps), 1.0)
            made = min(e.introduced, 10.0) + e.share("flushed") + lost * e.share("swamped")
            score += made + (min(e.inherited, 10.0) if _amplifies(e) else 0.0)
        return score


def _amplifies(equation: EquationStatistics) -> bool:
    error, made = equation.inherited, max(equation.introduced, 1e-12)
    return equation["cancelled"] > 0 and error > 30 * made and error > 0.01


def groups(equations: Equations, fmt: Format) -> list[Group]:
    """Returns equations grouped by source line, primitive and direction, heaviest first."""
    found: dict[tuple, list[EquationStatistics]] = {}
    for e in equations:
        key = (e.index,) if e.file is None else (e.file, e.line, e.primitive, e.direction)
        found.setdefault(key, []).append(e)
    result = [Group(tuple(members)) for members in found.values()]
    weighed = [(g.weight(fmt), g) for g in result]
    return [g for weight, g in sorted(weighed, key=lambda x: -x[0]) if weight > 0]


def finding(group: Group, fmt: Format, saturate: bool | str) -> Finding:
    """Returns a group's finding, without a fix."""
    first = group.first
    kind = group.kind(fmt, saturate)
    iterations = [e["first"] for e in group.equations if e.looped and e["first"] >= 0]
    return Finding(
        kind=kind,
        file=first.file,
        line=first.line,
        function=first.function,
        source=source_line(first.file, first.line),
        primitive=first.primitive,
        scope=first.scope,
        direction=first.direction,
        iteration=int(min(iterations)) if iterations else None,
        introduced=group.worst("introduced"),
        inherited=group.worst("inherited"),
        evidence=evidence(group, kind, fmt),
        equations=group.indices,
        callers=tuple(dict.fromkeys(e.caller for e in group.equations if e.caller)),
    )


def source_line(file: str | None, line: int) -> str:
    return linecache.getline(file, line).strip() if file else ""


def evidence(group: Group, kind: str, fmt: Format) -> str:
    """Returns what happened, in one phrase with numbers."""
    elements = int(group.total("elements"))
    amax = max(e["amax"] for e in group.equations)
    largest = float(fmt.max)
    match kind:
        case "nan":
            count = int(group.total("nan"))
            return f"{count:,} of {elements:,} numbers are NaN, though no input is"
        case "overflow" | "saturation":
            count = f"{int(group.total('overflowed')):,} of {elements:,} numbers"
            if amax <= largest:
                return f"{count} are infinite, though no input is: a division by 0"
            return f"{exceeds(amax, fmt)} in {count}"
        case "underflow":
            smallest = min((1 / e["reference_min_inverse"] for e in group.equations
                            if e["reference_min_inverse"]), default=0.0)  # fmt: skip
            down = f" (smallest value 2^{math.log2(smallest):.1f})" if smallest else ""
            return f"{int(group.total('flushed')):,} of {elements:,} numbers flushed to zero{down}"
        case "swamping":
            drift = max((e.drift for e in group.equations), key=abs)
            share = f"{group.share('swamped'):.0%}"
            return f"{share} of additions change nothing; bias of the errors {drift:+.2f}"
        case "cancellation":
            bits = max(e["bits"] for e in group.equations)
            error = group.worst("inherited")
            return f"{bits:.0f} of {fmt.precision} bits cancel; relative error left {error:.2g}"
    made = group.worst("introduced")
    unit = float(fmt.eps) / 2
    return f"error made here {made:.2g}, {made / unit:.2g} times half a unit in the last place"


def exceeds(amax: float, fmt: Format) -> str:
    """``exceeds FP16's maximum by 2^3.1 (largest value 2^19.1)``."""
    value, ratio = math.log2(amax), math.log2(amax / float(fmt.max))
    return f"exceeds {fmt.name.upper()}'s maximum by 2^{ratio:.1f} (largest value 2^{value:.1f})"
