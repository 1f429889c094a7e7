"""Saving a result as HTML, JSON or CSV."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..._output import check_writable, replacing
from .._deprecated import RenamedKeys


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


def save_as(
    path: str | os.PathLike[str],
    *,
    html: Callable[[], str],
    data: Callable[[], Any],
    csv: Callable[[], str],
) -> Path:
    """Writes what the path's ending asks for; on failure, a file that was there stays unchanged.

    Args:
        path: ends with ``.html``, ``.json`` or ``.csv``.
        html, csv: return the text.
        data: returns what JSON can hold.

    Raises:
        ValueError, OSError: see :func:`writable`.
    """
    path = writable(path)
    text = {".html": html, ".csv": csv, ".json": lambda: json.dumps(data(), indent=1)}[
        path.suffix
    ]()
    with replacing(path) as file:
        file.write(text.encode())
    return path


def plain(x: Any) -> Any:
    """Returns what JSON can hold; non-finite numbers are "inf", "-inf", "nan"."""
    if isinstance(x, dict):
        return RenamedKeys({str(k): plain(v) for k, v in x.items()})
    if isinstance(x, list | tuple):
        return [plain(v) for v in x]
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    return x
