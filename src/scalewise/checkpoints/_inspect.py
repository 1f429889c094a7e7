"""Describes a checkpoint, with what looks suspicious."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from .._output import Rows, counted
from .._types import Json
from ._files import UnreadableError
from ._layouts import METHODS
from ._match import find, is_side, unscaled
from ._open import family_of, open_source
from ._report import CheckpointReport, first_of
from ._weights import Weight


@dataclasses.dataclass
class WeightGroup:
    """Tensors of one layout and format."""

    layout: str
    format: str
    tensors: int = 0
    numbers: int = 0
    bytes: int = 0  # with scales
    scales: tuple[float, float] | None = None  # the smallest and the largest, of quantised tensors
    names: list[str] = dataclasses.field(default_factory=list)

    @property
    def bits(self) -> float:
        return 8 * self.bytes / self.numbers if self.numbers else 0.0


@dataclasses.dataclass(eq=False)
class InspectReport(CheckpointReport):
    """What :func:`scalewise.checkpoints.inspect` found."""

    path: str
    layout: str | None  # family of the layouts, None for plain tensors
    evidence: str
    files: int
    bytes: int
    groups: list[WeightGroup]
    side: list[str]  # scales of activations and KV caches
    wide: list[str]  # weights of two axes that are stored wide
    suspicious: list[str]
    derived = ("bits",)

    @property
    def bits(self) -> float:
        """Bits of all tensors over their numbers."""
        return 8 * self.bytes / max(1, sum(g.numbers for g in self.groups))

    def sentences(self) -> list[str]:
        numbers = sum(g.numbers for g in self.groups)
        arrays = sum(g.tensors for g in self.groups)
        found = [
            f"{self.path}: layout {self.layout or 'plain'} ({self.evidence})",
            f"{counted(self.files, 'file')}, {counted(arrays, 'array')}, "
            f"{counted(numbers, 'number')}, {counted(self.bytes, 'byte')}, "
            f"{self.bits:.3f} bits for each number",
        ]
        if self.wide and any(g.scales for g in self.groups):
            found.append(f"stay wide: {first_of(self.wide)}")
        if self.side:
            found.append(f"beside weights, for activations or loaders: {first_of(self.side)}")
        return found + [f"suspicious: {s}" for s in self.suspicious]

    def tables(self, *, everything: bool = True) -> list[Rows]:
        heads = ("layout", "format", "arrays", "numbers", "bytes", "bits", "scales")
        rows = [(g.layout, g.format, str(g.tensors), f"{g.numbers:,}", f"{g.bytes:,}",
                 f"{g.bits:.3f}", "" if g.scales is None else
                 f"{g.scales[0]:.3g} to {g.scales[1]:.3g}") for g in self.groups]  # fmt: skip
        return [Rows("arrays", heads, rows)]


def inspect(
    path: str | os.PathLike[str], told: Callable[[str, int], None] | None = None
) -> InspectReport:
    """Describes a checkpoint of any layout; of quantised tensors the scales are read.

    Args:
        path: a file or folder that :func:`load` reads, also where tensors are missing.
        told: called with the name and the bytes of each array.
    """
    source = open_source(path)
    family, evidence = family_of(source)
    weights = find(source)
    groups: dict[tuple[str, str], WeightGroup] = {}
    suspicious = [p.evidence for p in source.problems]
    side, wide, ranges = [], [], defaultdict(list)
    for weight in weights.values():
        if is_side(weight.name):
            side.append(weight.name)
        try:
            kind, fmt, size = weight.kind, weight.format, math.prod(weight.shape)
        except UnreadableError as error:
            suspicious.append(str(error))
            continue
        group = groups.setdefault((kind, fmt), WeightGroup(kind, fmt))
        group.tensors, group.numbers = group.tensors + 1, group.numbers + size
        group.bytes += weight.nbytes
        group.names.append(weight.name)
        if weight.layout is not None:
            _scales(weight, group, suspicious, ranges)
        elif len(weight.shape) > 1 and not weight.record:
            wide.append(weight.name)
        if told is not None:
            told(weight.name, weight.nbytes)
    _suspicious(source.quantization, groups, unscaled(weights), ranges, suspicious)
    total = sum(t.nbytes for f in source.files for t in f.tensors)
    if family is None and any(g.scales for g in groups.values()):
        found = sorted({g.layout.partition("/")[0] for g in groups.values() if g.scales})
        family, evidence = found[0], f"{evidence}; the tensors' names are those of {found[0]}"
    ordered = sorted(groups.values(), key=lambda g: -g.bytes)
    return InspectReport(str(path), family, evidence, len(source.files), total, ordered, side, wide,
                         suspicious)  # fmt: skip


def _scales(weight: Weight, group: WeightGroup, suspicious: list[str], ranges: dict) -> None:
    low, high = math.inf, 0.0
    for matrix in weight.packed.matrices():
        factors = matrix.factors()
        if not factors.size:
            continue
        finite = np.isfinite(factors)
        if not finite.all():
            suspicious.append(
                f"{weight.name!r} has {int((~finite).sum())} scales that aren't finite"
            )
        low = min(low, float(np.min(factors, initial=math.inf, where=finite)))
        high = max(high, float(np.max(factors, initial=0, where=finite)))
    old = group.scales or (low, high)
    group.scales = min(old[0], low), max(old[1], high)
    ranges[re.sub(r"\d+", "N", weight.name)].append((weight.name, high))


def _suspicious(
    quantization: Json, groups: dict, alone: list[str], ranges: dict, found: list[str]
) -> None:
    if alone:
        found.append(f"FP8 without a scale: {first_of(alone)}")
    method = METHODS.get(str(quantization.get("quant_method")))
    families = {g.layout.partition("/")[0] for g in groups.values() if g.scales}
    shared = {"compressed-tensors", "modelopt", "fbgemm", "comfyui"}
    if method and families and method not in families and not {method, *families} <= shared:
        found.append(f"the config says {method}, the tensors are {', '.join(sorted(families))}")
    if method and not families:
        found.append(f"the config says {method}, but no tensor is quantised")
    for same in ranges.values():
        usual = float(np.median([high for _, high in same]))
        for name, high in same:
            if len(same) > 2 and usual and not 1 / 64 < high / usual < 64:
                found.append(f"{name!r}: the largest scale is {high:.3g}, usually {usual:.3g}")
