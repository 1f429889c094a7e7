"""Tensors of a file or folder on disk, memory-mapped: headers, shards, indices and configs.

A safetensors file is eight bytes of length, a JSON header, and the tensors' bytes
(https://github.com/huggingface/safetensors#format). Nothing is read but headers and JSON
files; the `gguf` package reads the header of a GGUF file.
"""

from __future__ import annotations

import dataclasses
import json
import math
from functools import cached_property
from pathlib import Path

import numpy as np

from .._extras import require
from .._output import check_source
from .._types import Json
from ..scaled._safetensors import DTYPES, MOST_HEADER

BITS = {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()} | {"F4": 4}
GGUF_PLAIN = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")
MOST_JSON = 64_000_000  # bytes of an index or a config


class UnreadableError(ValueError):
    """A checkpoint can't be read, or doesn't hold what was asked for; the message says why."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor of a file; its bytes are read when :meth:`array` is used.

    Attributes:
        name: in the file.
        dtype: safetensors' name of the dtype.
        shape: of the tensor; of sub-byte dtypes the number of elements.
        file: the mapped file.
        start: offset of its first byte in the file.
        nbytes: number of its bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: File
    start: int
    nbytes: int

    @property
    def bytes(self) -> np.ndarray:
        return self.file.mapped[self.start : self.start + self.nbytes]

    def array(self) -> np.ndarray:
        """Returns the mapped array, read-only; of F4, its packed bytes."""
        if self.dtype == "F4" or self.dtype.startswith("GGUF_"):
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
    """Returns the object in a JSON file."""
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
    size = check_source(path)
    with path.open("rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
        if size < 8 or length > min(size - 8, MOST_HEADER):
            raise UnreadableError(
                f"{path} is no complete safetensors file: a header of {length:,} bytes in a file "
                f"of {size:,}"
            )
        header = _object(raw.read(length), f"the header of {path}")
    metadata = header.pop("__metadata__", {})
    texts = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not texts:
        raise UnreadableError(f"{path}: __metadata__ isn't an object of strings")
    file = File(path, metadata)
    entries = [_entry(path, name, fields) for name, fields in header.items()]
    end = 8 + length
    for name, dtype, shape, start, stop in sorted(entries, key=lambda e: (e[3], e[4])):
        if 8 + length + start != end or stop < start:
            raise UnreadableError(f"{path}: the bytes of {name!r} overlap others, or leave a gap")
        bits = BITS[dtype] * math.prod(shape)
        if bits != 8 * (stop - start):
            raise UnreadableError(
                f"{path}: {name!r} has {stop - start:,} bytes; {dtype} of shape {shape} has "
                f"{bits / 8:,.0f}"
            )
        file.tensors.append(Tensor(name, dtype, shape, file, end, stop - start))
        end += stop - start
    if end != size:
        raise UnreadableError(
            f"{path} is no complete safetensors file: {size:,} bytes, not {end:,}"
        )
    return file


def _entry(path: Path, name: str, fields: Json) -> tuple[str, str, tuple[int, ...], int, int]:
    dtype, shape, start, stop = None, (), 0, 0
    try:
        dtype, shape = fields["dtype"], fields["shape"]
        start, stop = fields["data_offsets"]
        numbers = [*shape, start, stop]
        valid = all(type(n) is int and 0 <= n < 1 << 62 for n in numbers) and len(shape) <= 64
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise UnreadableError(f"{path}: the header's entry of {name[:80]!r} is invalid")
    if dtype not in BITS:
        raise UnreadableError(f"{path}: {name!r} is {str(dtype)[:40]}; known: {', '.join(BITS)}")
    return name, dtype, tuple(shape), start, stop


def open_gguf(path: Path) -> File:
    """Returns a GGUF file; tensors of types other than floats have the dtype ``GGUF_<type>``."""
    gguf = require("gguf", "gguf", "reading .gguf files")
    size = check_source(path)
    with path.open("rb") as raw:
        if raw.read(4) != b"GGUF":
            raise UnreadableError(f"{path} is no GGUF file")
    try:
        reader = gguf.GGUFReader(path)
    except OSError:
        raise
    except Exception as error:  # the package checks little before it reads
        raise UnreadableError(f"{path} is no complete GGUF file ({error!r})") from None
    file = File(path, {"gguf": str(len(reader.fields))})
    for t in reader.tensors:
        kind = t.tensor_type.name
        dtype = kind if kind in GGUF_PLAIN else f"GGUF_{kind}"
        shape = tuple(int(n) for n in reversed(t.shape))
        start, nbytes = int(t.data_offset), int(t.n_bytes)
        if start + nbytes > size:
            raise UnreadableError(f"{path}: {t.name!r} ends after the file")
        file.tensors.append(Tensor(t.name, dtype, shape, file, start, nbytes))
    return file
