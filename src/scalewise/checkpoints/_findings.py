"""Findings of an audit of a checkpoint, and their report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .._output import counted
from ._faults import Fault
from ._report import Report, Rows, first_of


@dataclasses.dataclass(frozen=True)
class Finding:
    """A fault.

    Attributes:
        fault: its kind.
        tensors: its names.
        evidence: what shows it.
        repair: what would undo it, None if nothing that was tried does.
        tried: what the repair gave on the file itself.
    """

    fault: Fault
    tensors: tuple[str, ...]
    evidence: str
    repair: str | None = None
    tried: str | None = None


@dataclasses.dataclass(eq=False)
class CheckReport(Report):
    """What :func:`scalewise.checkpoints.check` found.

    Attributes:
        path, against: of the checkpoints.
        layout: family of the layouts.
        findings: the faults.
        weights: how many quantised tensors were read.
    """

    path: str
    against: str | None
    layout: str | None
    findings: list[Finding]
    weights: int
    title = "check"

    def __bool__(self) -> bool:
        """True if nothing was found."""
        return not self.findings

    def lines(self) -> list[str]:
        beside = f" against {self.against}" if self.against else ""
        found = counted(len(self.findings), "fault") if self.findings else "no fault found"
        lines = [f"{self.path}: {found} in {counted(self.weights, 'quantised tensor')}{beside}"]
        for f in self.findings[:20]:
            repair = f"; repair: {f.repair} ({f.tried})" if f.repair else ""
            lines.append(f"{f.fault}: {first_of(f.tensors, 1)}: {f.evidence}{repair}")
        return lines

    def tables(self) -> list[Rows]:
        rows = [(f.fault, ", ".join(f.tensors), f.evidence, f.repair or "", f.tried or "")
                for f in self.findings[20:]]  # fmt: skip
        return [Rows("more", ("fault", "tensors", "evidence", "repair", "tried"), rows)]


def merged(findings: Sequence[Finding]) -> list[Finding]:
    groups: dict[tuple, list[Finding]] = {}
    for f in findings:
        key = (f.fault, f.repair) if f.repair else (f.fault, f.evidence)
        groups.setdefault(key, []).append(f)
    merged = []
    for same in groups.values():
        names = tuple(dict.fromkeys(n for f in same for n in f.tensors))
        merged.append(dataclasses.replace(same[0], tensors=names))
    return merged
