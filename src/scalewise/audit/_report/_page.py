"""A report as one self-contained HTML file."""

from __future__ import annotations

from ..._output import page_environment
from .._search._kinds import KINDS
from ._panels import panels
from ._source import sources
from ._summary import Summary
from ._table import by_scope
from ._terminal import alone, error, scales
from ._verdict import no_fix, verdict


def page(report: Summary) -> str:
    """Returns the HTML; every name in it is escaped."""
    environment = page_environment("scalewise.audit._report")
    environment.filters["error"] = lambda f, which: error(
        getattr(f, f"error_{which}"), getattr(f, f"non_finite_{which}")
    )
    environment.filters["alone"] = alone
    environment.filters["severe"] = lambda f: "severe" if KINDS[f.kind].severe else ""
    return environment.rendered(
        "report.html.j2",
        report=report,
        panels=panels(report),
        groups=by_scope(report.equations),
        scales=scales(report),
        no_fix=no_fix(report),
        verdict=verdict(report),
        sources=sources(report.equations, report.findings),
    )
