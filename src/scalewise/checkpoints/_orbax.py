"""Folders that Orbax writes: each array is restored when it is used."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from .._extras import require
from .._output import replacing
from .._types import Json
from ..scaled._safetensors import NAMES, _parts
from ._files import File, Tensor, UnreadableError, read_json

MARK = "scalewise.json"  # says how the parts of ScaledArrays are joined; without it the save failed


@dataclasses.dataclass(frozen=True, eq=False)
class OrbaxTensor(Tensor):
    """A tensor that Orbax restores.

    Attributes:
        stored: the dtype on the disk, where 8-bit floats are integers.
        numpy: the dtype of its numbers.
    """

    stored: np.dtype
    numpy: np.dtype

    def restored(self, sharding: jax.sharding.Sharding) -> jax.Array:
        """Returns the array; each host reads the shards of its own devices."""
        ocp = require("orbax.checkpoint", "train", "the layout orbax")
        arguments = {self.name: ocp.ArrayRestoreArgs(sharding=sharding)}
        item = {self.name: jax.ShapeDtypeStruct(self.shape, self.stored)}
        how = ocp.args.PyTreeRestore(item=item, restore_args=arguments, partial_restore=True)
        with ocp.PyTreeCheckpointer() as reader:
            found = reader.restore(self.file.path.parent / "arrays", args=how)[self.name]
        return found.view(self.numpy)

    def array(self) -> np.ndarray:
        return np.asarray(self.restored(jax.sharding.SingleDeviceSharding(jax.devices()[0])))

    @property
    def bytes(self) -> np.ndarray:
        return np.ascontiguousarray(self.array()).reshape(-1).view(np.uint8)


def open_orbax(folder: Path) -> File:
    """Returns the arrays of a folder; nothing but its metadata is read."""
    found = read_json(folder / MARK)
    ocp = require("orbax.checkpoint", "train", "the layout orbax")
    try:
        records = {n: r for n, r in dict(found["records"]).items() if r is not None}
        dtypes = {n: jax.numpy.dtype(d) for n, d in dict(found["dtypes"]).items()}
        with ocp.PyTreeCheckpointer() as reader:
            meta = reader.metadata(folder / "arrays")
        meta = getattr(meta, "item_metadata", meta)
        there = {n: getattr(meta, "tree", meta)[n] for n in dtypes}
    except (AttributeError, KeyError, TypeError, ValueError, FileNotFoundError) as error:
        raise UnreadableError(f"{folder / MARK} is damaged ({error!r})") from None
    file = File(folder / MARK, {"scalewise": json.dumps(records)})
    for name, dtype in dtypes.items():
        shape = tuple(there[name].shape)
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        kind = NAMES.get(dtype, str(dtype))
        stored = np.dtype(there[name].dtype)
        file.tensors.append(OrbaxTensor(name, kind, shape, file, 0, size, stored, dtype))
    return file


def save_orbax(path: str | os.PathLike[str], flat: Mapping[str, Json]) -> None:
    path = Path(os.path.abspath(path))
    if path.exists():
        raise ValueError(f"save: {str(path)!r} exists")
    arrays, records = {}, {}
    for name, x in flat.items():
        parts, records[name] = _parts(name, x)
        arrays |= parts
    dtypes = {name: str(np.dtype(x.dtype)) for name, x in arrays.items()}
    bits = {name: _as_bits(x) for name, x in arrays.items()}
    ocp = require("orbax.checkpoint", "train", "the layout orbax")
    try:
        with ocp.StandardCheckpointer() as writer:
            writer.save(path / "arrays", bits)
    except Exception as error:
        if jax.process_index() == 0:
            shutil.rmtree(path, ignore_errors=True)
        if "No space left" in str(error):  # which TensorStore reports as a ValueError
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise
    if jax.process_index() == 0:
        text = json.dumps({"records": records, "dtypes": dtypes})
        with replacing(path / MARK) as file:
            file.write(text.encode())


def _as_bits(x: Json) -> jax.Array:
    """Returns narrow floats as integers of their bits, which every storage format has."""
    x = jax.numpy.asarray(x)
    return x.view(np.uint8) if x.dtype.itemsize == 1 and x.dtype != bool else x
