"""Results that are printed, and saved as HTML, JSON or CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from .._types import Json
from ._page import framed
from ._stream import Printed, one_output, print_rows
from ._write import check_writable, replacing

if TYPE_CHECKING:
    from rich.console import Console

ENDINGS = (".html", ".json", ".csv")


def writable(path: str | os.PathLike[str], endings: Sequence[str] = ENDINGS) -> Path:
    """Returns the path, after a check of its ending, and that a file can be written there."""
    path = Path(path)
    if path.suffix not in endings:
        *others, last = endings
        expected = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"save({str(path)!r}): expected a name that ends with {expected}")
    check_writable(path)
    return path


class Saved(Printed):
    """A printed result that is also saved as a page, as JSON and as a table."""

    endings: ClassVar[Sequence[str]] = ENDINGS

    def as_dict(self) -> dict[str, Json]:
        """Returns the content of the JSON file; non-finite numbers are "inf", "-inf", "nan"."""
        raise NotImplementedError

    def json(self) -> str:
        """Returns the content of the JSON file as text."""
        return json.dumps(plain(self.as_dict()), indent=1)

    def _page(self) -> str:
        """Returns the HTML; every name in it is escaped."""
        raise NotImplementedError

    def _csv(self) -> str:
        """Returns CSV with a header."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        """Returns the page in a frame of its own, as a notebook shows it."""
        return framed(self._page())

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the result to a file; on failure, a file that was there stays unchanged.

        Args:
            path: ends with ``.html``, ``.json``, or ``.csv``: of a report its operations alone, of
                a tuning its parts, of a comparison its lines; reports of checkpoints have none.
        """
        path = writable(path, self.endings)
        made = {".html": self._page, ".json": self.json, ".csv": self._csv}[path.suffix]
        text = made()
        with replacing(path) as file:
            file.write(text.encode())
        return path


class Rows(NamedTuple):
    """A table of text; ``styles`` are those of its rows in a terminal."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    styles: Sequence[str | None] = ()

    @property
    def numbers(self) -> list[str]:
        """The headings of columns in which each cell is a number, or empty."""
        columns = zip(self.headings, zip(*self.rows, strict=True), strict=True)
        return [head for head, cells in columns if all(map(_is_number, filter(None, cells)))]


def _is_number(cell: str) -> bool:
    return cell.lstrip("-+")[:1].isdigit() or cell in ("inf", "nan", "–")


class Tabular(Saved):
    """A result of sentences and tables, of which the terminal's text and the page are made."""

    most: ClassVar[int | None] = None  # rows of a table that are printed without ``everything``
    derived: ClassVar[tuple[str, ...]] = ()  # properties in the JSON file beside the fields

    @property
    def title(self) -> str:
        """The title of the page."""
        raise NotImplementedError

    @property
    def heading(self) -> str:
        """The first line that is printed, before the sentences; "" for none."""
        return self.title

    def sentences(self) -> list[str]:
        """Returns the sentences, of which the first is the verdict."""
        raise NotImplementedError

    def tables(self, *, everything: bool = True) -> list[Rows]:
        """Returns the tables; only their most important rows unless ``everything``."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Json]:
        """Returns what the JSON file holds; non-finite numbers are "inf", "-inf", "nan"."""
        fields: Json = dataclasses.asdict(self)  # pyright: ignore[reportArgumentType]
        return fields | {name: getattr(self, name) for name in self.derived}

    def show(self, console: Console | None = None, *, everything: bool = False) -> None:
        """Prints the sentences and the tables; of long ones some rows, unless ``everything``."""
        from ._text import Text

        with one_output(console) as console:
            if self.heading:
                console.print(Text(self.heading), soft_wrap=True)
            for i, line in enumerate(self.sentences()):
                console.print(Text(line, style="" if i else "bold"), soft_wrap=True)
            for table in self.tables(everything=everything):
                rows = table.rows if everything else table.rows[: self.most]
                if rows:
                    print_rows(
                        console,
                        table.headings,
                        rows,
                        title=table.title,
                        right=table.numbers,
                        styles=table.styles[: len(rows)],
                    )
                if len(rows) < len(table.rows):
                    rest = f"and {len(table.rows) - len(rows):,} more: --all, show(everything=True)"
                    console.print(Text(rest, style="dim"))

    def _page(self) -> str:
        return tables_page(self.title, self.sentences(), [t for t in self.tables() if t.rows])

    def _csv(self) -> str:
        first = self.tables()[0]
        rows = [[_without_separators(text) for text in row] for row in first.rows]
        return as_csv(first.headings, rows)


def _without_separators(text: str) -> str:
    """Returns ``2048`` for ``2,048``; another text as it is."""
    is_number = re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", text)
    return text.replace(",", "") if is_number else text


def tables_page(title: str, lines: Sequence[str], tables: Sequence[Rows], **more: str) -> str:
    """Returns the HTML of sentences, of which the first is the verdict, and tables.

    ``more`` may have a chart's SVG, its ``styles``, and a program's ``code``.
    """
    from ._templates import Pages  # imports jinja2, which takes 0.1 s: not for --help

    values = {"title": title, "lines": lines, "tables": tables, "chart": "", "code": ""}
    return Pages("scalewise._output").rendered("tables.html.j2", **(values | more))


def as_csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([columns, *rows])
    return stream.getvalue()


def plain(x: Any) -> Any:
    """Returns what JSON can hold; non-finite numbers are "inf", "-inf", "nan"."""
    if isinstance(x, dict):
        return {str(k): plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [plain(v) for v in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x
