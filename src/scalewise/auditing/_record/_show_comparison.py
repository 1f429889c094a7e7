"""A comparison of two recordings: printed in a terminal, and as HTML and CSV."""

from __future__ import annotations

import csv
import io
import math
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ..._output import page_environment, print_table
from ..._output._text import Text
from .._report._verdict import counted

if TYPE_CHECKING:
    from ._compare import Comparison, LineDifference
    from ._recording import RecordedArray, Recording

SHOWN = 40  # lines
COLUMNS = (
    "where", "function", "direction", "primitive", "dtype", "arrays", "differ", "difference",
    "non_finite_a", "non_finite_b", "visits_a", "visits_b",
)  # fmt: skip
HEADINGS = (
    "line", "function", "pass", "primitive", "dtype", "results", "differ", "difference",
    "not finite", "visits",
)  # fmt: skip


def verdict(comparison: Comparison) -> str:
    """Returns in one sentence where the recordings differ first, and most."""
    pairs = counted(len(comparison.pairs), "matched array")
    parts = []
    largest = comparison.largest
    if not comparison.differ:
        parts.append(f"None of the {pairs} differs")
    else:
        first = next(x for x in comparison.pairs if x.differs)
        parts.append(f"{comparison.differ:,} of the {pairs} differ, first {_place(first.a)}")
        if largest is not None and largest is not first:
            size = difference(largest.difference)
            parts.append(f"the largest relative difference is {size}, of {_place(largest.a)}")
        parts.append(f"the outputs differ by {difference(comparison.output_difference)}")
    alone = comparison.first_in_one
    if alone is not None:
        which = "first" if alone.a.non_finite else "second"
        place = _place(alone.a)
        parts.append(f"numbers that aren't finite are first in the {which} alone: {place}")
    unmatched = comparison.unmatched
    if any(unmatched):
        parts.append(f"{unmatched[0]:,} and {counted(unmatched[1], 'array')} have no counterpart")
    return "; ".join(parts) + "."


def difference(x: float) -> str:
    """``0.0012``, ``0 in the sample`` for other bits elsewhere, or ``not finite in one``."""
    if math.isinf(x):
        return "not finite in one"
    return f"{x:.2g}" if x else "0 in the sample"


def _place(x: RecordedArray) -> str:
    return x.where if x.path else f"{x.primitive} at {x.where}"


def title(comparison: Comparison) -> str:
    """``step on cpu (cpu), jax 0.10.2 -> step on ...``."""

    def side(x: Recording) -> str:
        versions = dict(x.versions)
        how = ", one compiled program" if x.fused else ""
        return f"{x.function} on {x.device}, jax {versions.get('jax', '?')}{how}"

    return f"{side(comparison.a)} -> {side(comparison.b)}"


def show(comparison: Comparison, console: Console, *, everything: bool = False) -> None:
    """Prints a sentence, and a table of the lines that differ in program order."""
    console.print(Text(f"compare  {title(comparison)}"))
    console.print(Text(verdict(comparison), style="bold"))
    for which, x in (("first", comparison.a), ("second", comparison.b)):
        made = x.first_non_finite
        if made is not None:
            console.print(Text(f"The {which}'s first non-finite number: {_place(made)}."))
    lines = comparison.lines if everything else comparison.lines[:SHOWN]
    if not lines:
        return
    table = Table(box=None, pad_edge=False)
    for i, name in enumerate(HEADINGS):
        table.add_column(name, justify="right" if i > 4 else "left", no_wrap=True)
    for line in lines:
        style = "red" if bool(line.non_finite[0]) != bool(line.non_finite[1]) else None
        table.add_row(*map(Text, cells(line)), style=style)
    print_table(console, table)
    rest = len(comparison.lines) - len(lines)
    if rest:
        console.print(Text(f"and {counted(rest, 'more line')}: show(everything=True)", style="dim"))


def cells(line: LineDifference) -> tuple[str, ...]:
    """Returns the texts of a line's row, in the order of ``HEADINGS``."""
    visits = line.visits
    return (
        line.where, line.function, line.direction, line.primitive, line.dtype, f"{line.arrays:,}",
        f"{line.differ:,}", difference(line.difference), _change(line.non_finite, ""),
        _change(visits, "1"),
    )  # fmt: skip


def _change(pair: tuple[int, int], usual: str) -> str:
    """``3 -> 4``, or ``3`` for equal ones; "" where both are the usual."""
    if pair[0] != pair[1]:
        return f"{pair[0]:,} -> {pair[1]:,}"
    return "" if str(pair[0]) in (usual, "0") else f"{pair[0]:,}"


def page(comparison: Comparison) -> str:
    """Returns the HTML; every name in it is escaped."""
    return page_environment("scalewise.auditing._record").rendered(
        "comparison.html.j2",
        title=title(comparison),
        verdict=verdict(comparison),
        headings=HEADINGS,
        rows=[cells(line) for line in comparison.lines],
    )


def as_csv(comparison: Comparison) -> str:
    """Returns CSV with a header and one line for each line that differs."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for line in comparison.lines:
        plain = [getattr(line, name) for name in COLUMNS[:8]]
        writer.writerow([*plain, *line.non_finite, *line.visits])
    return stream.getvalue()
