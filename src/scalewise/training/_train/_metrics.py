"""What a run writes down at each step: lines of JSON, and events for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._compare import Folder

NAME = "metrics.jsonl"


class Log:
    """``metrics.jsonl`` in a run's folder, and events for TensorBoard if tensorboardX is there."""

    def __init__(self, folder: Folder, *, after: int):
        """Goes on after step ``after``; lines of later steps, which are made again, are dropped."""
        self._folder = folder
        file = folder.path / NAME
        if file.exists():
            rows = [row for row in map(_read, file.read_text("utf-8").splitlines()) if row]
            kept = [json.dumps(row) + "\n" for row in rows if row["step"] <= after]
            folder.write(NAME, "".join(kept))
        self._events = _events(folder.path, after)

    def step(self, row: Mapping[str, Any]) -> None:
        """One line; what isn't a finite number is null in it."""
        self._folder.append(NAME, [row])
        if self._events is not None:
            for name, value in row.items():
                if name != "step" and value is not None:
                    self._events.add_scalar(name, float(value), row["step"])

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


def _read(line: str) -> dict[str, Any] | None:
    """A row, or None for a line that a kill cut short."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _events(path: Path, after: int) -> Any:
    try:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return SummaryWriter(str(path / "tensorboard"), purge_step=after + 1)
