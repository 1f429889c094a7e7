"""Writes safetensors files tensor by tensor: resumed after a kill, and there whole or not at all.

Everything is written into a folder of temporary files beside the target, which is renamed at the
end. Offsets are known before the first tensor is made. A journal has a line for each tensor whose
bytes are on the disk, so that a run that was killed continues after the last of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from .._output import PREFIX, TargetError, lock
from .._types import Json
from ..scaled import DTYPES, MOST_HEADER, NAMES
from ._files import BITS, UnreadableError
from ._packed import Decoded

SYNC = 64 << 20  # bytes between two synchronisations with the disk
JOURNAL = "journal.jsonl"


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
        """Returns the header of the file; metadata come first, as safetensors writes them."""
        header: dict[str, Json] = {"__metadata__": dict(self.metadata)} if self.metadata else {}
        offset = 0
        for job in self.jobs:
            for e in job.entries:
                if e.name in header:
                    raise UnreadableError(f"{self.name}: two tensors are called {e.name!r}")
                ends = [offset, offset + e.nbytes]
                header[e.name] = {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": ends}
                offset += e.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > MOST_HEADER:
            raise UnreadableError(f"{self.name}: a header of {len(text):,} bytes")
        return len(text).to_bytes(8, "little") + text


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """Yields a locked folder for temporary files beside a target; it stays if the block raises."""
    target = Path(os.path.abspath(target))
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise TargetError(f"cannot write {str(target)!r}: it exists; give another out (--out)")
    if not target.parent.is_dir():
        raise TargetError(
            f"cannot write {str(target)!r}: there is no folder {str(target.parent)!r}"
        )
    folder = target.with_name(f"{PREFIX}{target.name}.part")
    try:
        folder.mkdir(exist_ok=True)
        with lock(folder):
            yield folder
    except OSError as error:
        if str(error.filename or folder).startswith(str(folder)):  # not of the source
            error.filename = str(target)
        raise


def digest(*parts: object) -> str:
    """Returns an identity of what a run writes: two runs with the same one write equal bytes."""
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def write_shards(
    folder: Path, shards: Sequence[Shard], identity: str, told: Callable[[Json, int], None]
) -> int:
    """Writes files into a folder of :func:`staging`; returns how many jobs were there already.

    Jobs of an earlier run of the same identity are kept. ``told`` is called with the record and the
    bytes of each job, also of those.
    """
    journal = folder / JOURNAL
    done = _journal(journal, identity)
    if done is None:
        for path in folder.iterdir():
            if path.name != ".lock":
                path.unlink()
        journal.write_text(json.dumps({"identity": identity}) + "\n")
        done = []
    kept = len(done)
    with journal.open("a") as log:
        for shard in shards:
            done = _write_shard(folder / shard.name, shard, done, log, told)
    return kept


def _journal(path: Path, identity: str) -> list[Json] | None:
    """Returns the records of a journal of this run, None if there is none."""
    try:
        lines = path.read_text().splitlines(keepends=True)
        if not lines or json.loads(lines[0]).get("identity") != identity:
            return None
    except (OSError, ValueError, AttributeError):
        return None
    records = []
    for line in lines[1:]:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    whole = lines[: 1 + len(records)]
    if whole[-1][-1:] != "\n":  # the line that the kill cut off
        whole, records = whole[:-1], records[:-1]
    path.write_text("".join(whole))
    return records


def _write_shard(
    path: Path, shard: Shard, done: list[Json], log: IO[str], told: Callable[[Json, int], None]
) -> list[Json]:
    header = shard.header()
    kept, rest = done[: len(shard.jobs)], done[len(shard.jobs) :]
    size = len(header) + sum(e.nbytes for job in shard.jobs[: len(kept)] for e in job.entries)
    if kept and (not path.exists() or path.stat().st_size < size):
        kept, rest, size = [], [], len(header)
    for job, record in zip(shard.jobs, kept, strict=False):
        told(record, sum(e.nbytes for e in job.entries))
    if len(kept) == len(shard.jobs) and kept:
        return rest
    with path.open("r+b" if kept else "wb") as file:
        if kept:
            file.seek(size)
            file.truncate()
        else:
            file.write(header)
        waiting: list[Json] = []
        unsynced = 0
        for job in shard.jobs[len(kept) :]:
            arrays, record = job.make()
            for entry, x in zip(job.entries, arrays, strict=True):
                assert x.nbytes == entry.nbytes, f"{entry} got {x.nbytes} bytes"
                for part in x.streamed() if isinstance(x, Decoded) else (x,):
                    file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
            count = sum(e.nbytes for e in job.entries)
            waiting, unsynced = [*waiting, record], unsynced + count
            if unsynced >= SYNC:
                _sync(file, log, waiting)
                waiting, unsynced = [], 0
            told(record, count)
        _sync(file, log, waiting)
    return []


def _sync(file: IO[bytes], log: IO[str], records: Iterable[Json]) -> None:
    """Puts the bytes on the disk before the journal says that they are there."""
    file.flush()
    os.fsync(file.fileno())
    log.writelines(json.dumps(record) + "\n" for record in records)
    log.flush()
    os.fsync(log.fileno())


def publish(folder: Path, target: Path, one: str | None) -> None:
    """Renames the files to their target, a folder, or with ``one`` the file of that name."""
    target = Path(os.path.abspath(target))
    (folder / JOURNAL).unlink()
    for temporary in folder.glob(f"{PREFIX}*"):
        temporary.unlink()
    if one is not None:
        os.replace(folder / one, target)
        shutil.rmtree(folder)
        return
    (folder / ".lock").unlink(missing_ok=True)
    if target.is_dir():
        target.rmdir()
    os.rename(folder, target)


def entry_of(name: str, x: np.ndarray) -> FileEntry:
    if x.dtype not in NAMES:
        raise UnreadableError(f"{name!r} is {x.dtype}; safetensors has {', '.join(DTYPES)}")
    return FileEntry(name, NAMES[x.dtype], x.shape)
