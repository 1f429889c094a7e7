"""The report of an audit: plain data, shown in a terminal, saved as JSON or as one HTML page."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from ..._output import check_target, replacing
from ._page import page
from ._summary import Summary
from ._table import as_csv
from ._terminal import show

SEMANTICS = (
    "the source's operations one by one, each result rounded once; sums and contractions are "
    "accumulated exactly and rounded at their end; a backend's fusions and rewrites aren't modelled"
)


@dataclasses.dataclass(frozen=True)
class Report(Summary):
    """What an audit found, to be shown and saved; its fields are those of :class:`Summary`."""

    def show(self, console: Console | None = None, *, everything: bool = False) -> None:
        """Prints verdict, findings and literals; with ``everything`` what is benign as well."""
        show(self, console or Console(), everything=everything)

    def __str__(self) -> str:
        """What :meth:`show` prints, without colours."""
        text = io.StringIO()
        self.show(Console(file=text, width=120, no_color=True))
        return text.getvalue().rstrip()

    def __repr__(self) -> str:
        found = f"{len(self.findings)} findings, error {self.error}"
        return f"<Report of {self.function} in {self.low}: {found}; show(), save('report.html')>"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the report, whole or not at all.

        Args:
            path: ends with ``.html``, ``.json`` or ``.csv`` (the operations alone).

        Raises:
            ValueError: another ending, no such folder, or something else than a regular file.
            OSError: the file can't be written.
        """
        path = writable(path)
        match path.suffix:
            case ".html":
                text = page(self)
            case ".json":
                text = json.dumps(self.as_dict(), indent=1)
            case _:
                text = as_csv(self.rows)
        with replacing(path) as file:
            file.write(text.encode())
        return path

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON has it: infinities and NaN are the strings "inf", "-inf", "nan"."""
        derived = {"updates_lost": self.updates_lost, "loss_scales": self.loss_scales()}
        return _plain(dataclasses.asdict(self) | derived)


def writable(path: str | os.PathLike[str]) -> Path:
    """The path of a report that is yet to be written.

    Raises:
        ValueError: another ending than .html, .json or .csv, no such folder, or something else than
            a regular file there.
        OSError: the file is there and can't be written.
    """
    path = Path(path)
    if path.suffix not in (".html", ".json", ".csv"):
        accepted = "a name with .html, .json or .csv"
        raise ValueError(f"report.save({str(path)!r}): accepted: {accepted}")
    check_target(path)
    return path


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {str(k): _plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    return x
