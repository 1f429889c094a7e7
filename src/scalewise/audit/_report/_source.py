"""The user's source with what happened on each line beside it."""

from __future__ import annotations

import dataclasses
import linecache
import math
from collections.abc import Sequence

from .._run._rows import Row
from .._search._findings import Finding

AROUND = 2  # lines shown before and after one on which something is computed
MOST = 600  # lines of a file; the first of them


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of source.

    Attributes:
        number, text: of it.
        forward, backward: the lowest signal to noise against the shadow of what it computes there,
            in dB, the optimizer counting as forward; None if it computes nothing there.
        marks: what happened, a word each, the kinds of findings first.
        finding: the number of the first finding on it, from 1; 0 without one.
        gap: whether lines were left out before it.
    """

    number: int
    text: str
    forward: float | None
    backward: float | None
    marks: tuple[str, ...]
    finding: int
    gap: bool


def sources(rows: Sequence[Row], findings: Sequence[Finding]) -> list[tuple[str, list[Line]]]:
    """Files and their lines, those with findings first; files that can't be read are left out.

    Of a file without a finding nothing is shown, unless none has one: then the one with most
    operations.
    """
    found = list(dict.fromkeys(f.file for f in findings if f.file))
    if not found:
        files = [r.file for r in rows if r.file]
        found = [max(files, key=files.count)] if files else []
    result = [(file, _lines(file, rows, findings)) for file in found]
    return [(file, lines) for file, lines in result if lines]


def _lines(file: str, rows: Sequence[Row], findings: Sequence[Finding]) -> list[Line]:
    source = linecache.getlines(file)
    here: dict[int, list[Row]] = {}
    for row in rows:
        if row.file == file and 0 < row.line <= len(source):
            here.setdefault(row.line, []).append(row)
    near = {n + d for n in here for d in range(-AROUND, AROUND + 1)}
    shown = sorted(n for n in near if 0 < n <= len(source))[:MOST]
    lines, last = [], 0
    for n in shown:
        at = [(i, f) for i, f in enumerate(findings, 1) if f.file == file and f.line == n]
        lines.append(
            Line(
                number=n,
                text=source[n - 1].rstrip("\n"),
                forward=_worst([r for r in here.get(n, ()) if r.direction != "backward"]),
                backward=_worst([r for r in here.get(n, ()) if r.direction == "backward"]),
                marks=_marks(here.get(n, ()), [f for _, f in at]),
                finding=at[0][0] if at else 0,
                gap=n != last + 1 and last > 0,
            )
        )
        last = n
    return lines


def _worst(rows: Sequence[Row]) -> float | None:
    return min((r.sqnr for r in rows), default=None)


def _marks(rows: Sequence[Row], findings: Sequence[Finding]) -> tuple[str, ...]:
    marks = [f.kind for f in findings]
    if any(r["nan"] for r in rows):
        marks.append("nan")
    if any(r["overflowed"] for r in rows):
        marks.append("overflow")
    elements = sum(r["elements"] for r in rows)
    flushed = sum(r["flushed"] for r in rows)
    if flushed and flushed >= 0.01 * elements:
        marks.append(f"{math.floor(100 * flushed / elements)}% flushed")
    added = sum(r["added"] for r in rows)
    swamped = sum(r["swamped"] for r in rows)
    if swamped and swamped >= 0.01 * added:
        marks.append(f"{math.floor(100 * swamped / added)}% swamped")
    return tuple(dict.fromkeys(marks))
