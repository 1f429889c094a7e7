"""Shows a comparison: the table of figures and the curves, in a terminal and on a page."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import rich.text
from markupsafe import Markup
from rich.console import Console
from rich.markup import escape

from ..._output import page_environment, print_rows
from ..._output._chart import STYLE, Panel, chart_svg
from ..._output._text import Text
from ._results import WINDOW, Comparison, Record, smoothed

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column] of one cell
BLANK = 0x2800
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SMOOTHING = 25  # steps


def plot(
    curves: Mapping[str, Sequence[float]],
    colours: Sequence[str],
    *,
    width: int,
    height: int,
    ascii_only: bool = False,
) -> list[rich.text.Text]:
    """Returns lines of text that plot curves over their index, with axis and legend.

    Args:
        curves: maps names to values; values that aren't finite leave a gap.
        colours: a style for each curve; used again from the start for more curves.
        width, height: in characters, including the axis.
        ascii_only: True for a letter for each curve instead of braille characters, for a terminal
            without Unicode or without colour.

    Example:
        >>> for row in plot({"a": [3.0, 2.0, 1.0]}, ["blue"], width=12, height=4, ascii_only=True):
        ...     print(row.plain.rstrip())
        3.00 |aa
             |  aaaa
        1.00 |      aa
              1      3
        a
    """
    values = [y for ys in curves.values() for y in ys if math.isfinite(y)]
    if not values:
        return [Text("no finite loss to draw")]
    low, high = min(values), max(values)
    longest = max(map(len, curves.values()))
    labels = {0: f"{high:.2f}", height - 2: f"{low:.2f}"}
    margin = max(map(len, labels.values())) + 2
    columns, rows = max(width - margin, 8), height - 1
    cells = [[0] * columns for _ in range(rows)]
    owner = [[-1] * columns for _ in range(rows)]
    across, down = (1, 1) if ascii_only else (2, 4)
    for index, ys in enumerate(curves.values()):
        for x, y in _points(ys, longest, columns * across):
            share = (high - y) / (high - low) if high > low else 0.5
            dot = round(share * (rows * down - 1))
            row, column = dot // down, x // across
            cells[row][column] |= DOTS[dot % down][x % across]
            owner[row][column] = index
    lines = []
    for row in range(rows):
        line = Text(f"{labels.get(row, ''):>{margin - 2}} |")
        for bits, index in zip(cells[row], owner[row], strict=True):
            mark = chr(BLANK + bits)
            if ascii_only:
                mark = LETTERS[index % len(LETTERS)] if bits else " "
            line.append(mark, style=colours[index % len(colours)] if index >= 0 else "")
        lines.append(line)
    lines.append(Text(f"{'':{margin}}1{longest:>{columns - 1}}"))
    named = list(curves)
    if ascii_only and len(named) > 1:
        named = [f"{LETTERS[i % len(LETTERS)]} {name}" for i, name in enumerate(named)]
    legend = Text("   ").join(
        Text(name, style=colours[i % len(colours)]) for i, name in enumerate(named)
    )
    return [*lines, legend]


def _points(ys: Sequence[float], longest: int, dots: int) -> list[tuple[int, float]]:
    """Returns (column, value) for each column of dots, interpolated linearly between steps."""
    points = []
    for x in range(dots):
        at = x * max(longest - 1, 1) / max(dots - 1, 1)
        left = int(at)
        if left >= len(ys):
            break
        right = min(left + 1, len(ys) - 1)
        y = ys[left] + (at - left) * (ys[right] - ys[left])
        if math.isfinite(y):
            points.append((x, y))
    return points


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
    title = f"{comparison.program}: {comparison.steps_made} steps, ratios to "
    headings = ["\nmethod", *(column.narrow for column in COLUMNS)]
    rows = [(record.name, *cells(comparison, record)) for record in comparison.records]
    styles = [COLOURS[i % len(COLOURS)] for i in range(len(rows))]
    title += comparison.reference.name
    print_rows(console, headings, rows, title=title, right=headings[1:], styles=styles)
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


def cells(comparison: Comparison, record: Record) -> list[str]:
    return [column.cell(comparison, record) for column in COLUMNS]


def number(x: float, digits: int) -> str:
    """Formats x with this many digits; a dash if it isn't finite."""
    return f"{x:.{digits}f}" if math.isfinite(x) else "–"


def curves_svg(comparison: Comparison) -> str:
    """Draws two panels: smoothed losses, and their relative differences from the reference."""
    records = comparison.records
    losses = [smoothed(r.losses, SMOOTHING) for r in records]
    reference = losses[records.index(comparison.reference)]
    apart = [
        [100 * (a / b - 1) if b else math.nan for a, b in zip(ys, reference, strict=True)]
        for ys in losses
    ]
    panels = [_panel(losses, f"training loss, mean of the last {SMOOTHING} steps")]
    if len(records) > 1:
        panels.append(_panel(apart, f"difference of that to {comparison.reference.name}, %"))
    return chart_svg("Loss curves", panels, _legend(records))


def scales_svg(records: Sequence[Record]) -> str:
    """Draws one panel: the exponent of each loss scale over the steps."""
    exponents = [[math.log2(x) for x in r.scales] for r in records]
    panels = [_panel(exponents, "loss scale, exponent of two")]
    return chart_svg("Loss scales", panels, _legend(records))


def _panel(curves: Sequence[Sequence[float]], title: str) -> Panel:
    return Panel(title, "step", [list(enumerate(ys, start=1)) for ys in curves])


def _legend(records: Sequence[Record]) -> list[str]:
    dead = [r.divergence is not None and not math.isfinite(r.final_loss) for r in records]
    return [r.name + (" (diverged)" if d else "") for r, d in zip(records, dead, strict=True)]


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
        svg=Markup(svg),  # its template escapes names
    )
    return html, svg
