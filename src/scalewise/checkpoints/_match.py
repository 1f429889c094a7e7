"""Matches a checkpoint's tensors with the layouts, into weights."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping

from .._output import counted
from .._types import Json
from ._files import Tensor, UnreadableError
from ._layouts import FP8, LAYOUTS, SIDE, Layout, Role
from ._open import Source, family_of, open_source
from ._packed import ELEMENTS
from ._report import Fault
from ._weights import Weight


def find(source: Source) -> dict[str, Weight]:
    family, _ = family_of(source)
    ordered = sorted(LAYOUTS, key=lambda x: x.family != family)
    taken: dict[str, Weight] = {}
    found: dict[str, Weight] = {}
    records = _records(source)
    if family == "scalewise":
        for name, record in records.items():
            given = name, f"{name}.scale", f"{name}.scale.scale"
            names = [n for n in given if n in source.tensors]
            if name not in names:
                raise UnreadableError(f"{source.path}: {name!r} is described, but not there")
            parts = {str(i) if i else "codes": source.tensors[n] for i, n in enumerate(names)}
            found[name] = Weight(name, None, parts, record)  # pyright: ignore[reportArgumentType]
        taken = {t.name: w for w in found.values() for t in w.parts.values()}
    by_suffix: dict[str, list[str]] = {}
    suffixes = {_suffix(x.scale) for x in LAYOUTS}
    for name, s in itertools.product(source.tensors, suffixes):
        if name.endswith(s):
            by_suffix.setdefault(s, []).append(name)
    for layout in ordered:
        for scale in by_suffix.get(_suffix(layout.scale), ()):
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
    base = scale.removesuffix(_suffix(layout.scale))
    names = layout.names(base)
    parts: dict[Role, Tensor] = {
        role: source.tensors[n] for role, n in names.items() if n in source.tensors
    }
    if "codes" not in parts or any(names[r] in taken for r in ("codes", "scale")):
        return None
    fits = parts["codes"].dtype in layout.code_dtypes
    fits = fits and parts["scale"].dtype in layout.scale_dtypes
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


def unscaled(weights: Mapping[str, Weight]) -> list[str]:
    plain = (w for w in weights.values() if w.layout is None and not w.record)
    return [w.name for w in plain if w.parts["codes"].dtype in FP8]


def is_side(name: str) -> bool:
    return name.endswith(SIDE)


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
            f"{path}: FP8 without a scale anywhere: {counted(len(alone), 'tensor')}, first "
            f"{alone[0]!r}; if these numbers are stored as they are, pass unscaled_fp8=True "
            "(--unscaled)"
        )


PACKED = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "F4")
CODES = ("weight", "qweight", "weight_packed", "weight_quantized")  # of modules
OWN_SCALES = re.compile(r"scale|absmax|zeros")  # in the names of tensors beside packed integers


def refuse_undecodable(source: Source, weights: Mapping[str, Weight]) -> None:
    """Raises if a checkpoint has quantised tensors in a way that no layout here decodes: packed
    integers with their own scales (GPTQ, AWQ, bitsandbytes, INT8)."""
    plain = {n: w.parts["codes"] for n, w in weights.items() if w.layout is None and not w.record}
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
