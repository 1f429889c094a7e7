"""A report as one self-contained HTML file."""

from __future__ import annotations

import dataclasses
import linecache
import math
from collections.abc import Sequence
from typing import Any

from ..._output import page_environment
from .._run._equation_statistics import Equations, EquationStatistics
from .._run._session import OutputError
from .._search._findings import Finding
from .._search._groups import Group
from .._search._kinds import FINDING_KINDS
from ._edits import edits
from ._panels import legend, panels
from ._summary import Summary
from ._terminal import alone, error, errors, fixed_with, function, scales
from ._trace import before_first_event, by_scope
from ._verdict import cause, no_fix, tried, verdict

AROUND = 2  # lines shown before and after each line that computes something
MOST = 600  # lines shown of a file


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of source."""

    number: int  # number, text: its line number and its text
    text: str
    # forward, backward: the lowest SQNR in dB of what it computes in each pass (the optimizer
    # counts as forward); None if it computes nothing there
    forward: float | None
    backward: float | None
    marks: tuple[str, ...]  # what happened, a word each, the kinds of findings first
    finding: int  # the number of its first finding, from 1; 0 without one
    gap: bool  # whether lines before it are left out


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """Some lines of a file."""

    file: str  # its path
    # those that compute something, call a library that does, or are near one of them
    lines: list[Line]
    library: bool  # whether it belongs to an installed package


def sources(equations: Equations, findings: Sequence[Finding]) -> list[SourceFile]:
    """Returns the files with findings, and those that call libraries with findings; the user's own
    files first. Files that can't be read are left out.

    Without a file of the user's own, it adds the one with most operations.
    """
    libraries = {e.file for e in equations if e.caller}
    called = [caller.rpartition(":")[0] for f in findings for caller in f.callers]
    found = list(dict.fromkeys([f.file for f in findings if f.file] + called))
    if not set(found) - libraries:
        files = [e.file for e in equations if e.file and e.file not in libraries]
        found += [max(files, key=files.count)] if files else []
    found.sort(key=lambda file: file in libraries)
    result = [SourceFile(x, _lines(x, equations, findings), x in libraries) for x in found]
    return [x for x in result if x.lines]


def _lines(file: str, equations: Equations, findings: Sequence[Finding]) -> list[Line]:
    source = linecache.getlines(file)
    here: dict[int, list[EquationStatistics]] = {}
    for equation in equations:
        if equation.file == file and 0 < equation.line <= len(source):
            here.setdefault(equation.line, []).append(equation)
    at: dict[int, list[tuple[int, str]]] = {}  # the number of each finding of a line, and its mark
    for i, finding in enumerate(findings, 1):
        if finding.file == file:
            at.setdefault(finding.line, []).append((i, finding.kind))
        for caller in finding.callers:
            path, _, line = caller.rpartition(":")
            if path == file:
                at.setdefault(int(line), []).append((i, f"{finding.kind} in {finding.where}"))
    near = {n + d for n in (*here, *at) for d in range(-AROUND, AROUND + 1)}
    shown = sorted(n for n in near if 0 < n <= len(source))[:MOST]
    lines, last = [], 0
    for n in shown:
        lines.append(
            Line(
                number=n,
                text=source[n - 1].rstrip("\n"),
                forward=_worst([e for e in here.get(n, ()) if e.direction != "backward"]),
                backward=_worst([e for e in here.get(n, ()) if e.direction == "backward"]),
                marks=_marks(here.get(n, ()), [mark for _, mark in at.get(n, ())]),
                finding=at[n][0][0] if n in at else 0,
                gap=n != last + 1 and last > 0,
            )
        )
        last = n
    return lines


def _worst(equations: Equations) -> float | None:
    return min((e.sqnr for e in equations), default=None)


def _marks(equations: Equations, findings: Sequence[str]) -> tuple[str, ...]:
    here = Group(tuple(equations))
    events = (("nan", "nan"), ("overflow", "overflowed"))
    shares = ((name, math.floor(100 * here.share(name))) for name in ("flushed", "swamped"))
    marks = [*findings, *(mark for mark, name in events if here.total(name))]
    return tuple(dict.fromkeys([*marks, *(f"{n}% {name}" for name, n in shares if n)]))


def page(report: Summary) -> str:
    environment = page_environment("scalewise.auditing._report")
    environment.filters |= {
        "error": lambda f, which: error(
            getattr(f, f"error_{which}"), getattr(f, f"non_finite_{which}")
        ),
        "colour": _colour,
        "alone": alone,
        "tried": tried,
        "function": lambda f: function(report, f),
        "fixed_with": lambda f: fixed_with(report, f),
        "errors": lambda f: errors(report, f),
        "severe": lambda f: "severe" if FINDING_KINDS[f.kind].severe else "",
        "edits": lambda f: "\n\n".join(map(str, edits(report, f))),
    }
    shown = sources(report.equations, report.findings)
    return environment.rendered(
        "report.html.j2",
        report=report,
        verdict=verdict(report),
        fixed=any(f.fix for f in report.findings),
        panels=panels(report),
        legend=legend(report),
        groups=by_scope(report.equations),
        cause=cause(report),
        trace=before_first_event(report.equations),
        scales=scales(report),
        no_fix=no_fix(report),
        sources=shown,
        anchors={
            (source.file, line.number): f"line-{i}-{line.number}"
            for i, source in enumerate(shown, 1)
            for line in source.lines
        },
    )


def _colour(what: Any) -> str:
    """Returns the class of an error, or of a finding's error with its fix: green if finite."""
    count = what.non_finite if isinstance(what, OutputError) else what.non_finite_after
    return "bad" if count else "fix"
