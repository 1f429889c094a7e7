"""Writes safetensors files tensor by tensor, which are there whole or not at all.

Everything is written into a folder of temporary files beside the target, which is renamed at the
end. Offsets are known before the first tensor is made.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from .._output import PREFIX, TargetError
from .._types import Json
from ..scaled import DTYPES, NAMES, header_of
from ._files import BITS, UnreadableError
from ._packed import Decoded


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """A tensor to write: its name, safetensors' name of its dtype, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * BITS[self.dtype] // 8


@dataclasses.dataclass(frozen=True)
class Job:
    """Tensors that are made together, and the function that makes their bytes and a record."""

    entries: tuple[FileEntry, ...]
    make: Callable[[], tuple[Sequence[np.ndarray | Decoded], Json]]


@dataclasses.dataclass(frozen=True)
class Shard:
    name: str
    metadata: Mapping[str, str]
    jobs: Sequence[Job]

    def header(self) -> bytes:
        entries = (entry for job in self.jobs for entry in job.entries)
        tensors = ((e.name, e.dtype, e.shape, e.nbytes) for e in entries)
        return header_of(self.name, tensors, self.metadata)


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """Yields a folder for temporary files beside a target, which is removed at the end."""
    target = Path(os.path.abspath(target))
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise TargetError(f"cannot write {str(target)!r}: it exists; give another out (--out)")
    if not target.parent.is_dir():
        raise TargetError(
            f"cannot write {str(target)!r}: there is no folder {str(target.parent)!r}"
        )
    folder = target.with_name(f"{PREFIX}{target.name}.{secrets.token_hex(6)}")
    try:
        folder.mkdir()
        yield folder
    except OSError as error:
        if str(error.filename or folder).startswith(str(folder)):  # not of the source
            error.filename = str(target)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_shards(folder: Path, shards: Sequence[Shard], told: Callable[[Json, int], None]) -> None:
    """Writes files into a folder; ``told`` is called with the record and the bytes of each job."""
    for shard in shards:
        with (folder / shard.name).open("wb") as file:
            file.write(shard.header())
            for job in shard.jobs:
                arrays, record = job.make()
                for entry, x in zip(job.entries, arrays, strict=True):
                    assert x.nbytes == entry.nbytes, f"{entry} got {x.nbytes} bytes"
                    for part in x.streamed() if isinstance(x, Decoded) else (x,):
                        file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
                told(record, sum(e.nbytes for e in job.entries))
            file.flush()
            os.fsync(file.fileno())


def publish(folder: Path, target: Path, one: str | None) -> None:
    """Renames the files to their target, a folder, or with ``one`` the file of that name."""
    target = Path(os.path.abspath(target))
    if one is not None:
        os.replace(folder / one, target)
        return
    if target.is_dir():
        target.rmdir()
    os.rename(folder, target)


def entry_of(name: str, x: np.ndarray) -> FileEntry:
    if x.dtype not in NAMES:
        raise UnreadableError(f"{name!r} is {x.dtype}; safetensors has {', '.join(DTYPES)}")
    return FileEntry(name, NAMES[x.dtype], x.shape)
