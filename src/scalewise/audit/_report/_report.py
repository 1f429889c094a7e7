"""The report of an audit: printed in a terminal, saved as HTML, JSON or CSV."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..._output import check_writable, replacing
from .._deprecated import RenamedKeys
from .._search._findings import Finding
from ._page import page
from ._summary import Summary
from ._table import as_csv
from ._terminal import show
from ._trace import TraceRow, trace
from ._verdict import verdict

SEMANTICS = (
    "the source's operations one by one, each result rounded once; sums and contractions "
    "accumulate exactly and are rounded at their end; fusions and rewrites of a backend aren't "
    "modelled"
)


@dataclasses.dataclass(frozen=True)
class Report(Summary):
    """The result of an audit, with the fields of :class:`Summary`."""

    @property
    def verdict(self) -> str:
        """One sentence: whether the function works in this arithmetic, the cause if it doesn't,
        the change to make, and the error that remains with it."""
        return verdict(self)

    def show(self, console: Console | None = None, *, everything: bool = False) -> None:
        """Prints verdict, findings and literals; with ``everything`` also those without a fix."""
        show(self, console or Console(), everything=everything)

    def trace(self) -> tuple[TraceRow, ...]:
        """Returns the modules (name scopes) in the order in which they ran, each with its smallest
        and largest magnitude, up to the first number that overflows or is NaN."""
        return trace(self.equations)

    def __str__(self) -> str:
        """Returns what :meth:`show` prints, without colours."""
        text = io.StringIO()
        self.show(Console(file=text, width=120, no_color=True))
        return text.getvalue().rstrip()

    def __repr__(self) -> str:
        found = f"{len(self.findings)} findings, error {self.error}"
        return f"<Report of {self.function} in {self.low}: {found}; show(), save('report.html')>"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the report to a file; on failure, a file that was there stays unchanged.

        Args:
            path: ends with ``.html``, ``.json`` or ``.csv`` (the operations alone).

        Raises:
            ValueError: another ending, no such folder, or not a regular file.
            OSError: the file can't be written.
        """
        path = writable(path)
        match path.suffix:
            case ".html":
                text = page(self)
            case ".json":
                text = json.dumps(self.as_dict(), indent=1)
            case _:
                text = as_csv(self.equations)
        with replacing(path) as file:
            file.write(text.encode())
        return path

    def as_dict(self) -> dict[str, Any]:
        """Returns the content of the JSON file; non-finite numbers are "inf", "-inf", "nan"."""
        derived = {
            "verdict": self.verdict,
            "trace": [dataclasses.asdict(row) for row in self.trace()],
            "updates_lost": self.updates_lost,
            "loss_scales": self.loss_scales(),
        }
        plain: Any = dataclasses.replace(
            self, findings=_texts(self.findings), unfixed=_texts(self.unfixed)
        )
        return _plain(dataclasses.asdict(plain) | derived)

    def apply_fixes(self, target: Any) -> Any:
        """Returns a policy, recipe or function with the fixes of all findings, in their order.

        Its outputs have ``error_fixed``. See :meth:`Fix.apply`.

        Args:
            target: what was audited: the policy, the recipe, the name of one, or the function.
        """
        fixes = {x.order: x.fix for x in self.findings if x.fix is not None}
        for order in sorted(fixes):
            target = fixes[order].apply(target)
        return target


def writable(path: str | os.PathLike[str]) -> Path:
    """Checks that a report can be written to a path, and returns the path.

    Raises:
        ValueError: another ending than .html, .json or .csv, no such folder, or not a regular file.
        OSError: the file can't be written, or none can be created in its folder.
    """
    path = Path(path)
    if path.suffix not in (".html", ".json", ".csv"):
        expected = "a name that ends with .html, .json or .csv"
        raise ValueError(f"report.save({str(path)!r}): expected {expected}")
    check_writable(path)
    return path


def _texts(findings: Sequence[Finding]) -> tuple[Any, ...]:
    """Returns findings whose fixes are sentences."""
    return tuple(dataclasses.replace(x, fix=x.fix and str(x.fix)) for x in findings)


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return RenamedKeys({str(k): _plain(v) for k, v in x.items()})
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    return x
