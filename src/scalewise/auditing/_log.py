"""``metrics.jsonl`` of a monitored run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from .._output import append, check_source, replacing
from .._types import Json

NAME = "metrics.jsonl"


class Log:
    """Writes ``metrics.jsonl`` in a run's folder; lines of steps after ``after``, which the run
    makes again, are removed."""

    def __init__(self, folder: Path, *, after: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._file = file = folder / NAME
        if file.exists():
            check_source(file)
            rows = {n: row for n, row in map(_read, file.read_bytes().splitlines()) if n <= after}
            kept = "".join(json.dumps(rows[n]) + "\n" for n in sorted(rows) if n >= 0)
            with replacing(file) as new:
                new.write(kept.encode())

    def step(self, row: Mapping[str, Json]) -> None:
        """Writes one line, whole or not at all."""
        append(self._file, (json.dumps(row, allow_nan=False) + "\n").encode())


def _read(line: bytes) -> tuple[int, dict[str, Json]]:
    """Returns the step of a line and the line; step -1 if a kill cut it short, or it is damaged."""
    try:
        row = json.loads(line.decode())
        json.dumps(row, allow_nan=False)
        return (row["step"] if type(row["step"]) is int else -1), row
    except (ValueError, RecursionError, KeyError, TypeError):
        return -1, {}
