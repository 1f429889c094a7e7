"""Tensors and scaled arrays in `.safetensors` files: written beside, renamed, read again exactly.

A file is eight bytes of length, a JSON header, and the tensors' bytes
(https://github.com/huggingface/safetensors#format). A ScaledArray is the tensor of its name and
``<name>.scale``, its scale's own scale ``<name>.scale.scale``; an EncodedArray is its codes; what
else they need stands in the header's metadata under ``"scalewise"``.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
from jax.typing import ArrayLike

from .._check import Range, checked
from .._output import check_source, replacing
from .._types import Json
from ..formats import Format, check_codes
from ..rounding import EncodedArray, is_packed
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
Loaded: TypeAlias = np.ndarray | jax.Array | ScaledArray | EncodedArray
Tensor: TypeAlias = ArrayLike | ScaledArray | EncodedArray
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_HEADER = 100_000_000  # the format's own limit


def _is_name(text: str) -> bool:
    return text != "__metadata__" and not any("\ud800" <= c <= "\udfff" for c in text)


Name: TypeAlias = Annotated[str, Range(_is_name, "a name (UTF-8, not '__metadata__')")]


@checked
def save_safetensors(path: str | os.PathLike, arrays: Mapping[Name, Tensor]) -> None:
    """Writes arrays to a file; on failure, a file that was there stays unchanged.

    Args:
        path: of the file.
        arrays: names to NumPy or JAX arrays, EncodedArrays or ScaledArrays.

    Raises:
        TypeError, ValueError: a dtype or a name that safetensors doesn't have, a name that is taken
            by a scale, or a path that is not a regular file.
        OSError: the file can't be written.
    """
    path = Path(path)
    plain: dict[str, np.ndarray] = {}
    records: dict[str, Json] = {}
    for name, value in arrays.items():
        parts = {name: value}
        if isinstance(value, ScaledArray | EncodedArray):
            parts, records[name] = parts_of(name, value)
        for key, part in parts.items():
            if key in plain or (key != name and key in arrays):
                raise ValueError(f"{path.name}: two tensors are called {key!r}")
            plain[key] = x = np.asarray(part)
            if x.dtype not in NAMES:
                known = ", ".join(map(str, NAMES))
                raise ValueError(f"{path.name}: {key!r} is {x.dtype}; safetensors has {known}")
    metadata = {"scalewise": json.dumps(records)} if records else {}
    tensors = ((key, NAMES[x.dtype], x.shape, x.nbytes) for key, x in plain.items())
    header = header_of(path.name, tensors, metadata)
    with replacing(path) as file:
        file.write(header)
        for x in plain.values():
            file.write(np.ascontiguousarray(x).tobytes())


@checked
def load_safetensors(path: str | os.PathLike) -> dict[str, Loaded]:
    """Returns the arrays of a file, of the classes that :func:`save_safetensors` was given.

    It rejects what safetensors' own reader rejects, and also a dtype that NumPy and ml_dtypes don't
    have (sub-byte ones), and scales or codes that :func:`save_safetensors` doesn't write.

    Raises:
        ValueError: the file is truncated, or no safetensors file, or holds a dtype unknown here.
        OSError: it can't be read.
    """
    path = Path(path)
    arrays, metadata = _read(path)
    result: dict[str, Loaded] = dict(arrays)
    try:
        records = json.loads(metadata.get("scalewise", "{}"))
        for name, record in records.items():
            result[name] = join_parts(name, record, result)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its scales can't be read ({error!r})") from None
    return result


def parts_of(name: str, value: Tensor) -> tuple[dict[str, ArrayLike], Json]:
    """Returns the tensors of which an array consists, and a record of how to join them again."""
    if isinstance(value, EncodedArray):
        fmt = {f.name: getattr(value.format, f.name) for f in dataclasses.fields(value.format)}
        return {name: value.codes}, {"format": fmt, "length": value.length}
    if isinstance(value, ScaledArray):
        parts, of_data = parts_of(name, value.data)
        block = value.block and (value.block[0] + value.ndim, value.block[1])
        record: dict[str, Json] = {"block": block, "data": of_data}
        if value.value_dtype is not None:
            record["dtype"] = value.value_dtype.name
        if value.scale is not None:
            more, record["scale"] = parts_of(f"{name}.scale", value.scale)
            parts |= more
        return parts, record
    return {name: value}, None


def join_parts(
    name: str, record: Json, arrays: MutableMapping[str, Loaded]
) -> jax.Array | ScaledArray | EncodedArray:
    """Raises KeyError, TypeError or ValueError for a record that :func:`parts_of` doesn't make."""
    if record is None:
        return jnp.asarray(arrays.pop(name))
    if set(record) == {"format", "length"}:
        return _encoded(arrays.pop(name), Format(**record["format"]), record["length"])
    if not {"block", "data"} <= set(record) <= {"block", "data", "dtype", "scale"}:
        raise ValueError(f"{name!r} is described by {sorted(record)}")
    data = join_parts(name, record["data"], arrays)
    scale = join_parts(f"{name}.scale", record["scale"], arrays) if "scale" in record else None
    block = record["block"]
    if block is not None:
        if not (isinstance(block, list) and [type(n) for n in block] == [int, int]):
            raise ValueError(f"the block of {name!r} is {block!r}")
        block = tuple(block)
    if isinstance(data, ScaledArray) or not _is_float(data):
        raise ValueError(f"the data of {name!r} are {data.dtype}")
    if not (scale is None or isinstance(scale, ScaledArray) or _is_float(scale)):
        raise ValueError(f"the scale of {name!r} is {scale.dtype}")
    dtype = jnp.dtype(record["dtype"]) if "dtype" in record else None
    joined = ScaledArray(data, scale, block, dtype)
    if block is not None and scale is not None:
        blocks = -(-data.shape[block[0]] // block[1])
        if scale.ndim != data.ndim or scale.shape[block[0]] != blocks:
            raise ValueError(f"a scale of shape {scale.shape} for {blocks} blocks")
    return joined


def _is_float(x: jax.Array | ScaledArray | EncodedArray) -> bool:
    return isinstance(x, EncodedArray) or jnp.issubdtype(x.dtype, jnp.floating)


def _encoded(codes: Json, fmt: Format, length: Json) -> EncodedArray:
    if type(length) is not int or length < 0:
        raise ValueError(f"a length of {length!r}")
    packed = is_packed(fmt)
    if codes.dtype != (np.uint8 if packed else fmt.code_dtype):
        raise ValueError(f"codes of {fmt.name} in {codes.dtype}")
    if packed and (codes.ndim == 0 or codes.shape[-1] != -(-length * fmt.bits // 8)):
        raise ValueError(f"{length} codes of {fmt.bits} bits in bytes of shape {codes.shape}")
    if not packed:
        if length:
            raise ValueError(f"a length of {length} for codes that aren't packed")
        if getattr(codes, "is_fully_addressable", True):  # other hosts check their own shards
            check_codes(fmt, np.asarray(codes))
    return EncodedArray(jnp.asarray(codes), fmt, length)


def header_of(
    what: str, tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]
) -> bytes:
    """Returns the header of a file of tensors: their names, safetensors' dtypes, shapes, bytes."""
    header: dict[str, Json] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape, size in tensors:
        if name in header:
            raise ValueError(f"{what}: two tensors are called {name!r}")
        ends = [offset, offset + size]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": ends}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_HEADER:
        raise ValueError(f"{what}: a header of {len(text):,} bytes; at most {MOST_HEADER:,}")
    return len(text).to_bytes(8, "little") + text


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    check_source(path)
    arrays: dict[str, np.ndarray] = {}
    try:
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        tensors = safetensors.deserialize(raw)  # checks the header and all offsets
        metadata = json.loads(raw[8 : 8 + length]).get("__metadata__") or {}
    except (safetensors.SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no complete safetensors file: {error}") from None
    for name, tensor in tensors:
        if tensor["dtype"] not in DTYPES:
            known = ", ".join(DTYPES)
            raise ValueError(f"{path}: {name!r} is {tensor['dtype']}; known: {known}")
        try:
            arrays[name] = np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]])
            arrays[name] = arrays[name].reshape(tensor["shape"])
        except ValueError as error:  # more than 64 dimensions, say
            raise ValueError(f"{path}: NumPy has no shape {tensor['shape']} ({error})") from None
    return arrays, metadata
