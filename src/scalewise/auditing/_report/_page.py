"""A report as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..._output import page_environment
from .._run._session import OutputError
from .._search._findings import Finding
from .._search._kinds import KINDS
from ._edits import edits
from ._panels import legend, panels
from ._source import SourceFile, sources
from ._summary import Summary
from ._terminal import alone, error, errors, fixed_with, function, scales
from ._trace import before_first_event, by_scope
from ._verdict import cause, no_fix, tried, verdict


def page(report: Summary) -> str:
    environment = page_environment("scalewise.auditing._report")
    environment.filters["error"] = _error
    environment.filters["colour"] = _colour
    environment.filters["alone"] = alone
    environment.filters["tried"] = tried
    environment.filters["function"] = lambda f: function(report, f)
    environment.filters["fixed_with"] = lambda f: fixed_with(report, f)
    environment.filters["errors"] = lambda f: errors(report, f)
    environment.filters["severe"] = lambda f: "severe" if KINDS[f.kind].severe else ""
    environment.filters["edits"] = lambda f: "\n\n".join(map(str, edits(report, f)))
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
        anchors=_anchors(shown),
    )


def _error(finding: Finding, which: str) -> str:
    return error(getattr(finding, f"error_{which}"), getattr(finding, f"non_finite_{which}"))


def _colour(what: Any) -> str:
    """Returns the class of an error, or of a finding's error with its fix: green if finite."""
    count = what.non_finite if isinstance(what, OutputError) else what.non_finite_after
    return "bad" if count else "fix"


def _anchors(files: Sequence[SourceFile]) -> dict[tuple[str, int], str]:
    return {
        (source.file, line.number): f"line-{i}-{line.number}"
        for i, source in enumerate(files, 1)
        for line in source.lines
    }
