"""GGUF files, whose header the `gguf` package reads: tensors of floats, MXFP4 and NVFP4."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from .._extras import require
from .._output import check_source
from ._files import File, Tensor, UnreadableError

PLAIN = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")


def package() -> ModuleType:
    return require("gguf", "gguf", "reading .gguf files")


def open_gguf(path: Path) -> File:
    """Returns a GGUF file; tensors of types other than floats have the dtype ``GGUF_<type>``."""
    gguf = package()
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
    metadata = {key: field.types[0].name if field.types else "" for key, field in
                reader.fields.items()}  # fmt: skip
    file = File(path, {"gguf": str(len(metadata))})
    for t in reader.tensors:
        kind = t.tensor_type.name
        dtype = kind if kind in PLAIN else f"GGUF_{kind}"
        shape = tuple(int(n) for n in reversed(t.shape))
        start, nbytes = int(t.data_offset), int(t.n_bytes)
        if start + nbytes > size:
            raise UnreadableError(f"{path}: {t.name!r} ends after the file")
        file.tensors.append(Tensor(t.name, dtype, shape, file, start, nbytes))
    return file
