"""Finds the files of a checkpoint, with their configs, and its weights, by the layouts."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from .._types import Json
from ._files import (
    MARK,
    File,
    Tensor,
    UnreadableError,
    check_known,
    open_file,
    open_gguf,
    open_orbax,
    read_json,
)
from ._layouts import FP8, LAYOUTS, METHODS, SIDE, Layout, Role
from ._packed import ELEMENTS
from ._report import Fault, Finding
from ._weights import Weight


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
    """Returns what stands at a path: a safetensors or GGUF file, an index, a folder.

    Missing shards, and missing, stale or duplicated tensors, become :attr:`Source.problems`.
    """
    path = Path(path)
    if (path / MARK).is_file():
        return _source(path, [open_orbax(path)])
    if path.is_dir():
        return _open_folder(path)
    if path.name.endswith(".index.json"):
        return _open_folder(path.parent, path)
    file = open_gguf(path) if path.suffix == ".gguf" else open_file(path)
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
    if "gguf" in metadata and source.files[0].path.suffix == ".gguf":
        return "gguf", "the file is GGUF"
    if source.files and source.files[0].path.name == MARK:
        return "orbax", f"the folder has {MARK}"
    for key, family in (("tensor_names", "torchao"), ("_quantization_metadata", "comfyui"),
                        ("scalewise", "scalewise")):  # fmt: skip
        if key in metadata:
            return family, f"the header's metadata has {key!r}"
    if any(name.endswith(".comfy_quant") for name in source.tensors):
        return "comfyui", "tensors are called *.comfy_quant"
    if method is None and "quant_algo" in source.quantization:
        method = "modelopt"
    if method in METHODS:
        return METHODS[method], f"quant_method is {method!r}"
    return None, "no config and no metadata names a layout" if method is None else (
        f"quant_method is {method!r}, which is not known")  # fmt: skip


def intact(path: str | os.PathLike[str]) -> tuple[Source, dict[str, Weight]]:
    """Returns a checkpoint without missing tensors, and its arrays."""
    source = open_source(path)
    lost = [p for p in source.problems if p.fault in (Fault.SHARD_MISSING, Fault.TENSOR_MISSING)]
    lost += [p for p in source.problems if p.ambiguous]
    if lost:
        raise UnreadableError(f"{path}: {lost[0].evidence}")
    return source, find(source)


def refuse_unscaled(path: str | os.PathLike[str], weights: Mapping[str, Weight]) -> None:
    alone = unscaled(weights)
    if alone:
        raise UnreadableError(
            f"{path}: {alone[0]!r} and {len(alone) - 1} others are FP8 without a scale anywhere; "
            "if their numbers are what is stored, pass unscaled_fp8=True (--unscaled)"
        )


PACKED = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "F4")
CODES = ("weight", "qweight", "weight_packed", "weight_quantized")  # of modules
OWN_SCALES = re.compile(r"scale|absmax|zeros")  # in the names of tensors beside packed integers


def refuse_undecodable(source: Source, weights: Mapping[str, Weight]) -> None:
    """Raises if a checkpoint has quantised tensors in a way that no layout here decodes: packed
    integers with their own scales (GPTQ, AWQ, bitsandbytes, INT8), or other types of GGUF."""
    plain = {n: w.parts["codes"] for n, w in weights.items() if w.layout is None and not w.record}
    for t in plain.values():
        check_known(t)
    scales = [n for n in plain if OWN_SCALES.search(n.rpartition(".")[2])]
    modules, stems = {n.rpartition(".")[0] for n in scales}, {x for n in scales for x in _stems(n)}
    for name, t in plain.items():
        module, _, last = name.rpartition(".")
        scaled = name in stems or (last in CODES and module in modules)
        if t.dtype in PACKED and t.shape and scaled and name not in scales and not is_side(name):
            method = source.quantization.get("quant_method")
            said = f" (quant_method {method!r})" if method else ""
            raise UnreadableError(
                f"{source.path}: {name!r} holds {t.dtype} codes with scales in a way that isn't "
                f"known{said}; cast the original checkpoint"
            )


def _stems(name: str) -> Iterator[str]:
    """Yields what a scale's name has before ``_scale`` or ``.absmax``."""
    for match in re.finditer(r"[._](?=\w*(?:scale|absmax|zeros))", name):
        yield name[: match.start()]


def find(source: Source) -> dict[str, Weight]:
    family, _ = family_of(source)
    ordered = sorted(LAYOUTS, key=lambda x: x.family != family)
    taken: dict[str, Weight] = {}
    found: dict[str, Weight] = {}
    records = _records(source)
    if family in ("scalewise", "orbax"):
        found |= _own(source, records)
        taken = {t.name: w for w in found.values() for t in w.parts.values()}
    by_suffix: dict[str, list[str]] = {}
    suffixes = {_suffix(x.scale) for x in LAYOUTS} - {""}
    for name, s in itertools.product(source.tensors, suffixes):
        if name.endswith(s):
            by_suffix.setdefault(s, []).append(name)
    for layout in ordered:
        if layout.family == "gguf":
            names = [n for n, t in source.tensors.items() if t.dtype in layout.code_dtypes]
        else:
            names = by_suffix.get(_suffix(layout.scale), ())
        for scale in names:
            weight = _matched(layout, scale, source, taken, records)
            if weight is not None:
                found[weight.name] = weight
                taken |= {t.name: weight for t in weight.parts.values()}
    order: dict[str, Weight] = {}
    for name, t in source.tensors.items():
        weight = taken.get(name) or Weight(name, None, {"codes": t})
        order.setdefault(weight.name, weight)
    return order


