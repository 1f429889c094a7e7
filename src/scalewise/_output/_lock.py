"""A lock on a folder, held by one process."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .._user_file import InputError

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
