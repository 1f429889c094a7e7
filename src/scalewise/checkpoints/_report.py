"""Faults of checkpoints, and reports: shown in a terminal, saved as a page or as JSON."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .._output import Printed, Rows, Tabular, counted
from .._types import Json


class Fault(enum.StrEnum):
    """A fault of a checkpoint; its value is what reports show."""

    INVERTED = "global scale inverted"
    TWICE = "global scale applied twice"
    TRANSPOSED = "scale transposed"
    SWIZZLED = "scale swizzled"
    WRONG_BLOCK = "scale of the wrong block"
    NUMBER = "E8M0 byte read as a number"
    BIAS = "E8M0 with a wrong bias"
    MISSING = "scale missing"
    NIBBLES = "nibbles swapped"
    UNEQUAL = "unequal global scales"
    TENSOR_MISSING = "tensor missing"
    TENSOR_STALE = "tensor stale"
    TENSOR_DUPLICATED = "tensor duplicated"
    SHARD_MISSING = "shard missing"
    BAD_SCALE = "NaN, infinite or zero scales"
    RANDOM = "weights near random"
    MISSHAPEN = "scale of a wrong shape"
    DIFFERENT = "other numbers than the original"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A fault."""

    fault: Fault
    tensors: tuple[str, ...]
    evidence: str
    repair: str | None = None  # what would undo it, None if nothing that was tried does
    tried: str | None = None  # what the repair gave on the file itself
    ambiguous: bool = dataclasses.field(default=False, repr=False)  # which tensor counts


def merged(findings: Sequence[Finding]) -> list[Finding]:
    groups: dict[tuple[Fault, str], list[Finding]] = {}
    for f in findings:
        groups.setdefault((f.fault, f.repair or f.evidence), []).append(f)
    names = [dict.fromkeys(n for f in same for n in f.tensors) for same in groups.values()]
    return [
        dataclasses.replace(same[0], tensors=tuple(own))
        for same, own in zip(groups.values(), names, strict=True)
    ]


class CheckpointReport(Tabular):
    """The result of a command."""

    endings = (".html", ".json")
    most = 10
    _repr_html_ = Printed._repr_html_

    @property
    def title(self) -> str:
        return type(self).__name__.removesuffix("Report").lower()

    @property
    def heading(self) -> str:
        return ""


@dataclasses.dataclass(eq=False)
class CastReport(CheckpointReport):
    """What :func:`scalewise.checkpoints.cast` wrote and what was lost."""

    source: str
    target: str
    to: str
    layout: str
    records: list[Json]  # one for each tensor, with a loss where numbers were rounded
    dropped: list[str]  # scales of activations that the new layout has no place for
    derived = ("sqnr",)

    @property
    def sqnr(self) -> float:
        """Signal over noise in dB of all tensors that were rounded, over finite numbers."""
        from ._packed import decibel

        lost = [r["loss"] for r in self.records if "loss" in r]
        return decibel(sum(x["signal"] for x in lost), sum(x["noise"] for x in lost))

    def sentences(self) -> list[str]:
        done = Counter(r["what"] for r in self.records)
        counts = ", ".join(f"{n} {what}" for what, n in done.items())
        found = [f"{Path(self.source).name} -> {Path(self.target).name}: "
                 f"{counted(len(self.records), 'tensor')} ({counts})"]  # fmt: skip
        lost = [r["loss"] for r in self.records if "loss" in r]
        if lost:
            infinite = sum(x["non_finite"] for x in lost)
            found.append(f"SQNR {_db(self.sqnr)}, {sum(x['saturated'] for x in lost)} saturated, "
                         f"{sum(x['flushed'] for x in lost)} flushed to zero"
                         + f", {infinite} not finite any more" * bool(infinite))  # fmt: skip
        if self.dropped:
            found.append("scales of activations left out, since they belong to the old layout: "
                         f"{first_of(self.dropped)}")  # fmt: skip
        return found

    def tables(self, *, everything: bool = True) -> list[Rows]:
        lost = sorted((r for r in self.records if "loss" in r), key=lambda r: r["loss"]["sqnr"])
        rows = []
        for r in lost:
            x = r["loss"]
            rows.append((r["name"], r["to"], str(r["size"]), _db(x["sqnr"]), str(x["saturated"]),
                         str(x["flushed"]), f"{x['largest']:.3g}"))  # fmt: skip
        heads = ("tensor", "format", "numbers", "SQNR", "saturated", "flushed", "largest error")
        kept = [(r["name"], r["to"], r["what"]) for r in self.records if "loss" not in r]
        return [Rows("worst first", heads, rows), Rows("others", ("tensor", "dtype", "what"), kept)]


@dataclasses.dataclass(eq=False)
class CheckReport(CheckpointReport):
    """What :func:`scalewise.checkpoints.check` found."""

    path: str
    against: str | None
    layout: str | None
    findings: list[Finding]
    weights: int  # quantised tensors that were read

    def __bool__(self) -> bool:
        """True if nothing was found."""
        return not self.findings

    def sentences(self) -> list[str]:
        beside = f" against {self.against}" if self.against else ""
        found = counted(len(self.findings), "fault") if self.findings else "no fault found"
        lines = [f"{self.path}: {found} in {counted(self.weights, 'quantised tensor')}{beside}"]
        for f in self.findings[:20]:
            repair = f"; repair: {f.repair} ({f.tried})" if f.repair else ""
            lines.append(f"{f.fault}: {first_of(f.tensors, 1)}: {f.evidence}{repair}")
        return lines

    def tables(self, *, everything: bool = True) -> list[Rows]:
        rows = [(f.fault, ", ".join(f.tensors), f.evidence, f.repair or "", f.tried or "")
                for f in self.findings[20:]]  # fmt: skip
        return [Rows("more", ("fault", "tensors", "evidence", "repair", "tried"), rows)]


def first_of(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _db(x: float) -> str:
    return "exact" if x == math.inf else f"{x:.1f} dB"
