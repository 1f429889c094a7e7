"""Lines of source, as reports name them."""

from __future__ import annotations

import sys
from pathlib import Path


def place(file: str | None, line: int | None) -> str:
    """Returns ``model.py:12``; of a notebook's cell, whose file has a hash as its name, its number:
    ``In [2], line 12``.
    """
    if not file:
        return "unknown line"
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    cell = None if shell is None else shell.compile.format_code_name(file)
    if cell is None:
        return f"{Path(file).name}:{line}"
    return f"{cell[1].replace('[', ' [')}, line {line}"


def place_in_library(file: str, line: int) -> str:
    """Returns ``optax/_src/update.py:42``: the path in the folder of installed packages."""
    parts = Path(file).parts
    start = max((i + 1 for i, x in enumerate(parts) if x.endswith("-packages")), default=-1)
    return f"{'/'.join(parts[start:])}:{line}"


def place_of(caller: str) -> str:
    """Returns the place of ``/path/to/model.py:12``, as statistics keep it."""
    file, _, line = caller.rpartition(":")
    return place(file, int(line))
