"""What an audit found, as plain data."""

from __future__ import annotations

import dataclasses

from ._findings import Finding
from ._literals import Literal
from ._rows import Row
from ._session import Error


@dataclasses.dataclass(frozen=True)
class Summary:
    """What an audit found.

    Attributes:
        function: its name.
        low, shadow: what the two lanes computed in.
        semantics: what is modelled, in a sentence.
        findings: those whose fix changed the outputs, each on top of those before; then those that
            nothing mended.
        idle: findings with evidence whose fixes changed nothing, or that weren't tried.
        literals: constants that the format changes.
        arguments: those with numbers that overflow or vanish on the way in, a sentence each.
        benign: what looks bad and is so by design, a sentence each.
        error: of the outputs against the shadow.
        error_fixed: with the fixes of all findings applied.
        outputs: each output's path and error.
        rows: one for each equation that rounds.
        largest, smallest_normal, smallest, precision: of the low format.
        runs: how many runs of the program were made.
        environment: versions and device.
    """

    function: str
    low: str
    shadow: str
    semantics: str
    findings: tuple[Finding, ...]
    idle: tuple[Finding, ...]
    literals: tuple[Literal, ...]
    arguments: tuple[str, ...]
    benign: tuple[str, ...]
    error: Error
    error_fixed: Error
    outputs: tuple[tuple[str, Error], ...]
    rows: tuple[Row, ...]
    largest: float
    smallest_normal: float
    smallest: float
    precision: int
    runs: int
    environment: tuple[tuple[str, str], ...]
