"""Faults that the names, dtypes and shapes of a checkpoint's tensors show."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np

from ._faults import Fault
from ._find import is_side
from ._findings import Finding
from ._layouts import FP8, LAYOUTS
from ._repairs import is_bytes
from ._source import Source
from ._weights import Weight


def structure(
    source: Source, weights: Mapping[str, Weight], other: Mapping[str, Weight] | None
) -> Iterator[Finding]:
    """Yields what names and dtypes alone show."""
    suffixes = {x.scale.removeprefix("{}") for x in LAYOUTS} | {
        x.whole.removeprefix("{}") for x in LAYOUTS if x.whole}  # fmt: skip
    suffixes = {s for s in suffixes if s not in ("", "_scale", ".scale")}
    codes = tuple({x.codes.removeprefix("{}") for x in LAYOUTS} - {"", ".weight"})
    lost = {n for p in source.problems for n in p.tensors if "missing" in p.fault}
    alone: dict[str, Weight] = {
        n: w for n, w in weights.items() if w.layout is None and not w.record
    }  # fmt: skip
    narrow = ("U8", "I8", "F4", *FP8)
    bare = {n for n, w in alone.items() if w.parts["codes"].dtype in narrow and
            (n.endswith((".weight", *codes)) or w.parts["codes"].dtype in FP8)}  # fmt: skip
    for name in sorted(bare):
        base = re.sub(r"(\.weight(_packed)?|_blocks|\.blocks|_qdata)$", "", name)
        partners = [
            n for n in alone if n.startswith(base) and n != name and "scale" in n[len(base) :]
        ]
        evidence = f"{alone[name].parts['codes'].dtype} codes without a scale that a layout has"
        numbers = [n for n in partners if _holds_bytes(alone[n])]
        if numbers:
            evidence = "its scale is of a wide dtype, but holds integers as E8M0's bytes are"
            repair = "store the scale as U8", "the layout then reads it"
            yield Finding(Fault.NUMBER, (name, *numbers), evidence, *repair)
            continue
        if partners:
            evidence = f"codes with {', '.join(partners)}, but a part of the scale isn't there"
        yield Finding(Fault.MISSING, (name,), evidence, *_estimated(alone[name], other))
    for name, weight in weights.items():
        if isinstance(weight.record, dict) and weight.layout is not None:
            promised = weight.record.get("_tensor_data_names") or ()
            if "per_tensor_scale" in promised and "whole" not in weight.parts:
                yield Finding(Fault.MISSING, (name,), "the header promises a per_tensor_scale")
    for name in alone:
        tail = next((s for s in sorted(suffixes, key=len, reverse=True) if name.endswith(s)), None)
        if tail is None or is_side(name) or name in lost:
            continue
        base = name.removesuffix(tail)
        if any(b.startswith(base) for b in bare) or any(n.startswith(base) for n in lost):
            continue
        owner = f"{base}.weight" in weights and weights[f"{base}.weight"].layout is not None
        fault = Fault.TENSOR_STALE if owner or f"{base}.weight" in weights else Fault.TENSOR_MISSING
        yield Finding(fault, (name,), "a scale whose codes aren't there" if not owner else (
            "a scale beside another one that belongs to the codes"))  # fmt: skip
    if other is not None:
        absent = [n for n in other if n not in weights and n not in lost and not is_side(n)]
        absent = [n for n in absent if not any(n.startswith(b) or b.startswith(n) for b in bare)]
        if absent:
            yield Finding(
                Fault.TENSOR_MISSING, tuple(absent), "in the original, but not in the file"
            )


def _holds_bytes(weight: Weight) -> bool:
    part = weight.parts["codes"]
    return part.dtype in ("F32", "BF16", "F16", "I32") and is_bytes(
        part.array().astype(np.float32))  # fmt: skip


def _estimated(weight: Weight, other: Mapping[str, Weight] | None) -> tuple[str | None, str | None]:
    """Returns a repair of FP8 codes without a scale by the original: a scale for each tensor."""
    if other is None or weight.name not in other or weight.parts["codes"].dtype not in FP8:
        return None, None
    x = weight.parts["codes"].array()
    o = other[weight.name].value()
    if x.shape != o.shape or x.ndim < 2:
        return None, None
    x = x.reshape(-1, x.shape[-1])[:256].astype(np.float32)
    o = o.reshape(-1, o.shape[-1])[:256]
    scale = float(np.vdot(x, o) / max(float(np.vdot(x, x)), 1e-30))
    error = float(np.linalg.norm(x * scale - o) / max(float(np.linalg.norm(o)), 1e-30))
    return f"multiply by {scale:.4g}", f"relative error {error:.3g} on the original"
