"""The folder of a run: locked by one process, metrics appended, all else written atomically."""

from __future__ import annotations

import errno
import json
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from .._types import Json
from .._user_file import InputError
from ._write import append, remove_temporaries, replacing

try:
    import fcntl
except ImportError:  # Windows has no fcntl; there, folders are not locked
    fcntl = None

NAME = ".lock"
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class FolderInUseError(InputError):
    """Raised if another process, or another run in this process, uses a folder."""


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Holds a folder's lock, ``.lock``, while the block runs; FolderInUseError if another does.

    The operating system releases the lock when the process ends, however it ends; a file that a
    killed process left behind locks nothing. On a file system without locks the block runs
    unlocked.
    """
    path = folder / NAME
    handle = _acquired(path)
    try:
        with suppress(OSError):  # the name of the holder is only for the message
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(handle)


def _acquired(path: Path) -> int:
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        handle = os.open(path, flags, 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the holder before may have removed the file between our open and our lock
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(path)):
                    return handle
        except BlockingIOError:
            holder = os.pread(handle, 200, 0).decode(errors="replace") or "another process"
            os.close(handle)
            raise FolderInUseError(
                f"{str(path.parent)!r} is in use by {holder}; only one run at a time can use it"
            ) from None
        except OSError as error:
            if error.errno in UNSUPPORTED:
                return handle
            os.close(handle)
            raise
        os.close(handle)


@dataclass(frozen=True)
class Folder:
    """A folder for a run's files; it is created when :meth:`claimed` is entered.

    Attributes:
        path: of the folder.
        new: True if the folder has to be new or empty when it is claimed.
        named: True if the user chose the name; otherwise a number is added to a name that is taken.
    """

    path: Path
    new: bool = True
    named: bool = True

    @classmethod
    def at(cls, out: str | Path | Folder, *, resume: bool = False) -> Folder:
        """Returns the folder ``out``, which has to be new or empty unless it is resumed."""
        if isinstance(out, Folder) and not resume:
            return out
        folder = cls(out.path if isinstance(out, Folder) else Path(out), new=not resume)
        empty = folder.path.is_dir() and (resume or not folder.entries())
        if folder.path.exists() and not empty:
            raise InputError(f"{str(folder.path)!r} isn't empty; expected a new or an empty folder")
        return folder

    @classmethod
    def timestamped(cls, parent: str | Path = "runs") -> Folder:
        """Returns a new folder in ``parent``, named after the present time."""
        return cls(Path(parent) / time.strftime("%Y-%m-%dT%H-%M-%S"), named=False)

    def entries(self) -> list[Path]:
        """Returns what is in the folder, except hidden files (a killed process leaves a lock)."""
        if not self.path.exists():
            return []
        return [path for path in self.path.iterdir() if not path.name.startswith(".")]

    @contextmanager
    def claimed(self) -> Iterator[Folder]:
        """Creates the folder and holds its lock while the block runs.

        If nothing was written to a folder that this method created, the folder is removed again.

        Yields:
            The folder under the name that it got.
        """
        folder, created = self._created()
        try:
            with lock(folder.path):
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

    def _created(self) -> tuple[Folder, bool]:
        """Returns the folder, and whether this call created it."""
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

    def append(self, name: str, rows: Iterable[Mapping[str, Json]]) -> None:
        """Appends one line of JSON for each row; all of them, or none if that fails."""
        self.path.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        append(self.path / name, lines.encode())

    def write(self, name: str, text: str) -> None:
        """Writes a text file atomically."""
        self.path.mkdir(parents=True, exist_ok=True)
        with replacing(self.path / name) as file:
            file.write(text.encode())

    def write_json(self, name: str, value: Json) -> None:
        """Writes a JSON file atomically."""
        self.write(name, json.dumps(value, indent=2, allow_nan=False) + "\n")
