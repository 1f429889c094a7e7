"""Opens a checkpoint: its files, their tensors and configs, and what is wrong with them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .._types import Json
from ._files import File, Tensor, UnreadableError, open_file, read_json
from ._layouts import METHODS
from ._report import Fault, Finding


@dataclasses.dataclass(eq=False)
class Source:
    """Files, tensors, configs, and what is wrong with them."""

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
    """Returns what stands at a path: a safetensors file, an index, a folder.

    Missing shards, and missing, stale or duplicated tensors, become :attr:`Source.problems`.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if path.name.endswith(".index.json"):
        return _open_folder(path.parent, path)
    file = open_file(path)
    beside = path.parent if path.stem in ("model", "diffusion_pytorch_model") else None
    return _source(path, [file], beside)


def _open_folder(folder: Path, index: Path | None = None) -> Source:
    index = index or next(iter(sorted(folder.glob("*.safetensors.index.json"))), None)
    if index is None:
        names = sorted(p.name for p in folder.glob("*.safetensors"))
        if not names:
            raise UnreadableError(f"{folder} holds no .safetensors file and no index of them")
        if "model.safetensors" in names and len(names) > 1:  # others are adapters, say
            names = ["model.safetensors"]
        return _source(folder, [open_file(folder / name) for name in names], folder)
    weights = read_json(index).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(v, str) for v in weights.values()):
        raise UnreadableError(f"{index}: weight_map isn't an object of file names")
    files, problems = [], list[Finding]()
    for name in dict.fromkeys(weights.values()):
        if Path(name).name != name or name in ("", ".", ".."):
            raise UnreadableError(f"{index}: the shard {name[:80]!r} isn't a file of the folder")
        if (folder / name).exists():
            files.append(open_file(folder / name))
        else:
            lost = tuple(t for t, shard in weights.items() if shard == name)
            what = f"the shard {name} isn't there; the index puts {len(lost)} tensors there"
            problems.append(Finding(Fault.SHARD_MISSING, lost, what))
    source = _source(folder, files, folder)
    source.problems[:0] = problems
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
    source.problems = [
        dataclasses.replace(p, ambiguous=False) if set(p.tensors) <= weights.keys() else p
        for p in source.problems
    ]


def _source(path: Path, files: list[File], folder: Path | None = None) -> Source:
    tensors, problems = dict[str, Tensor](), list[Finding]()
    for file in files:
        for t in file.tensors:
            if t.name in tensors:
                where = f"{tensors[t.name].file.path.name} and {file.path.name}"
                same = np.array_equal(tensors[t.name].bytes, t.bytes)
                what = f"{t.name!r} is in {where}, with {'equal' if same else 'different'} bytes"
                found = Finding(Fault.TENSOR_DUPLICATED, (t.name,), what, ambiguous=not same)
                problems.append(found)
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


NESTED = ("text_config", "llm_config")  # of a config, where a model of several has them
QUANTIZATION = ("quantization_config", "compression_config")


def without_quantization(config: Mapping[str, Json]) -> dict[str, Json]:
    """Returns a config without what :func:`open_source` reads of the quantisation."""
    found = {k: v for k, v in config.items() if k not in QUANTIZATION}
    nested = {k: found[k] for k in NESTED if isinstance(found.get(k), dict)}
    return found | {k: without_quantization(v) for k, v in nested.items()}


def _quantization(config: Mapping[str, Json]) -> dict[str, Json]:
    for place in (config, *(config.get(k) for k in NESTED)):
        for key in QUANTIZATION:
            found = place.get(key) if isinstance(place, Mapping) else None
            if isinstance(found, dict):
                return found
    return {}


def family_of(source: Source) -> tuple[str | None, str]:
    metadata, method = source.metadata, source.quantization.get("quant_method")
    for key, family in (("tensor_names", "torchao"), ("_quantization_metadata", "comfyui"),
                        ("scalewise", "scalewise")):  # fmt: skip
        if key in metadata:
            return family, f"the header's metadata has {key!r}"
    if any(name.endswith(".comfy_quant") for name in source.tensors):
        return "comfyui", "tensors are called *.comfy_quant"
    if method is None and "quant_algo" in source.quantization:
        method = "modelopt"
    if isinstance(method, str) and method in METHODS:
        return METHODS[method], f"quant_method is {method!r}"
    return None, "no config and no metadata names a layout" if method is None else (
        f"quant_method is {method!r}, which is not known")  # fmt: skip
