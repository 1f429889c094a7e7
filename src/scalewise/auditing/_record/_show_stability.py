"""The agreement of runs that round at random, in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ..._output import print_table
from ..._output._text import Text

if TYPE_CHECKING:
    from ._stability import LineStability, Stability

SHOWN = 12  # lines
COLUMNS = ("where", "function", "primitive", "digits", "spread", "error")


def show(stability: Stability, console: Console, *, everything: bool = False) -> None:
    """Prints a table of the outputs, and one of the lines about which the runs agree least."""
    text = f"stability  {stability.function} in {stability.low}, {stability.runs} runs"
    console.print(Text(f"{text} that round at random"))
    worst = sorted(stability.lines, key=lambda x: (x.digits, -x.spread))
    shown = set(worst if everything else worst[:SHOWN])
    _table(console, "Outputs", stability.outputs)
    title = "Lines in program order" if everything else "Lines with the fewest digits that agree"
    _table(console, title, [x for x in stability.lines if x in shown])


def _table(console: Console, title: str, rows: Sequence[LineStability]) -> None:
    table = Table(box=None, pad_edge=False, title_justify="left", title_style="", title=title)
    for i, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if i > 2 else "left", no_wrap=True)
    for x in rows:
        spread = f"{x.spread:.2g}" if math.isfinite(x.spread) else "not finite in some"
        error = f"{x.error:.2g}" if math.isfinite(x.error) else "not finite in one"
        table.add_row(*map(Text, (x.where, x.function, x.primitive, f"{x.digits:.1f}", spread,
                                  error)))  # fmt: skip
    print_table(console, table)
