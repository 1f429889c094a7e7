"""Results that are printed, and saved as HTML, JSON or CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from ..._output import Printed, check_writable, framed, print_table, replacing
from ..._output._text import Text
from ..._types import Json


def writable(path: str | os.PathLike[str]) -> Path:
    """Checks that a report can be written to a path, and returns the path.

    Raises:
        ValueError: another ending than .html, .json or .csv, no such folder, or not a regular file.
        OSError: the file can't be written, or none can be created in its folder.
    """
    path = Path(path)
    if path.suffix not in (".html", ".json", ".csv"):
        expected = "a name that ends with .html, .json or .csv"
        raise ValueError(f"save({str(path)!r}): expected {expected}")
    check_writable(path)
    return path


class Saved(Printed):
    """A printed result that is also saved as a page, as JSON and as a table."""

    def as_dict(self) -> dict[str, Json]:
        """Returns the content of the JSON file; non-finite numbers are "inf", "-inf", "nan"."""
        raise NotImplementedError

    def _page(self) -> str:
        raise NotImplementedError

    def _csv(self) -> str:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return framed(self._page())

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the result to a file; on failure, a file that was there stays unchanged.

        Args:
            path: ends with ``.html``, ``.json``, or ``.csv``: of a report its operations alone, of
                a tuning its parts, of a comparison its lines.

        Raises:
            ValueError: another ending, no such folder, or not a regular file.
            OSError: the file can't be written.
        """
        path = writable(path)
        if path.suffix == ".json":
            text = json.dumps(self.as_dict(), indent=1)
        else:
            text = self._page() if path.suffix == ".html" else self._csv()
        with replacing(path) as file:
            file.write(text.encode())
        return path


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
        print_table(console, listing(self.columns, self._rows(), self.left))

    def _csv(self) -> str:
        return as_csv(self.columns, self._rows())


def as_csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([columns, *rows])
    return stream.getvalue()


def listing(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int,
    title: str | None = None,
    styles: Sequence[str | None] = (),
) -> Table:
    table = Table(box=None, pad_edge=False, title_justify="left", title_style="", title=title)
    for i, name in enumerate(columns):
        side = "left" if i < left or name == "note" else "right"
        table.add_column(name, justify=side, no_wrap=True)
    for row, style in zip_longest(rows, styles):
        table.add_row(*map(Text, row), style=style)
    return table


def plain(x: Any) -> Any:
    """Returns what JSON can hold; non-finite numbers are "inf", "-inf", "nan"."""
    if isinstance(x, dict):
        return {str(k): plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [plain(v) for v in x]
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    return x
