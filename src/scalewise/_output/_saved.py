"""Results that are printed, and saved as HTML, JSON or CSV."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from .._types import Json
from ._page import framed
from ._stream import Printed
from ._write import check_writable, replacing

ENDINGS = (".html", ".json", ".csv")


def writable(path: str | os.PathLike[str], endings: Sequence[str] = ENDINGS) -> Path:
    """Checks that a result can be written to a path, and returns the path.

    Raises:
        ValueError: another ending, no such folder, or not a regular file.
        OSError: the file can't be written, or none can be created in its folder.
    """
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

        Raises:
            ValueError: another ending, no such folder, or not a regular file.
            OSError: the file can't be written.
        """
        path = writable(path, self.endings)
        made = {".html": self._page, ".json": self.json, ".csv": self._csv}[path.suffix]
        text = made()
        with replacing(path) as file:
            file.write(text.encode())
        return path


def plain(x: Any) -> Any:
    """Returns what JSON can hold; non-finite numbers are "inf", "-inf", "nan"."""
    if isinstance(x, dict):
        return {str(k): plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [plain(v) for v in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x
