"""Findings: what went wrong at one operation of one source line, in numbers and in a sentence."""

from __future__ import annotations

import dataclasses
import linecache
import math
from collections.abc import Sequence
from pathlib import Path

from ...formats import Format
from .._run._rows import Row

CALLERS = 3  # shown of those who call a library's line
KINDS = ("nan", "overflow", "saturation", "underflow", "swamping", "cancellation", "precision")
FLUSHED, SWAMPED = 1e-3, 1e-2  # shares from which underflow and swamping give a finding its name


@dataclasses.dataclass(frozen=True)
class Finding:
    """One operation of one source line, what it did, and a change that was tried.

    Attributes:
        kind: one of ``KINDS``.
        file, line, function: where the user wrote it; None, 0, "" if unknown.
        source: the line itself.
        primitive: the operation.
        scope: its name stack, of the first of the equations concerned.
        direction: "forward", "backward" or "optimizer".
        iteration: of the loop around it, at which it first overflowed or became NaN; None outside
            of loops and where neither happened.
        introduced: relative error made here, against exact arithmetic on the same low inputs.
        inherited: relative error against the shadow, with what came in.
        evidence: what happened, in numbers.
        fix: a change under which the outputs' error was measured; None if no change helped.
        error_before, error_after: of the outputs (relative, root mean square over them; infinite if
            some aren't finite), without it and with it, the fixes of earlier findings applied.
        broken_before, broken_after: numbers of the outputs that aren't finite.
        error_alone, broken_alone: of a fix that is one of two that only help together: with this
            one alone; NaN and 0 of others.
        rows: of the equations concerned.
        tried: whether changes were tried for it.
        order: at which place its fix was applied, from 1; 0 without one.
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
    broken_before: int = 0
    broken_after: int = 0
    error_alone: float = math.nan
    broken_alone: int = 0
    rows: tuple[int, ...] = ()
    tried: bool = False
    order: int = 0
    callers: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """``file.py:12``."""
        return f"{Path(self.file).name}:{self.line}" if self.file else "unknown line"

    @property
    def called(self) -> str:
        """``called at model.py:3, model.py:9 and 2 more``; "" if the user wrote it himself."""
        shown = ", ".join(Path(c).name for c in self.callers[:CALLERS])
        more = len(self.callers) - CALLERS
        return f"called at {shown}" + (f" and {more} more" if more > 0 else "") if shown else ""


@dataclasses.dataclass(frozen=True)
class Group:
    """The equations of one source line, primitive and direction."""

    rows: tuple[Row, ...]

    @property
    def first(self) -> Row:
        return self.rows[0]

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(row.index for row in self.rows)

    def total(self, name: str) -> float:
        return sum(row[name] for row in self.rows)

    def share(self, name: str) -> float:
        whole = self.total("added" if name in ("swamped", "cancelled") else "elements")
        return self.total(name) / whole if whole else 0.0

    def worst(self, name: str) -> float:
        return max(getattr(row, name) for row in self.rows)

    @property
    def amplifies(self) -> bool:
        """Whether additions here cancelled, and what they gave is mostly error."""
        return any(map(_amplifies, self.rows))

    def kind(self, fmt: Format, saturate: bool | str) -> str:
        """The first of ``KINDS`` that there is evidence of."""
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
        """How promising it is to look here first; what it did to the outputs is measured.

        Terms lost in one addition count by the error that they make, in a loop each one.
        """
        score = 0.0
        for row in self.rows:
            if row["nan"] or row["overflowed"]:
                return 1e6 - row.index  # the earliest is the cause of the others, more often
            heavy = 1.0 if row.looped else min(16 * row.introduced / float(fmt.eps), 1.0)
            made = min(row.introduced, 10.0) + row.share("flushed") + heavy * row.share("swamped")
            score += made + (min(row.inherited, 10.0) if _amplifies(row) else 0.0)
        return score


def _amplifies(row: Row) -> bool:
    error = row.inherited
    return row["cancelled"] > 0 and error > 30 * max(row.introduced, 1e-12) and error > 0.01


def groups(rows: Sequence[Row], fmt: Format) -> list[Group]:
    """Rows by source line, primitive and direction, the most promising first."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        key = (row.file, row.line, row.primitive, row.direction)
        if row.file is None:
            key = (row.index,)
        found.setdefault(key, []).append(row)
    result = [Group(tuple(rows)) for rows in found.values()]
    weighed = [(g.weight(fmt), g) for g in result]
    return [g for weight, g in sorted(weighed, key=lambda x: -x[0]) if weight > 0]


def finding(group: Group, fmt: Format, saturate: bool | str) -> Finding:
    """What a group did, without a fix yet."""
    row = group.first
    kind = group.kind(fmt, saturate)
    turns = [r["first"] for r in group.rows if r.looped and r["first"] >= 0]
    return Finding(
        kind=kind,
        file=row.file,
        line=row.line,
        function=row.function,
        source=source_line(row.file, row.line),
        primitive=row.primitive,
        scope=row.scope,
        direction=row.direction,
        iteration=int(min(turns)) if turns else None,
        introduced=group.worst("introduced"),
        inherited=group.worst("inherited"),
        evidence=evidence(group, kind, fmt),
        rows=group.indices,
        callers=tuple(dict.fromkeys(r.caller for r in group.rows if r.caller)),
    )


def source_line(file: str | None, line: int) -> str:
    return linecache.getline(file, line).strip() if file else ""


def evidence(group: Group, kind: str, fmt: Format) -> str:
    """What happened, in one phrase with numbers."""
    elements = int(group.total("elements"))
    amax = max(row["amax"] for row in group.rows)
    largest = float(fmt.max)
    match kind:
        case "nan":
            return f"{int(group.total('nan')):,} of {elements:,} are NaN, of inputs without one"
        case "overflow" | "saturation":
            count = int(group.total("overflowed"))
            if amax <= largest:
                return f"{count:,} of {elements:,} infinite, of finite inputs: a division by 0"
            need = math.log2(amax) if amax > 0 else 0.0
            return f"{count:,} of {elements:,} > {largest:.5g}; need 2^{need:.1f}"
        case "underflow":
            smallest = min((1 / r["shadow_min_inverse"] for r in group.rows
                            if r["shadow_min_inverse"]), default=0.0)  # fmt: skip
            down = f"; down to 2^{math.log2(smallest):.1f}" if smallest else ""
            return f"{int(group.total('flushed')):,} of {elements:,} flushed to zero{down}"
        case "swamping":
            drift = max((row.drift for row in group.rows), key=abs)
            return f"{group.share('swamped'):.0%} of additions change nothing; bias {drift:+.2f}"
        case "cancellation":
            bits = max(row["bits"] for row in group.rows)
            error = group.worst("inherited")
            return f"{bits:.0f} of {fmt.precision} bits cancel; error {error:.2g} of what is left"
    made = group.worst("introduced")
    unit = float(fmt.eps) / 2
    return f"error {made:.2g} made here, {made / unit:.2g} times half a unit"
