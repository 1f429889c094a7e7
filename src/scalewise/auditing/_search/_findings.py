"""Findings: what went wrong at one operation of one source line, in numbers and in a sentence."""

from __future__ import annotations

import dataclasses
import math
from typing import Any
from typing import Literal as OneOf

from ..._output import place, place_in_library, place_of
from ...formats import Format, Saturation
from .._run._equation_statistics import EquationStatistics
from .._run._outcome import OutputError
from ._fixes import Fix
from ._groups import Group
from ._kinds import kind_of
from ._literals import Literal, called_at, source_line


@dataclasses.dataclass(frozen=True)
class Finding:
    """One operation of one source line, what went wrong there, and a fix that was tried.

    Attributes:
        kind: a name in ``FINDING_KINDS``.
        file, line, function: where the user wrote it; None, 0, "" if unknown.
        source: the line itself.
        primitive: the operation.
        scope: the name stack of the equation that harms most; of several that overflow, the first.
        direction: "forward", "backward" or "optimizer".
        iteration: the iteration of the surrounding loop at which it first overflowed or became NaN;
            None outside of loops and where neither happened.
        introduced: relative error made here, against exact arithmetic on the same low inputs.
        inherited: relative error against the reference run: made here and carried in.
        evidence: what happened, in numbers.
        fix: a change under which the outputs' error was measured, to be applied to a policy, a
            recipe or a function (:meth:`Fix.apply`); None if no change helped.
        error_before, error_after: the outputs' error (relative, root mean square over them;
            infinite if some are non-finite) without and with the fix, on top of earlier fixes.
        non_finite_before, non_finite_after: how many numbers of the outputs are non-finite.
        decided: whether these errors are of integers and predicates (see :class:`OutputError`).
        equations: the indices of its equations.
        tried: whether fixes were tried.
        order: the position of its fix in the order of application, from 1; 0 without one.
        callers: ``path:line`` of each of the user's lines that call a library's ``file``.
        part: the direction; of a product in the backward pass, also which gradient it computes:
            "backward, weight gradient" or "backward, input gradient".
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
    fix: Fix | None = None
    error_before: float = math.nan
    error_after: float = math.nan
    non_finite_before: int = 0
    non_finite_after: int = 0
    decided: bool = False
    equations: tuple[int, ...] = ()
    tried: bool = False
    order: int = 0
    callers: tuple[str, ...] = ()
    part: str = ""

    def outputs_error(self, which: OneOf["before", "after"]) -> OutputError:
        relative, non_finite = (getattr(self, f"{x}_{which}") for x in ("error", "non_finite"))
        return OutputError(non_finite, relative, decided=self.decided)

    @property
    def where(self) -> str:
        """``model.py:12``: the user's line, which calls that of ``library`` unless this is ""."""
        return place_of(self.callers[0]) if self.callers else place(self.file, self.line)

    @property
    def library(self) -> str:
        """``optax/_src/update.py:42``; "" for a line of the user's own."""
        return place_in_library(self.file, self.line) if self.file and self.callers else ""

    @property
    def called(self) -> str:
        """``optax/_src/update.py:42, called at model.py:3, model.py:9 and 2 more``; "" for a line
        of the user's own."""
        return f"{self.library}, {called_at(self.callers)}" if self.callers else ""


def finding(group: Group, fmt: Format, saturate: Saturation, refuted: str = "") -> Finding:
    """Returns a group's finding, of another kind than the one that a run has refuted."""
    first = group.first
    kind = kind_of(group, fmt, saturate, refuted)
    iterations = [e["first"] for e in group.equations if e.looped and e["first"] >= 0]
    return Finding(
        kind=kind.name,
        **written_at(first),
        scope=group.worst_equation(fmt).scope,
        direction=first.direction,
        iteration=int(min(iterations)) if iterations else None,
        introduced=group.worst("introduced"),
        inherited=group.worst("inherited"),
        evidence=kind.evidence(group, fmt),
        equations=group.indices,
        callers=tuple(dict.fromkeys(e.caller for e in group.equations if e.caller)),
        part=first.part,
    )


def written_at(equation: EquationStatistics) -> dict[str, Any]:
    return {
        "file": equation.file,
        "line": equation.line,
        "function": equation.function,
        "source": source_line(equation.file, equation.line),
        "primitive": equation.operation or equation.primitive,
    }


def constant_finding(literal: Literal) -> Finding:
    return Finding(
        kind=literal.kind,
        file=literal.file,
        line=literal.line,
        function=literal.function,
        source=literal.source,
        primitive=literal.primitive,
        scope=literal.scope,
        direction=literal.direction,
        iteration=None,
        introduced=literal.error,
        inherited=literal.error,
        evidence=f"the constant {literal.written} {literal.what}",
        callers=literal.callers,
        part=literal.direction,
    )
