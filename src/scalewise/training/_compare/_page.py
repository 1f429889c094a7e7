"""Renders the report as one self-contained HTML file."""

from markupsafe import Markup

from ..._output import page_environment
from ._curves import STYLE, curves_svg, scales_svg
from ._results import WINDOW, Comparison
from ._terminal import cells

HEADINGS = (
    f"final loss (mean of last {WINDOW})",
    "to float32",
    "non-finite steps",
    "state bytes / parameter",
    "step, ms",
    "to float32",
    "trace + compile, s",
    "to float32",
)


def page(comparison: Comparison) -> tuple[str, str]:
    svg = curves_svg(comparison)
    scaled = [record for record in comparison.records if record.scales]
    html = page_environment("scalewise.training._compare").rendered(
        "report.html.j2",
        styles=f"<style>{STYLE}</style>",
        comparison=comparison,
        headings=[h.replace("float32", comparison.reference.name) for h in HEADINGS],
        rows=[(record, cells(comparison, record)) for record in comparison.records],
        scaled=scaled,
        scales_svg=Markup(scales_svg(scaled)) if scaled else "",
        svg=Markup(svg),  # made by curves_svg, which escapes names
    )
    return html, svg
