"""The run folder: appended metrics, everything else written whole or not at all."""

import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._input import InputError


@dataclass(frozen=True)
class Folder:
    """A folder that comes into being with the first thing written to it."""

    path: Path

    @classmethod
    def at(cls, out: str | Path | None) -> "Folder":
        """The folder `out`, which has to be new or empty; None for runs/<time>, a new one.

        Raises:
            InputError: there is something already.
        """
        if out is None:
            stem = Path("runs") / time.strftime("%Y-%m-%dT%H-%M-%S")
            path, n = stem, 1
            while path.exists():
                n += 1
                path = stem.with_name(f"{stem.name}-{n}")
            return cls(path)
        path = Path(out)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InputError(f"{str(path)!r} isn't empty: a new or an empty folder is accepted")
        return cls(path)

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """One line of JSON for each row, flushed."""
        self.path.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        with (self.path / name).open("a", encoding="utf-8") as stream:
            stream.write(lines)

    def write(self, name: str, text: str) -> None:
        """The text, atomically: to a temporary neighbour first, then renamed."""
        self.path.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.path, prefix=f".{name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(self.path / name)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, json.dumps(value, indent=2, allow_nan=False) + "\n")
