"""Files that are written whole or not at all, and never over anything but a regular file."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

PREFIX, SUFFIX = ".scalewise-", ".part"  # of temporary names
KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


class TargetError(ValueError):
    """A path names something that cannot be written, or read, as a regular file."""


def check_target(path: str | os.PathLike[str]) -> Path:
    """Returns the file that writing to a path would create or replace, behind symbolic links."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        target = Path(os.path.realpath(path))
        if not target.parent.is_dir():
            raise TargetError(
                f"cannot write {str(path)!r}: there is no folder {str(Path(path).parent)!r}"
            ) from None
        return target
    _check_regular(status, f"cannot write {str(path)!r}", "a regular file or a new name")
    target = Path(os.path.realpath(path))
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return target


def check_writable(path: str | os.PathLike[str]) -> Path:
    """Returns what :func:`check_target` does, after creating a temporary file in the folder."""
    target = check_target(path)
    with _named(path), tempfile.TemporaryFile(dir=target.parent, prefix=PREFIX, suffix=SUFFIX):
        return target


def check_source(path: str | os.PathLike[str]) -> int:
    """Returns the size in bytes of a file that is to be read."""
    status = os.stat(path)
    _check_regular(status, f"cannot read {str(path)!r}", "a regular file")
    return status.st_size


def _check_regular(status: os.stat_result, what: str, expected: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_kind, name in KINDS if is_kind(status.st_mode)), "no file")
        raise TargetError(f"{what}: it is {kind}; expected {expected}")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a new file that takes the place of ``path`` when the block ends without an error.

    The new file is a temporary one in the same folder, flushed to the disk before it is renamed: at
    any moment, also after a crash, ``path`` is its old content or its new one. If the block raises,
    the temporary file is removed and ``path`` is unchanged. An existing file keeps its permissions.
    An error of the operating system has ``path`` as its ``filename``.
    """
    target = check_target(path)
    temporary = target.with_name(f"{PREFIX}{secrets.token_hex(6)}{SUFFIX}")
    with _named(path):
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                with suppress(FileNotFoundError):
                    os.fchmod(handle, stat.S_IMODE(os.stat(target).st_mode))
                yield file
                file.flush()
                os.fsync(handle)
            os.replace(temporary, check_target(path))
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def append(path: str | os.PathLike[str], content: bytes) -> None:
    """Appends bytes to a file, all of them or none; a file that is not there yet is created."""
    target = check_target(path)
    with _named(path), target.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            written = 0
            while written < len(content):
                written += file.write(content[written:]) or 0
        except BaseException:
            file.truncate(before)
            raise


def sentence(error: OSError) -> str:
    what = error.strerror or str(error) or type(error).__name__
    return f"{what}: {str(error.filename)!r}" if error.filename else what


@contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Gives an error of the operating system the path that the caller knows."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise
