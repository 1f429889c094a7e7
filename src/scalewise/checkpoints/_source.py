"""The checkpoint at a path: a file, an index, or a folder of shards, with its configs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .._output import counted
from .._types import Json
from ._files import File, Tensor, UnreadableError, open_file, open_gguf, read_json
from ._orbax import MARK, open_orbax
from ._report import Fault, Finding


@dataclasses.dataclass(eq=False)
class Source:
    """What stands on the disk at a path: files, tensors, configs, and what is wrong with them."""

    path: Path
    files: list[File]
    tensors: dict[str, Tensor]
    config: dict[str, Json]
    quantization: dict[str, Json]
    problems: list[Finding]

    @property
    def metadata(self) -> dict[str, str]:
        return {key: text for file in self.files for key, text in file.metadata.items()}


def open_source(path: str | os.PathLike[str]) -> Source:
    """Returns what stands at a path: a safetensors or GGUF file, an index, a folder of them, or
    one that Orbax wrote.

    Shards that the index names and tensors that are missing, stale or duplicated don't raise: they
    become :attr:`Source.problems`.

    Raises:
        UnreadableError: there is no such file in the folder, or one of them can't be read.
        OSError: a file can't be read.
    """
    path = Path(path)
    if (path / MARK).is_file():
        return _source(path, [open_orbax(path)], [], None)
    if path.is_dir():
        return _open_folder(path)
    if path.name.endswith(".index.json"):
        return _open_folder(path.parent, path)
    if path.suffix == ".gguf":
        files = [open_gguf(path)]
    else:
        files = [open_file(path)]
    beside = path.parent if path.stem in ("model", "diffusion_pytorch_model") else None
    return _source(path, files, [], beside)


def _open_folder(folder: Path, index: Path | None = None) -> Source:
    problems: list[Finding] = []
    index = index or next(iter(sorted(folder.glob("*.safetensors.index.json"))), None)
    if index is None:
        names = sorted(p.name for p in folder.glob("*.safetensors"))
        if not names:
            raise UnreadableError(f"{folder} holds no .safetensors file and no index of them")
        if "model.safetensors" in names and len(names) > 1:  # others are adapters, say
            names = ["model.safetensors"]
        return _source(folder, [open_file(folder / name) for name in names], problems, folder)
    weights = read_json(index).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(v, str) for v in weights.values()):
        raise UnreadableError(f"{index}: weight_map isn't an object of file names")
    files = []
    for name in dict.fromkeys(weights.values()):
        if Path(name).name != name or name in ("", ".", ".."):
            raise UnreadableError(f"{index}: the shard {name[:80]!r} isn't a file of the folder")
        if (folder / name).exists():
            files.append(open_file(folder / name))
        else:
            lost = tuple(t for t, shard in weights.items() if shard == name)
            what = (
                f"the shard {name} isn't there; the index puts {counted(len(lost), 'tensor')} there"
            )
            problems.append(Finding(Fault.SHARD_MISSING, lost, what))
    source = _source(folder, files, problems, folder)
    _compare_with_index(source, weights)
    return source


def _compare_with_index(source: Source, weights: Mapping[str, str]) -> None:
    there = {(t.name, file.path.name) for file in source.files for t in file.tensors}
    opened = {file.path.name for file in source.files}
    for name, shard in weights.items():
        if shard in opened and (name, shard) not in there:
            what = f"{name!r} isn't in {shard}, where the index puts it"
            source.problems.append(Finding(Fault.TENSOR_MISSING, (name,), what))
    for name, shard in sorted(there):
        if name not in weights:
            what = f"{name!r} is in {shard}, but not in the index: loaders that use it skip it"
            source.problems.append(Finding(Fault.TENSOR_STALE, (name,), what))
    for file in source.files:  # of a duplicate, the index says which one counts
        for t in file.tensors:
            if weights.get(t.name) == file.path.name:
                source.tensors[t.name] = t


def _source(path: Path, files: list[File], problems: list[Finding], folder: Path | None) -> Source:
    tensors: dict[str, Tensor] = {}
    for file in files:
        for t in file.tensors:
            if t.name in tensors:
                where = f"{tensors[t.name].file.path.name} and {file.path.name}"
                same = np.array_equal(tensors[t.name].bytes, t.bytes)
                what = f"{t.name!r} is in {where}, with {'equal' if same else 'different'} bytes"
                problems.append(Finding(Fault.TENSOR_DUPLICATED, (t.name,), what))
            tensors.setdefault(t.name, t)
    config: dict[str, Json] = {}
    quantization: dict[str, Json] = {}
    if folder is not None and (folder / "config.json").is_file():
        config = read_json(folder / "config.json")
        quantization = _quantization(config)
    if folder is not None and (folder / "hf_quant_config.json").is_file():
        found = read_json(folder / "hf_quant_config.json").get("quantization")
        found = found if isinstance(found, dict) else {}
        quantization = {"quant_method": "modelopt", **found} | quantization
    return Source(path, files, tensors, config, quantization, problems)


def _quantization(config: Mapping[str, Json]) -> dict[str, Json]:
    places = (config, config.get("text_config"), config.get("llm_config"))
    for place in places:
        for key in ("quantization_config", "compression_config"):
            found = place.get(key) if isinstance(place, Mapping) else None
            if isinstance(found, dict):
                return found
    return {}
