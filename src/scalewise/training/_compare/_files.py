"""The run folder: one process at a time in it, metrics appended, all else written atomically."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..._output import FolderInUseError, append, lock, remove_temporaries, replacing
from ._input import InputError


@dataclass(frozen=True)
class Folder:
    """A run's folder, created when it is claimed.

    Attributes:
        path: where it is, or will be.
        new: whether it has to be empty when it is claimed.
        named: whether the user chose the name; if not, a taken name gets a number.
    """

    path: Path
    new: bool = True
    named: bool = True

    @classmethod
    def at(cls, out: str | Path | None) -> "Folder":
        """The folder `out`, which has to be new or empty; None for runs/<time>, a new one.

        Raises:
            InputError: there is something already.
        """
        if out is None:
            return cls(Path("runs") / time.strftime("%Y-%m-%dT%H-%M-%S"), named=False)
        folder = cls(Path(out))
        if folder.path.exists() and (not folder.path.is_dir() or folder.entries()):
            raise InputError(f"{str(out)!r} isn't empty; expected a new or an empty folder")
        return folder

    def entries(self) -> list[Path]:
        """What is in the folder, without hidden files (a lock that a killed process left)."""
        if not self.path.exists():
            return []
        return [path for path in self.path.iterdir() if not path.name.startswith(".")]

    @contextmanager
    def claimed(self) -> Iterator["Folder"]:
        """Creates the folder, holds its lock while the block runs, and yields the folder.

        A folder in which nothing was written is removed again.

        Raises:
            InputError: another process works in it, or it isn't empty although it has to be.
            OSError: it can't be created.
        """
        folder, created = self._created()
        try:
            with ExitStack() as stack:
                try:
                    stack.enter_context(lock(folder.path))
                except FolderInUseError as error:
                    raise InputError(f"{error}; only one run at a time can use it") from None
                if folder.new and folder.entries():
                    raise InputError(
                        f"{str(folder.path)!r} isn't empty; expected a new or an empty folder"
                    )
                remove_temporaries(folder.path)
                yield folder
        finally:
            if created:
                with suppress(OSError):
                    folder.path.rmdir()  # only if it is empty

    def _created(self) -> tuple["Folder", bool]:
        folder, number = self, 1
        while True:
            try:
                folder.path.mkdir(parents=True)
            except FileExistsError:
                if self.named:
                    return self, False
                number += 1
                folder = replace(self, path=self.path.with_name(f"{self.path.name}-{number}"))
            else:
                return folder, True

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """One line of JSON for each row: all of them, or none if they can't be written."""
        self.path.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        append(self.path / name, lines.encode())

    def write(self, name: str, text: str) -> None:
        """The text, atomically."""
        self.path.mkdir(parents=True, exist_ok=True)
        with replacing(self.path / name) as file:
            file.write(text.encode())

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, json.dumps(value, indent=2, allow_nan=False) + "\n")
