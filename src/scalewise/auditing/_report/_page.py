"""A report as one self-contained HTML file."""

from __future__ import annotations

import dataclasses
import linecache
import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from ..._output import page_environment
from .._run._equation_statistics import Equations, EquationStatistics
from .._run._outcome import OutputError
from .._search._findings import Finding
from .._search._groups import Group
from .._search._kinds import FINDING_KINDS
from .._tape._statistics import BINS, LOWEST
from ._edits import Edit, edits
from ._summary import Summary
from ._terminal import errors, fixed_with, function, scales
from ._trace import before_first_event, by_scope
from ._verdict import cause, no_fix, tried

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


def page(report: Summary, said: str, kept: Sequence[Edit]) -> str:
    environment = page_environment("scalewise.auditing._report")
    environment.filters |= {
        "error": lambda f, which: f.outputs_error(which),
        "colour": _colour,
        "tried": tried,
        "function": lambda f: function(report, f),
        "fixed_with": lambda f: fixed_with(report, f),
        "errors": lambda f: errors(report, f),
        "severe": lambda f: "severe" if FINDING_KINDS[f.kind].severe else "",
        "edits": lambda f: "\n\n".join(str(x) for x in edits(report, f) if x in kept),
    }
    shown = sources(report.equations, report.findings)
    return environment.rendered(
        "report.html.j2",
        report=report,
        verdict=said,
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


WIDTH, HEIGHT, LEFT, BOTTOM = 640, 120, 42, 18
PLOT = HEIGHT - BOTTOM
ARGUMENTS = 8  # with a histogram each: weights, moments, data
TICKS = 10  # at most, on an axis
NARROWEST = 16  # binades of a histogram's axis
LOWEST_ERROR = -12  # the smallest error drawn is 1e-12

Axis = tuple[int, int]  # the lowest exponent, and the first one beyond the highest


def panels(report: Summary) -> list[tuple[str, Markup]]:
    """Returns titles and SVG charts; the charts contain numbers only, and need no escaping."""
    counts = [(f"argument {name}", x) for name, x in report.ranges[:ARGUMENTS] if any(x)]
    for title, equations in _by_direction(report.equations):
        sums = tuple(sum(e.histogram[i] for e in equations) for i in range(BINS))
        if any(sums):
            counts.append((title, sums))
    axis = axis_of([x for _, x in counts])
    found = [(title, histogram(x, report, axis)) for title, x in counts]
    title = "relative error of each operation in program order (made here and carried in)"
    return [*found, (title, growth(report.equations, 2.0**-report.precision))]


def legend(report: Summary) -> list[tuple[str, str]]:
    beyond = "saturation" if report.low.endswith("saturating") else "overflow"
    smallest, normal = _power(report.smallest / 2), _power(report.smallest_normal)
    return [
        ("bar", "numbers, error"),
        ("flushed", f"flushed to zero (up to {smallest})"),
        ("subnormal", f"subnormal (below {normal})"),
        ("normal", "normal"),
        ("over", f"{beyond} (beyond {_power(report.largest)}), NaN"),
        ("unit", "one rounding"),
    ]


def _power(x: float) -> str:
    return f"2^{math.log2(x):.2f}".rstrip("0").rstrip(".")


def _by_direction(equations: Equations) -> list[tuple[str, list[EquationStatistics]]]:
    names = {
        "forward": "activations (results of the forward pass)",
        "backward": "gradients (results of the backward pass)",
        "optimizer": "updates (results of the optimizer)",
    }
    return [(title, [e for e in equations if e.direction == key]) for key, title in names.items()]


def axis_of(histograms: Sequence[Sequence[int]]) -> Axis:
    used = [i for counts in histograms for i, n in enumerate(counts) if n] or [-LOWEST]
    low, high = min(used) + LOWEST - 1, max(used) + LOWEST + 2
    missing = max(NARROWEST - (high - low), 0)
    return low - missing // 2, high + missing - missing // 2


def histogram(counts: Sequence[int], report: Summary, axis: Axis) -> Markup:
    """Returns bars over log2 |x|; flushed, subnormal, normal and overflowing ranges are shaded."""
    low, high = axis
    bar, top = WIDTH / (high - low), max(counts)

    def x(value: float) -> float:
        exponent = math.log2(value) - low if value > 0 else 0.0
        return min(max(exponent * bar, 0.0), WIDTH)

    edges = [0.0, x(report.smallest / 2), x(report.smallest_normal), x(report.largest), WIDTH]
    classes = ("flushed", "subnormal", "normal", "over")
    parts = [
        f'<rect class="{c}" x="{a:.1f}" y="0" width="{b - a:.1f}" height="{PLOT}"/>'
        for c, a, b in zip(classes, edges, edges[1:], strict=False)
        if b > a
    ]
    for i, n in enumerate(counts):
        if n:
            h = max((PLOT - 4) * math.log1p(n) / math.log1p(top), 1)
            parts.append(
                f'<rect class="bar" x="{(i + LOWEST - low) * bar:.1f}" y="{PLOT - h:.1f}" '
                f'width="{bar * 0.85:.1f}" height="{h:.1f}">'
                f"<title>2^{i + LOWEST}: {n}</title></rect>"
            )
    step = _step(high - low)
    for exponent in range(-(-low // step) * step, high, step):
        at = (exponent - low) * bar
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - 4}">2^{exponent}</text>')
    return _svg(parts)


def growth(equations: Equations, unit: float) -> Markup:
    """A dashed line is one rounding; red lines are operations whose results overflow or are NaN."""
    errors = [e.inherited if e.sqnr > -math.inf else math.inf for e in equations]
    drawn = [x for x in errors if 0 < x < math.inf]
    exponents = [max(math.log10(x), LOWEST_ERROR) for x in (*drawn, unit)]
    low, high = math.floor(min(exponents)), math.ceil(max(exponents))
    high = max(high, low + 1)

    def y(error: float) -> float:
        exponent = math.log10(error) if error > 0 else low
        return PLOT * (1 - min(max((exponent - low) / (high - low), 0.0), 1.0))

    def x(i: int) -> float:
        return LEFT + (WIDTH - LEFT) * i / max(len(equations) - 1, 1)

    parts = []
    for exponent in range(low, high + 1, _step(high - low)):
        at = y(10.0**exponent)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="0" y="{max(at + 4, 9):.1f}">1e{exponent}</text>')
    for i, equation in enumerate(equations):
        if equation["overflowed"] or equation["nan"]:
            at = f'x1="{x(i):.1f}" x2="{x(i):.1f}"'
            parts.append(f'<line class="event" {at} y1="0" y2="{PLOT}"/>')
    line = f'x1="{LEFT}" x2="{WIDTH}" y1="{y(unit):.1f}" y2="{y(unit):.1f}"'
    parts.append(f'<line class="unit" {line}/>')
    points = " ".join(f"{x(i):.1f},{y(e):.1f}" for i, e in enumerate(errors))
    parts.append(f'<polyline points="{points}"/>')
    for i in range(0, len(equations), _step(len(equations))):
        parts.append(f'<text x="{min(x(i), WIDTH - 30):.1f}" y="{HEIGHT - 4}">{i + 1}</text>')
    return _svg(parts)


def _step(size: int) -> int:
    """Returns 1, 2, 5, 10, 20, ...: the distance of at most TICKS ticks."""
    return next(m * 10**k for k in range(12) for m in (1, 2, 5) if m * 10**k * TICKS >= size)


def _svg(parts: Sequence[str]) -> Markup:
    return Markup(f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>')
