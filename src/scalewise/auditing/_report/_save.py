"""Results of one verdict and one table of parts."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import ClassVar

from rich.console import Console

from ..._output import Saved, print_rows
from ..._output._text import Text


class Listed(Saved):
    """A result of one verdict and one table of parts, as ``tune`` and ``plan`` have.

    Attributes:
        columns: of the table.
        left: how many columns, the first ones, are text.
    """

    columns: ClassVar[tuple[str, ...]]
    left: ClassVar[int]

    @property
    def heading(self) -> str:
        """The first line of what is printed."""
        raise NotImplementedError

    @property
    def verdict(self) -> str:
        """The result in a sentence or two."""
        raise NotImplementedError

    def _rows(self) -> list[list[str]]:
        raise NotImplementedError

    def show(self, console: Console | None = None) -> None:
        """Prints the verdict and the table."""
        console = console or Console()
        console.print(Text(self.heading))
        console.print(Text(self.verdict, style="bold"))
        right = set(self.columns[self.left :]) - {"note"}
        print_rows(console, self.columns, self._rows(), right=right)

    def _csv(self) -> str:
        return as_csv(self.columns, self._rows())


def as_csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([columns, *rows])
    return stream.getvalue()
