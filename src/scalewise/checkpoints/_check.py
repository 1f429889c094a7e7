"""An audit of a checkpoint: which fault, in which tensors, and a repair that was tried."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from ..formats import E2M1FN
from . import _repairs as repairs
from ._files import UnreadableError
from ._layouts import FP8, LAYOUTS, fused_key
from ._match import find, is_side
from ._open import Source, family_of, open_source
from ._packed import E8M0, WIDE, Packed, elements
from ._repairs import is_bytes, is_uniform
from ._report import CheckReport, Fault, Finding, merged
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


# Relative errors beyond which numbers aren't the original's: MXFP4's is at most 0.16 for normal
# numbers, E4M3's 0.04; a roll of similar scales is above 0.2.
LIMIT = {4: 0.22, 8: 0.06}
# log2 of the root mean square of a layer's weights: 0.0002 to 4. Published models lie within
# 2^-9 and 2^0; a global scale that is inverted or squared moves it by 2^10 and more.
PLAUSIBLE = (-12.0, 2.0)
OUTLIER = 2.5  # log2, of a tensor beside the median of its kind, and 8 times their spread


def check(
    path: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    told: Callable[[str, int], None] | None = None,
) -> CheckReport:
    """Looks for faults that loaders don't notice, and tries a repair of each.

    A sample of rows of each tensor is decoded; scales and codes are read whole. With the original
    the decoded numbers are compared with it. Without it their magnitude is compared with that of
    tensors of the same kind: a fault that keeps it (scales of other blocks, swapped nibbles) can't
    be seen then.

    Args:
        path: the checkpoint.
        against: the checkpoint that it was made from, of any layout; tensors of the same names are
            compared.
        told: called with the name and the bytes of each array that was read.
    """
    source = open_source(path)
    weights = find(source)
    other = None if against is None else find(open_source(against))
    findings = [*source.problems, *structure(source, weights, other)]
    audit = _Audit(weights, other, told)
    findings += audit.run()
    quantised = sum(w.layout is not None or bool(w.record) for w in weights.values())
    beside = None if against is None else str(against)
    return CheckReport(str(path), beside, family_of(source)[0], merged(findings), quantised)


@dataclasses.dataclass
class _Read:
    weight: Weight
    sample: repairs.Sample
    values: np.ndarray
    packed: Packed | None

    @property
    def kind(self) -> str:
        return re.sub(r"\d+", "N", self.weight.name)

    @property
    def level(self) -> float:
        return repairs.level(self.values)

    def finding(
        self, fault: Fault, evidence: str, repair: str | None = None, tried: str | None = None
    ) -> Finding:
        return Finding(fault, (self.weight.name,), evidence, repair, tried)

    def best(
        self, some: Iterable[repairs.Repair], score: Callable[[np.ndarray, repairs.Repair], float]
    ) -> tuple[float, repairs.Repair, np.ndarray] | None:
        """Returns the repair whose values have the smallest score, that, and the values."""
        assert self.packed is not None
        each = ((self.sample.repaired(self.packed, repair), repair) for repair in some)
        scored = [(score(x, repair), repair, x) for x, repair in each if x is not None]
        return min(scored, key=lambda found: found[0], default=None)


@dataclasses.dataclass
class _Audit:
    """Reads all tensors of a checkpoint and compares them with each other, or with an original."""

    weights: Mapping[str, Weight]
    other: Mapping[str, Weight] | None
    told: Callable[[str, int], None] | None
    read: dict[str, _Read] = dataclasses.field(default_factory=dict)
    named: set[str] = dataclasses.field(default_factory=set)

    def run(self) -> list[Finding]:
        found: list[Finding] = []
        for weight in self.weights.values():
            found += self._each(weight)
            if self.told is not None:
                self.told(weight.name, weight.nbytes)
        self.named = {n for f in found for n in f.tensors}
        found += self._fused()
        if self.other is None:
            return found + list(self._beside_neighbours())
        names = [n for n in self.read if n in self.other and n not in self.named]
        beside = (_differing(self.read[n], self.other[n]) for n in names)
        return found + [f for f in beside if f is not None]

    def _each(self, weight: Weight) -> Iterator[Finding]:
        """Yields what one tensor shows by itself; keeps a sample of it."""
        codes = weight.parts["codes"]
        if weight.layout is None:
            if len(codes.shape) > 1 and (weight.record or codes.dtype in ("F32", "BF16", "F16")):
                x = weight.value() if weight.record else codes.array()
                if x.size:
                    sample = repairs.sample_of(x.shape)
                    self.read[weight.name] = _Read(weight, sample, sample.of_array(x), None)
                if weight.record and (count := int(np.sum(~np.isfinite(x)))):
                    what = f"{count} of {x.size} numbers aren't finite"
                    yield Finding(Fault.BAD_SCALE, (weight.name,), what)
            return
        try:
            packed = weight.packed
        except UnreadableError as error:
            yield _misshapen(weight, error)
            return
        sample = repairs.sample_of(packed.stored_shape)
        self.read[weight.name] = _Read(weight, sample, sample.of(packed), packed)
        yield from of_scales(weight, packed)
        yield from of_codes(weight, packed)

    def _fused(self) -> Iterator[Finding]:
        groups: dict[tuple, dict[str, float]] = defaultdict(dict)
        for name, r in self.read.items():
            key, layout = fused_key(name), r.weight.layout
            if not (key and layout and layout.family in ("compressed-tensors", "modelopt")):
                continue
            if r.packed is not None and r.packed.whole is not None:
                groups[key][name] = float(np.max(r.packed.whole))
        for wholes in groups.values():
            usual = float(np.median(list(wholes.values())))
            odd = [n for n, w in wholes.items() if not 1e-3 < w / (usual or 1) < 1e3]
            if len(set(wholes.values())) > 1 and not odd:
                shown = ", ".join(f"{n.split('.')[-2]} {w:.6g}" for n, w in wholes.items())
                evidence = f"loaders that fuse them use one: {shown}"
                repair = "cast the original again with one scale"
                yield Finding(Fault.UNEQUAL, tuple(wholes), evidence, repair, "not tried")

    def _beside_neighbours(self) -> Iterator[Finding]:
        """Yields tensors whose magnitude doesn't fit that of others."""
        of_kind: dict[str, list[float]] = defaultdict(list)
        for r in self.read.values():
            if math.isfinite(r.level):
                of_kind[r.kind].append(r.level)
        for r in self.read.values():
            if r.packed is None or r.weight.name in self.named:
                continue
            finding = self._magnitude(r, of_kind[r.kind])
            if finding is not None:
                yield finding

    def _magnitude(self, r: _Read, levels: Sequence[float]) -> Finding | None:
        assert r.packed is not None
        if not np.any(r.packed.codes[:1]) and not math.isfinite(r.level):
            return None
        usual = float(np.median(levels)) if len(levels) > 2 else None
        if usual is not None and not PLAUSIBLE[0] <= usual <= PLAUSIBLE[1]:
            usual = None
        spread = 8 * float(np.median(np.abs(np.array(levels) - usual))) if usual is not None else 0
        far = usual is not None and abs(r.level - usual) > max(OUTLIER, spread)
        finite = bool(np.all(np.isfinite(r.values)))
        if PLAUSIBLE[0] <= r.level <= PLAUSIBLE[1] and not far and finite:
            return None
        wide = [x.level for x in self.read.values() if x.packed is None and math.isfinite(x.level)]
        expected = usual if usual is not None else float(np.median(wide)) if wide else -5.5
        shown = f"2^{r.level:.1f}" if math.isfinite(r.level) else "0"
        beside = "tensors of its kind" if usual is not None else "weights"
        evidence = f"root mean square {shown}; {beside} have about 2^{expected:.1f}"

        def off(x: np.ndarray, repair: repairs.Repair) -> float:
            rarer = 0.5 if repair.fault in (Fault.BIAS, Fault.TWICE) else 0.0
            return abs(repairs.level(x) - expected) + rarer if np.all(np.isfinite(x)) else math.inf

        best = r.best(repairs.tries(r.packed, r.level - expected), off)
        if best is not None and math.isfinite(best[0]):
            fixed = repairs.level(best[2])
            if best[0] <= OUTLIER + 1 or PLAUSIBLE[0] <= fixed <= PLAUSIBLE[1]:
                tried = f"root mean square 2^{fixed:.1f}"
                return r.finding(best[1].fault, evidence, best[1].what, tried)
        return r.finding(Fault.DIFFERENT if math.isfinite(r.level) else Fault.BAD_SCALE, evidence)


