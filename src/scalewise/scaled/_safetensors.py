"""Tensors and scaled arrays in `.safetensors` files: written beside, renamed, read again exactly.

A file is eight bytes of length, a JSON header, and the tensors' bytes
(https://github.com/huggingface/safetensors#format). A ScaledArray is the tensor of its name and
``<name>.scale``, its scale's own scale ``<name>.scale.scale``; an EncodedArray is its codes; what
else they need stands in the header's metadata under ``"scalewise"``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ..formats import Format
from ..rounding import EncodedArray
from ._array import ScaledArray

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": "f8", "F32": "f4", "F16": "f2", "BF16": ml_dtypes.bfloat16,
        "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1",
        "U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "?", "C64": "c8",
        "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    }.items()
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_HEADER = 100_000_000  # the format's own limit


def save_safetensors(path: str | os.PathLike, arrays: Mapping[str, Any]) -> None:
    """Writes arrays to a file: beside it, then renamed, so that no half file is ever seen.

    Args:
        path: where to.
        arrays: names to NumPy or JAX arrays, EncodedArrays or ScaledArrays.

    Raises:
        ValueError: a dtype that safetensors doesn't have, or a name that is taken by a scale.
    """
    path = Path(path)
    plain: dict[str, np.ndarray] = {}
    notes: dict[str, dict[str, Any]] = {}
    for name, value in arrays.items():
        parts = {name: value}
        if isinstance(value, ScaledArray | EncodedArray):
            parts, notes[name] = _parts(name, value)
        for key, part in parts.items():
            if key in plain or (key != name and key in arrays):
                raise ValueError(f"{path.name}: two tensors are called {key!r}")
            plain[key] = np.asarray(part)
    metadata = {"scalewise": json.dumps(notes)} if notes else {}
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(_header(path, plain, metadata))
            for x in plain.values():
                file.write(np.ascontiguousarray(x).tobytes())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def load_safetensors(path: str | os.PathLike) -> dict[str, np.ndarray | ScaledArray | EncodedArray]:
    """The arrays of a file, of the classes that :func:`save_safetensors` was given.

    Raises:
        ValueError: the file is truncated, or no safetensors file, or holds a dtype unknown here.
    """
    path = Path(path)
    arrays, metadata = _read(path)
    result: dict[str, Any] = dict(arrays)
    try:
        for name, note in json.loads(metadata.get("scalewise", "{}")).items():
            result[name] = _joined(name, note, result)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: its scales can't be read ({error!r})") from None
    return result


def _parts(name: str, value: Any) -> tuple[dict[str, Any], Any]:
    """The tensors that an array is made of, and what else it takes to join them again."""
    if isinstance(value, EncodedArray):
        fmt = {f.name: getattr(value.format, f.name) for f in dataclasses.fields(value.format)}
        return {name: value.codes}, {"format": fmt, "length": value.length}
    if isinstance(value, ScaledArray):
        data, of_data = _parts(name, value.data)
        scale, of_scale = _parts(f"{name}.scale", value.scale)
        return data | scale, {"block": value.block, "data": of_data, "scale": of_scale}
    return {name: value}, None


def _joined(name: str, note: Any, arrays: dict[str, Any]) -> Any:
    """What :func:`_parts` took apart; its tensors are taken out of ``arrays``."""
    if note is None:
        return jnp.asarray(arrays.pop(name))
    if "format" in note:
        return EncodedArray(jnp.asarray(arrays.pop(name)), Format(**note["format"]), note["length"])
    data = _joined(name, note["data"], arrays)
    scale = _joined(f"{name}.scale", note["scale"], arrays)
    return ScaledArray(data, scale, tuple(note["block"]) if note["block"] else None)


def _header(path: Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, x in arrays.items():
        if x.dtype not in NAMES:
            raise ValueError(
                f"{path.name}: {name!r} is {x.dtype}; safetensors has {', '.join(map(str, NAMES))}"
            )
        ends = [offset, offset + x.nbytes]
        header[name] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": ends}
        offset += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors in the order of their bytes, and the metadata."""

    def broken(why: str) -> ValueError:
        return ValueError(f"{path} is no complete safetensors file: {why}")

    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or length > MOST_HEADER or 8 + length > len(raw):
        raise broken(f"a header of {length:,} bytes in a file of {len(raw):,}")
    try:
        header = json.loads(raw[8 : 8 + length])
        metadata = header.pop("__metadata__", {})
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        arrays, end = {}, 0
        for name, entry in entries:
            if entry["dtype"] not in DTYPES:
                raise broken(f"{name!r} is {entry['dtype']}; known: {', '.join(DTYPES)}")
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            first, last = entry["data_offsets"]
            if first != end or last - first != math.prod(shape) * dtype.itemsize:
                raise broken(f"{name!r} of shape {shape} lies at bytes {first} to {last}")
            if 8 + length + last > len(raw):
                raise broken(f"{name!r} ends at byte {8 + length + last:,} of {len(raw):,}")
            here = raw[8 + length + first : 8 + length + last]
            arrays[name] = np.frombuffer(here, dtype).reshape(shape)
            end = last
    except (AttributeError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise broken(f"a header that can't be read ({type(error).__name__})") from None
    if 8 + length + end != len(raw):
        raise broken(f"{len(raw) - 8 - length - end:,} bytes belong to no tensor")
    return arrays, metadata
