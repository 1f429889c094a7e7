"""Terminal output: in ASCII where the terminal has no more, of tables, and of results."""

from __future__ import annotations

import codecs
import html
import io
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported where it is used: arrays and transformations run without rich
    from rich.console import Console

WIDEST = 10_000  # columns

ASCII = {
    "×": "x", "±": "+-", "–": "-", "—": "-", "…": "...", "→": "->", "←": "<-",
    "≤": "<=", "≥": ">=", "·": "*", "⋮": ":", "━": "-", "─": "-", "╸": "-", "╺": "-",
    "▁": "_", "▂": ".", "▃": ":", "▄": "-", "▅": "=", "▆": "+", "▇": "*", "█": "#",
}  # fmt: skip


def _replaced(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(ASCII.get(c, "?") for c in text), error.end


codecs.register_error("scalewise.ascii", _replaced)


def print_rows(
    console: Console,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    right: Container[str] = (),
    styles: Iterable[str | None] = (),
) -> None:
    """Prints rows below headings, as wide as the cells need, so that no figure is cut off.

    The columns whose headings are in ``right`` end at one edge; rows may have a style each.
    """
    from rich.measure import Measurement
    from rich.table import Table

    from ._text import Text

    table = Table(title=title, box=None, pad_edge=False, title_justify="left", title_style="")
    for heading in headings:
        justify = "right" if heading in right else "left"
        table.add_column(heading, justify=justify, no_wrap=True)
    for row, style in zip_longest(rows, styles):
        table.add_row(*map(Text, row), style=style)
    options = console.options.update(max_width=WIDEST)
    before, needed = console.width, Measurement.get(console, options, table).maximum
    console.width = max(before, needed)
    try:
        console.print(table)
    finally:
        console.width = before


@contextmanager
def one_output(console: Console | None) -> Iterator[Console]:
    """Yields a console, the terminal's by default; a notebook shows all that is printed as one."""
    from rich.console import Console as Terminal

    with console or Terminal() as one:
        yield one


class Printed:
    """A result with a ``show``, whose text is also its string, and what a notebook shows."""

    def show(self, console: Console | None = None) -> None:
        raise NotImplementedError

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        plain = Console(
            file=text, width=120, no_color=True, force_jupyter=False, force_terminal=False
        )
        self.show(plain)
        return text.getvalue().rstrip()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def counted(n: int, what: str) -> str:
    plural = "es" if what.endswith("x") else "s"
    return f"{n:,} {what}" + (plural if n != 1 else "")