def _misshapen(weight: Weight, error: UnreadableError) -> Finding:
    assert weight.layout is not None
    scale, (rows, columns) = weight.parts["scale"].shape, (1, *weight.parts["codes"].shape)[-2:]
    block = weight.block or weight.layout.block
    wide = columns * (2 if weight.layout.nibbles else 1)
    wanted = block and (-(-rows // block[0]), -(-wide // block[1]))
    flipped = scale[:-2] + scale[:-3:-1]
    if len(flipped) > 1 and (wanted is None or tuple(flipped[-2:]) == wanted):
        repair = "transpose the scale", f"its shape {flipped} then fits"
        return Finding(Fault.TRANSPOSED, (weight.name,), str(error), *repair)
    return Finding(Fault.MISSHAPEN, (weight.name,), str(error))


def _differing(r: _Read, original: Weight) -> Finding | None:
    truth = _sampled_original(original, r)
    if truth is None:
        evidence = f"its shape is {r.weight.shape}, the original's {original.shape}"
        return r.finding(Fault.DIFFERENT, evidence)
    error = repairs.relative(r.values, truth)
    if r.packed is None:
        if error <= LIMIT[4] or np.array_equal(r.values, truth, equal_nan=True):
            return None
        what = "on the original" if r.weight.record else "of a tensor that isn't quantised"
        return r.finding(Fault.DIFFERENT, f"relative error {error:.3g} {what}")
    limit, wrong = LIMIT[r.packed.element.bits], repairs.wrong_blocks(r.values, truth)
    if error <= limit and wrong < 0.02:
        return None
    shift = repairs.level(r.values) - repairs.level(truth)
    best = r.best(repairs.tries(r.packed, shift), lambda x, _: repairs.relative(x, truth))
    evidence = f"relative error {error:.3g} on the original, {wrong:.0%} of its blocks are off"
    if best is None or best[0] > limit:
        return r.finding(Fault.DIFFERENT, evidence)
    return r.finding(best[1].fault, evidence, best[1].what, f"relative error {best[0]:.3g}")


def _sampled_original(weight: Weight, r: _Read) -> np.ndarray | None:
    if weight.shape != r.weight.shape:
        return None
    turned = r.packed is not None and r.packed.transposed
    if weight.layout is not None and weight.packed.transposed == turned:
        found = r.sample.of(weight.packed)
    else:
        x = weight.parts["codes"].array() if weight.layout is None and not weight.record else (
            weight.value())  # fmt: skip
        x = x[None] if x.ndim == 1 else x
        found = r.sample.of_array(np.swapaxes(x, -1, -2) if turned else x)
    here, there = r.weight.channels, weight.channels  # of the input: none of transposed layouts
    with np.errstate(all="ignore"):
        found = found if there is None else found * there
        return found if here is None else found / here
