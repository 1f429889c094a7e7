"""Shows a comparison in a terminal: progress bars, then a table and the curves."""

import itertools
import math

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..._output import print_table
from ..._output._text import Text
from ._braille import plot
from ._results import Comparison, Record, smoothed

COLOURS = ("blue", "red", "green", "dark_orange", "magenta", "cyan")
HEADINGS = (  # narrow: the table fits into 80 columns
    "final\nloss",
    "\nratio",
    "non-\nfinite",
    "bytes/\nparam",
    "step\nms",
    "\nratio",
    "build\ns",
    "\nratio",
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
    for heading in HEADINGS:
        result.add_column(heading, justify="right", no_wrap=True)
    for record, colour in zip(comparison.records, itertools.cycle(COLOURS), strict=False):
        result.add_row(Text(record.name, style=colour), *cells(comparison, record))
    return result


def cells(comparison: Comparison, record: Record) -> tuple[str, ...]:
    """Returns a method's figures as text for the table and the page."""
    final = number(record.final_loss, 3)
    if math.isfinite(record.spread):
        final += f"±{record.spread:.3f}"
    return (
        final,
        number(comparison.ratio(record, "final_loss"), 4),
        str(record.non_finite),
        number(record.bytes_per_parameter, 2),
        number(record.median_seconds * 1e3, 1),
        number(comparison.ratio(record, "median_seconds"), 2),
        number(record.build_seconds, 2),
        number(comparison.ratio(record, "build_seconds"), 2),
    )


def number(x: float, digits: int) -> str:
    """Formats x with this many digits; a dash if it isn't finite."""
    return f"{x:.{digits}f}" if math.isfinite(x) else "–"
