"""Shows a comparison: the table of figures and the curves, in a terminal and on a page."""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from markupsafe import Markup
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..._output import page_environment, print_table
from ..._output._text import Text
from ._braille import plot
from ._curves import STYLE, curves_svg, scales_svg
from ._results import WINDOW, Comparison, Record, smoothed

COLOURS = ("blue", "red", "green", "dark_orange", "magenta", "cyan")


class Column(NamedTuple):
    """A figure of each method, below a heading in the terminal, and on the page."""

    narrow: str  # the table fits into 80 columns
    heading: str
    cell: Callable[[Comparison, Record], str]


def _final(comparison: Comparison, record: Record) -> str:
    spread = f"±{record.spread:.3f}" if math.isfinite(record.spread) else ""
    return number(record.final_loss, 3) + spread


def _ratio(figure: str, digits: int) -> Column:
    cell = lambda c, r: number(c.ratio(r, figure), digits)  # noqa: E731
    return Column("\nratio", "to float32", cell)


COLUMNS = (
    Column("final\nloss", f"final loss (mean of last {WINDOW})", _final),
    _ratio("final_loss", 4),
    Column("non-\nfinite", "non-finite steps", lambda _, r: str(r.non_finite)),
    Column(
        "bytes/\nparam", "state bytes / parameter", lambda _, r: number(r.bytes_per_parameter, 2)
    ),
    Column("step\nms", "step, ms", lambda _, r: number(r.median_seconds * 1e3, 1)),
    _ratio("median_seconds", 2),
    Column("build\ns", "trace + compile, s", lambda _, r: number(r.build_seconds, 2)),
    _ratio("build_seconds", 2),
)


def announce(console: Console, program: str, parameters: int, size: int, steps: int) -> None:
    console.print(
        f"{program}: {parameters:,} parameters, {size:,} bytes of text, {steps} steps of each",
        highlight=False,
    )


def show(comparison: Comparison, console: Console) -> None:
    print_table(console, table(comparison))
    for record in comparison.records:
        if record.divergence:
            what = f", step {record.divergence.step}: {record.divergence.why}"
            console.print(Text.assemble((record.name, "bold"), what))
    for record in comparison.records:
        if record.scales:
            scales = f"loss scale {record.scales[0]:g} to {record.scales[-1]:g}"
            what = f", {scales}, {record.skipped} steps left out"
            console.print(Text.assemble((record.name, "bold"), what))
    curves = {r.name: smoothed(r.losses, 10) for r in comparison.records}
    width = min(console.width, 100)
    colourless = console.no_color or console.color_system is None
    ascii_only = colourless or not console.encoding.lower().startswith("utf")
    for row in plot(curves, COLOURS, width=width, height=14, ascii_only=ascii_only):
        console.print(row, no_wrap=True)
    if comparison.interrupted:
        console.print(f"interrupted after {comparison.steps_made} of {comparison.steps} steps")
    if comparison.folder:
        console.print(f"report: {escape(comparison.folder)}/report.html", highlight=False)


def table(comparison: Comparison) -> Table:
    title = f"{comparison.program}: {comparison.steps_made} steps, ratios to "
    result = Table(
        title=title + comparison.reference.name,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    result.add_column("\nmethod", no_wrap=True)
    for column in COLUMNS:
        result.add_column(column.narrow, justify="right", no_wrap=True)
    for record, colour in zip(comparison.records, itertools.cycle(COLOURS), strict=False):
        result.add_row(Text(record.name, style=colour), *cells(comparison, record))
    return result


def cells(comparison: Comparison, record: Record) -> list[str]:
    return [column.cell(comparison, record) for column in COLUMNS]


def number(x: float, digits: int) -> str:
    """Formats x with this many digits; a dash if it isn't finite."""
    return f"{x:.{digits}f}" if math.isfinite(x) else "–"


def page(comparison: Comparison) -> tuple[str, str]:
    svg = curves_svg(comparison)
    scaled = [record for record in comparison.records if record.scales]
    html = page_environment("scalewise.training._compare").rendered(
        "report.html.j2",
        styles=f"<style>{STYLE}</style>",
        comparison=comparison,
        headings=[c.heading.replace("float32", comparison.reference.name) for c in COLUMNS],
        rows=[(record, cells(comparison, record)) for record in comparison.records],
        scaled=scaled,
        scales_svg=Markup(scales_svg(scaled)) if scaled else "",
        svg=Markup(svg),  # made by curves_svg, which escapes names
    )
    return html, svg
