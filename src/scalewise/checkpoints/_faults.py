"""The faults of checkpoints, and findings of them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence


class Fault(enum.StrEnum):
    """A fault of a checkpoint; its value is what reports show."""

    INVERTED = "global scale inverted"
    TWICE = "global scale applied twice"
    TRANSPOSED = "scale transposed"
    SWIZZLED = "scale swizzled"
    WRONG_BLOCK = "scale of the wrong block"
    NUMBER = "E8M0 byte read as a number"
    BIAS = "E8M0 with a wrong bias"
    ROUNDED = "float32 scales rounded to E8M0"
    MISSING = "scale missing"
    NIBBLES = "nibbles swapped"
    NEGATIVE_ZERO = "zero coded as -0"
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


def merged(findings: Sequence[Finding]) -> list[Finding]:
    groups: dict[tuple[Fault, str], list[Finding]] = {}
    for f in findings:
        groups.setdefault((f.fault, f.repair or f.evidence), []).append(f)
    return [
        dataclasses.replace(
            same[0], tensors=tuple(dict.fromkeys(n for f in same for n in f.tensors))
        )
        for same in groups.values()
    ]
