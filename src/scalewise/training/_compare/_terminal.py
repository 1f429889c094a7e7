"""Shows a comparison in a terminal: progress bars, then a table and the curves."""

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich import box
from rich import progress as bars
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..._output import print_table
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
EVERY = 50  # steps between two lines if the output is no terminal


class Progress:
    """A progress bar for each method; if the output is no terminal, a line every fifty steps."""

    def __init__(self, console: Console, names: Sequence[str], steps: int):
        self.console, self.steps, self.names = console, steps, tuple(names)
        self.bars = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=None),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[figures]}"),
            bars.TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
            expand=True,
        )
        self.tasks = {
            name: self.bars.add_task(escape(name), total=steps, figures="") for name in names
        }

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bars.stop()

    def update(
        self, name: str, losses: Sequence[float], seconds: Sequence[float], non_finite: int
    ) -> None:
        """Shows the steps that a method has made."""
        figures = f"loss {losses[-1]:6.3f}  {seconds[-1] * 1e3:6.1f} ms  {non_finite} non-finite"
        self.bars.update(self.tasks[name], completed=len(losses), figures=figures)
        if not self.console.is_terminal and len(losses) % EVERY == 0:
            self.console.print(f"step {len(losses):4}/{self.steps}  {name:18}  {figures}")


def announce(console: Console, program: str, parameters: int, size: int, steps: int) -> None:
    """Prints one line with the sizes of model and data and the number of steps."""
    console.print(
        f"{program}: {parameters:,} parameters, {size:,} bytes of text, {steps} steps of each",
        highlight=False,
    )


def show(comparison: Comparison, console: Console) -> None:
    """Prints the table, the curves, why methods diverged, and where the files are."""
    print_table(console, table(comparison))
    for record in comparison.records:
        if record.divergence:
            console.print(
                Text.assemble(
                    (record.name, "bold"),
                    f", step {record.divergence.step}: {record.divergence.why}",
                )
            )
    for record in comparison.records:
        if record.scales:
            scales = f"loss scale {record.scales[0]:g} to {record.scales[-1]:g}"
            what = f", {scales}, {record.skipped} steps left out"
            console.print(Text.assemble((record.name, "bold"), what))
    curves = {r.name: smoothed(r.losses, 10) for r in comparison.records}
    width = min(console.width, 100)
    for row in plot(curves, COLOURS, width=width, height=14, ascii_only=_ascii(console)):
        console.print(row, no_wrap=True)
    if comparison.interrupted:
        console.print(f"interrupted after {comparison.steps_made} of {comparison.steps} steps")
    if comparison.folder:
        console.print(f"report: {escape(comparison.folder)}/report.html", highlight=False)


def _ascii(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")


def table(comparison: Comparison) -> Table:
    """Returns the table of figures, one row for each method."""
    title = f"{comparison.program}: {comparison.steps_made} steps, ratios to "
    result = Table(
        title=title + comparison.reference.name,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    result.add_column("\nrecipe", no_wrap=True)
    for heading in HEADINGS:
        result.add_column(heading, justify="right", no_wrap=True)
    for record, colour in zip(comparison.records, _colours(len(comparison.records)), strict=True):
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


def _colours(n: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(n)]