def _suffix(template: str) -> str:
    return template.removeprefix("{}")


def _matched(
    layout: Layout, scale: str, source: Source, taken: Mapping[str, Weight], records: Json
) -> Weight | None:
    base = scale.removesuffix(_suffix(layout.scale)) if _suffix(layout.scale) else scale
    names = layout.names(base)
    parts: dict[Role, Tensor] = {
        role: source.tensors[n] for role, n in names.items() if n in source.tensors
    }
    if "codes" not in parts or any(names[r] in taken for r in ("codes", "scale")):
        return None
    fits = parts["codes"].dtype in layout.code_dtypes
    gguf = layout.family == "gguf"
    fits = fits and (gguf or parts["scale"].dtype in layout.scale_dtypes)
    if not fits or (layout.needs_whole and "whole" not in parts):
        return None
    if layout.name == "comfyui/nvfp4" and "quantization_config" in source.metadata:
        raise UnreadableError(
            f"{source.path}: the metadata are ComfyUI's and TensorRT Model Optimizer's, which pack "
            f"NVFP4 in different orders; the order of {base!r} isn't said"
        )
    name, record = layout.weight.format(base), None
    if layout.family == "torchao":
        module, _, parameter = base.rpartition("._")
        name = f"{module}.{parameter}"
        found = records.get(name, {})
        record = {**found.get("_data", {}), "_tensor_data_names": found.get("_tensor_data_names")}
    return Weight(name, layout, parts, record, _block_of(source.quantization, layout, base, parts))


def _block_of(
    said: Mapping[str, Json], layout: Layout, base: str, parts: Mapping[Role, Tensor]
) -> tuple[int, int] | None:
    """Returns the rows and columns that share a scale by a config."""
    block: Json = None
    if layout.family == "deepseek" and parts["codes"].dtype in ELEMENTS:
        block = said.get("weight_block_size")
    elif layout.name == "compressed-tensors/float-quantized":
        groups = said.get("config_groups")
        groups = list(groups.values()) if isinstance(groups, dict) else []
        given = [g["weights"] for g in groups if isinstance(g, dict) and isinstance(
            g.get("weights"), dict)]  # fmt: skip
        blocks = [w["block_structure"] for w in given if w.get("block_structure")]
        block = blocks[0] if blocks and all(b == blocks[0] for b in blocks) else None
    elif layout.name == "modelopt/nvfp4":
        layers = said.get("quantized_layers")
        own = layers.get(base) if isinstance(layers, dict) else None
        block = [1, (own if isinstance(own, dict) else said).get("group_size")]
    elif layout.name == "modelopt/fp8" and str(said.get("quant_algo")).lower() == "fp8_pb_wo":
        block = [128, 128]
    pair = isinstance(block, list) and [type(n) for n in block] == [int, int] and min(block) > 0
    return (block[0], block[1]) if pair else None


def _records(source: Source) -> dict[str, Json]:
    """Returns what torchao or scalewise wrote about each array in the header's metadata."""
    found: dict[str, Json] = {}
    all_files = source.metadata
    for file in source.files:
        try:
            own = json.loads(file.metadata.get("scalewise", "{}"))
            names = json.loads(file.metadata.get("tensor_names", "[]"))
            others = {name: json.loads((all_files | file.metadata)[name]) for name in names}
            if not all(isinstance(r, dict) for r in (own, *others.values())):
                raise ValueError("a record isn't an object")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise UnreadableError(f"{file.path}: its metadata can't be read ({error!r})") from None
        found |= own | others
    return found


def _own(source: Source, records: Mapping[str, Json]) -> dict[str, Weight]:
    found = {}
    for name, record in records.items():
        names = [n for n in (name, f"{name}.scale", f"{name}.exponent", f"{name}.scale.scale",
                             f"{name}.scale.exponent") if n in source.tensors]  # fmt: skip
        if name not in names:
            raise UnreadableError(f"{source.path}: {name!r} is described, but not there")
        parts = {str(i) if i else "codes": source.tensors[n] for i, n in enumerate(names)}
        found[name] = Weight(name, None, parts, record)  # pyright: ignore[reportArgumentType]
    return found


def unscaled(weights: Mapping[str, Weight]) -> list[str]:
    plain = (w for w in weights.values() if w.layout is None and not w.record)
    return [w.name for w in plain if w.parts["codes"].dtype in FP8]


def is_side(name: str) -> bool:
    return name.endswith(SIDE)
