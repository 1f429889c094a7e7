"""Faults that a checkpoint shows by itself: in codes and scales, names, dtypes and shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np

from ..formats import E2M1FN
from ._layouts import FP8, LAYOUTS
from ._match import is_side
from ._open import Source
from ._packed import E8M0, WIDE, Packed, elements
from ._repairs import is_bytes, is_uniform
from ._report import Fault, Finding
from ._weights import Weight


def of_scales(weight: Weight, p: Packed) -> Iterator[Finding]:
    name = (weight.name,)
    if p.kind == WIDE:
        bad = ~np.isfinite(p.scale) | (p.scale == 0)
        count, negative = int(bad.sum()), int((p.scale < 0).sum())
        if negative:
            yield Finding(Fault.BAD_SCALE, name, f"{negative} scales are negative")
        if count:
            what = f"{count} of {p.scale.size} scales are NaN, infinite or zero"
            yield Finding(Fault.BAD_SCALE, name, what)
        elif is_bytes(p.scale):
            low, high = int(p.scale.min()), int(p.scale.max())
            yield Finding(Fault.NUMBER, name, f"all scales are integers from {low} to {high}",
                          "read them as 2^(scale - 127)",
                          f"the scales are then 2^{low - 127} to 2^{high - 127}")  # fmt: skip
    elif p.kind == E8M0:
        count = int((p.scale == 255).sum())
        if count:
            what = f"{count} of {p.scale.size} scales are NaN (byte 255)"
            yield Finding(Fault.BAD_SCALE, name, what)
    else:
        nan = int((p.scale & 127 == 127).sum()) if p.kind == "e4m3fn" else 0
        zeros, zero = p.scale & 127 == 0, 0
        if zeros.any() and not p.stored_shape[-1] % p.block[1]:
            used = (p.codes & 0x77).reshape(*p.scale.shape, -1).any(axis=-1)
            zero = int((zeros & used).sum())
        negative = int((p.scale >> 7).sum())
        for count, what in ((nan, "NaN"), (zero, "zero over codes that aren't"),
                            (negative, "negative")):  # fmt: skip
            if count:
                yield Finding(Fault.BAD_SCALE, name, f"{count} of {p.scale.size} scales are {what}")
    if p.whole is not None and not np.all(np.isfinite(p.whole) & (p.whole > 0)):
        yield Finding(Fault.BAD_SCALE, name, f"the global scale is {np.min(p.whole)}")


def of_codes(weight: Weight, p: Packed) -> Iterator[Finding]:
    """Yields codes that no weights have: uniform ones, NaN."""
    rows = p.codes.reshape(-1, p.codes.shape[-1])
    step = max(1, -(-(1 << 14) // max(1, rows.shape[1])))
    uniform, count = [], 0
    for i in range(0, len(rows), max(step, len(rows) // 16)):
        part = rows[i : i + max(step, len(rows) // 16)]
        count += 1
        if part.size >= 4096 and is_uniform(part, p):
            uniform.append(i)
    if uniform:
        where = "all rows" if len(uniform) == count else f"rows from {uniform[0]}"
        yield Finding(Fault.RANDOM, (weight.name,), f"the codes of {where} are equally frequent")
    if p.element != E2M1FN:
        nan = int(np.isnan(elements(p.element))[rows.reshape(-1)].sum())
        if nan and not uniform:
            yield Finding(Fault.DIFFERENT, (weight.name,), f"{nan} codes are NaN")


def structure(
    source: Source, weights: Mapping[str, Weight], other: Mapping[str, Weight] | None
) -> Iterator[Finding]:
    suffixes = {x.scale.removeprefix("{}") for x in LAYOUTS} | {
        x.whole.removeprefix("{}") for x in LAYOUTS if x.whole}  # fmt: skip
    suffixes = {s for s in suffixes if s not in ("", "_scale", ".scale")}
    codes = tuple({x.codes.removeprefix("{}") for x in LAYOUTS} - {"", ".weight"})
    lost = {n for p in source.problems for n in p.tensors if "missing" in p.fault}
    alone = {n: w for n, w in weights.items() if w.layout is None and not w.record}
    narrow = ("U8", "I8", "F4", *FP8)
    bare = {n for n, w in alone.items() if w.parts["codes"].dtype in narrow and
            (n.endswith((".weight", *codes)) or w.parts["codes"].dtype in FP8)}  # fmt: skip
    for name in sorted(bare):
        base = re.sub(r"(\.weight(_packed)?|_blocks|\.blocks|_qdata)$", "", name)
        others = (n for n in alone if n.startswith(base) and n != name)
        partners = [n for n in others if "scale" in n[len(base) :]]
        evidence = f"{alone[name].parts['codes'].dtype} codes without a scale that a layout has"
        numbers = [n for n in partners if _holds_bytes(alone[n])]
        if numbers:
            evidence = "its scale is of a wide dtype, but holds integers as E8M0's bytes are"
            repair = "store the scale as U8", "the layout then reads it"
            yield Finding(Fault.NUMBER, (name, *numbers), evidence, *repair)
            continue
        if partners:
            evidence = f"codes with {', '.join(partners)}, but a part of the scale isn't there"
        yield Finding(Fault.MISSING, (name,), evidence)
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
            what = "in the original, but not in the file"
            yield Finding(Fault.TENSOR_MISSING, tuple(absent), what)


def _holds_bytes(weight: Weight) -> bool:
    part = weight.parts["codes"]
    return part.dtype in ("F32", "BF16", "F16", "I32") and is_bytes(
        part.array().astype(np.float32))  # fmt: skip
