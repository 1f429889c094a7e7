"""Reads text to train on: a file, a folder, or the sources of Python's standard library."""

import sysconfig
from pathlib import Path

from ..._check import Count, checked
from ..._user_file import InputError

LIMIT = 2_000_000  # bytes: enough for some thousand steps


@checked
def corpus(path: str | Path | None = None, limit: Count = LIMIT) -> bytes:
    """Returns the first `limit` bytes of a file, or of a folder's files in sorted order.

    Args:
        path: a file; a folder, whose files (hidden ones apart) are read in the order of their
            paths; or None for the modules of Python's standard library.
        limit: the largest number of bytes.

    Raises:
        InputError: there is no such file or folder, or it is empty.

    Example:
        >>> corpus(limit=3).decode().isprintable()
        True
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = sorted(root.glob("*.py"))
        if not files:
            raise InputError(f"no Python sources in {root}: name a text file or folder with --data")
    else:
        root = Path(path)
        if root.is_file():
            files = [root]
        elif root.is_dir():
            found = (p.relative_to(root) for p in root.rglob("*") if p.is_file())
            shown = (p for p in found if not any(part.startswith(".") for part in p.parts))
            files = sorted(root / p for p in shown)
        else:
            raise InputError(f"no data at {str(root)!r}; expected a text file or a folder")
    pieces, size = [], 0
    for file in files:
        try:
            with file.open("rb") as stream:
                pieces.append(stream.read(limit - size))
        except OSError as error:
            raise InputError(f"can't read data file {str(file)!r}: {error.strerror}") from None
        size += len(pieces[-1])
        if size >= limit:
            break
    if not size:
        raise InputError(f"no data in {str(root)!r}: it is empty, some text is needed")
    return b"".join(pieces)
