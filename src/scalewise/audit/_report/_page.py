"""A report as one HTML file that needs nothing else."""

from __future__ import annotations

from ..._output import page_environment
from ._panels import panels
from ._source import sources
from ._summary import Summary
from ._table import by_scope
from ._terminal import alone, error, scales


def page(report: Summary) -> str:
    """The page; every name in it is escaped."""
    environment = page_environment("scalewise.audit._report")
    environment.filters["error"] = lambda f, which: error(
        getattr(f, f"error_{which}"), getattr(f, f"broken_{which}")
    )
    environment.filters["alone"] = alone
    return environment.rendered(
        "report.html.j2",
        report=report,
        panels=panels(report),
        groups=by_scope(report.rows),
        scales=scales(report),
        sources=sources(report.rows, report.findings),
    )
