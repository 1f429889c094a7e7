"""Tensors of a file on disk, memory-mapped.

Nothing is read but headers and JSON files. A safetensors file is eight bytes of length, a JSON
header, and the tensors' bytes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import dataclasses
import json
from functools import cached_property
from pathlib import Path

import numpy as np
import safetensors

from .._output import check_source
from .._types import Json
from ..scaled import DTYPES

BITS = {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()} | {"F4": 4}
MOST_JSON = 64_000_000  # bytes of an index or a config


class UnreadableError(ValueError):
    """A checkpoint can't be read, or doesn't hold what was asked for; the message says why."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor of a file; its bytes are read when :meth:`array` is used."""

    name: str
    dtype: str  # safetensors' name of it
    shape: tuple[int, ...]  # of sub-byte dtypes too, the number of elements
    file: File
    start: int  # offset of its first byte in the file
    nbytes: int

    @property
    def bytes(self) -> np.ndarray:
        return self.file.mapped[self.start : self.start + self.nbytes]

    def array(self) -> np.ndarray:
        """Returns the mapped array, read-only; of F4, its packed bytes."""
        if self.dtype == "F4":
            return self.bytes.reshape(*self.shape[:-1], -1)
        return self.bytes.view(DTYPES[self.dtype]).reshape(self.shape)


@dataclasses.dataclass(eq=False)
class File:
    """A mapped file with its tensors in the order of their bytes, and its metadata."""

    path: Path
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)
    tensors: list[Tensor] = dataclasses.field(default_factory=list)

    @cached_property
    def mapped(self) -> np.ndarray:
        if not self.path.stat().st_size:
            return np.zeros(0, np.uint8)
        return np.memmap(self.path, np.uint8, "r")


def read_json(path: Path) -> dict[str, Json]:
    size = check_source(path)
    if size > MOST_JSON:
        raise UnreadableError(f"{path} has {size:,} bytes; expected at most {MOST_JSON:,}")
    return _object(path.read_bytes(), str(path))


def _object(text: bytes, what: str) -> dict[str, Json]:
    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key occurs twice")
        return found

    try:
        found = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{what} is no JSON ({type(error).__name__}: {error})") from None
    if not isinstance(found, dict):
        raise UnreadableError(f"{what} holds no JSON object")
    return found


def open_file(path: Path) -> File:
    """Returns a safetensors file, of which only the header is read."""
    check_source(path)
    try:
        with safetensors.safe_open(path, "numpy"):  # checks the header and all offsets
            pass
    except (safetensors.SafetensorError, ValueError) as error:
        raise UnreadableError(
            f"{path} is no complete safetensors file: {str(error)[:200]}"
        ) from None
    with path.open("rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
        header = _object(raw.read(length), f"the header of {path}")
    file = File(path, header.pop("__metadata__", None) or {})
    for name, fields in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (start, stop) = fields["dtype"], fields["shape"], fields["data_offsets"]
        if dtype not in BITS or len(shape) > 64:
            what = f"of {len(shape)} axes" if dtype in BITS else dtype
            raise UnreadableError(f"{path}: {name!r} is {what}; known: {', '.join(BITS)}")
        at = 8 + length + start
        file.tensors.append(Tensor(name, dtype, tuple(shape), file, at, stop - start))
    return file
