"""Finds the weights of a checkpoint among its tensors, by the layouts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping

from .._types import Json
from ._files import Tensor, UnreadableError
from ._layouts import FP8, LAYOUTS, METHODS, SIDE, Layout, Role
from ._orbax import MARK
from ._packed import ELEMENTS
from ._report import Fault
from ._source import Source, open_source
from ._weights import Weight


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


def find(source: Source) -> dict[str, Weight]:
    """Returns the arrays of a checkpoint by name, in the order of its files."""
    family, _ = family_of(source)
    ordered = sorted(LAYOUTS, key=lambda x: x.family != family)
    taken: dict[str, Weight] = {}
    found: dict[str, Weight] = {}
    records = _records(source)
    if family in ("scalewise", "orbax"):
        found |= _own(source, records)
        taken = {t.name: w for w in found.values() for t in w.parts.values()}
    by_suffix = _by_suffix(source.tensors)
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


def _by_suffix(tensors: Iterable[str]) -> dict[str, list[str]]:
    suffixes = {_suffix(x.scale) for x in LAYOUTS if _suffix(x.scale)}
    found: dict[str, list[str]] = {}
    for name in tensors:
        for s in suffixes:
            if name.endswith(s):
                found.setdefault(s, []).append(name)
    return found


def _matched(
    layout: Layout, scale: str, source: Source, taken: Mapping[str, Weight], records: Json
) -> Weight | None:
    """Returns the weight with a scale of that name, if its parts fit the layout."""
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
    try:
        own = json.loads(source.metadata.get("scalewise", "{}"))
        names = json.loads(source.metadata.get("tensor_names", "[]"))
        found = {name: json.loads(source.metadata[name]) for name in names}
        if not all(isinstance(r, dict) for r in (own, *found.values())):
            raise ValueError("a record isn't an object")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise UnreadableError(f"{source.path}: its metadata can't be read ({error!r})") from None
    return own | found


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
