"""The result of a search for formats: printed in a terminal, and as HTML, JSON and CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ..._output import page_environment, print_table
from ..._output._text import Text
from ..._types import Json
from ._verdict import counted

if TYPE_CHECKING:
    from .._tune import Tuning

COLUMNS = ("format", "function", "primitive", "operations", "numbers")


def verdict(tuning: Tuning) -> str:
    """Returns in one sentence which share of the bits is needed for which error."""
    low = sum(part.format != "fp32" for part in tuning.parts)
    if not low:
        return (
            f"{tuning.function} needs float32 for all operations: with any of them in "
            f"{' or '.join(tuning.tried)} the error exceeds {tuning.tol:.2g}."
        )
    autocast = "autocast with .policy keeps it too" if tuning.policy else "no policy for autocast"
    return (
        f"{tuning.function} keeps an error of {tuning.error} (tolerance {tuning.tol:.2g}) with "
        f"{tuning.cost:.0%} of float32's bits: {low} of {counted(len(tuning.parts), 'part')} in "
        f"{' and '.join(dict.fromkeys(tuning.formats.values()))}; {autocast}."
    )


def show(tuning: Tuning, console: Console) -> None:
    """Prints the verdict and a table of the parts, those in float32 first."""
    console.print(Text(f"tune  {tuning.function}   {counted(tuning.runs, 'run')}"))
    console.print(Text(verdict(tuning), style="bold"))
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in COLUMNS[3:] else "left", no_wrap=True)
    for part in tuning.parts:
        texts = part.format, part.function, part.primitive, f"{part.operations:,}"
        table.add_row(*map(Text, (*texts, f"{part.numbers:,}")))
    print_table(console, table)


def page(tuning: Tuning) -> str:
    """Returns the HTML; every name in it is escaped."""
    environment = page_environment("scalewise.auditing._report")
    return environment.rendered(
        "tuning.html.j2", tuning=tuning, verdict=verdict(tuning), columns=COLUMNS
    )


def as_dict(tuning: Tuning) -> dict[str, Json]:
    """Returns the content of the JSON file."""
    return {
        "verdict": verdict(tuning),
        "function": tuning.function,
        "tol": tuning.tol,
        "error": dataclasses.asdict(tuning.error),
        "cost": tuning.cost,
        "runs": tuning.runs,
        "policy": None if tuning.policy is None else str(tuning.policy),
        "parts": [dataclasses.asdict(part) for part in tuning.parts],
    }


def as_csv(tuning: Tuning) -> str:
    """Returns CSV with a header and one line for each part."""
    stream = io.StringIO()
    rows = [[getattr(part, name) for name in COLUMNS] for part in tuning.parts]
    csv.writer(stream, lineterminator="\n").writerows([COLUMNS, *rows])
    return stream.getvalue()
