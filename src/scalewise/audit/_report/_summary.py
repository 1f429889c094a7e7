"""What an audit found, as plain data."""

from __future__ import annotations

import dataclasses

from .._run._loss_scale import shares
from .._run._rows import Row
from .._run._session import Error
from .._search._findings import Finding
from .._search._literals import Literal


@dataclasses.dataclass(frozen=True)
class Summary:
    """What an audit found.

    Attributes:
        function: its name.
        low, shadow: what the two lanes computed in.
        semantics: what is modelled, in a sentence.
        findings: those whose fix changed the outputs, what it did to them most first (fixes were
            applied on top of each other, see ``Finding.order``); then those that nothing mended,
            last what nothing was tried for.
        idle: findings with evidence whose fixes changed nothing, or that weren't tried.
        literals: constants that the format changes.
        arguments: those with numbers that overflow or vanish on the way in, a sentence each.
        ranges: of the arguments, by the first two keys of their paths: counts of the exponents of
            their nonzero numbers from ``2**LOWEST`` up.
        benign: what looks bad and is so by design, a sentence each.
        error: of the outputs against the shadow.
        error_fixed: with the fixes of all findings applied.
        error_wide: with float32 for all operations: what is left comes in with the arguments, which
            the format holds. 0 where that wasn't run.
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
    ranges: tuple[tuple[str, tuple[int, ...]], ...]
    benign: tuple[str, ...]
    error: Error
    error_fixed: Error
    error_wide: Error
    outputs: tuple[tuple[str, Error], ...]
    rows: tuple[Row, ...]
    largest: float
    smallest_normal: float
    smallest: float
    precision: int
    runs: int
    environment: tuple[tuple[str, str], ...]

    @property
    def updates_lost(self) -> float:
        """The share of additions to the optimizer's arrays and weights that changed nothing.

        A change under 2^-p of what it is added to is lost, p the format's precision: the 2^-11 rule
        for FP16, 2^-8 for BF16. (Sampled, as all that concerns additions.)
        """
        rows = [r for r in self.rows if r.direction == "optimizer" and r["added"]]
        return sum(r["swamped"] for r in rows) / max(sum(r["added"] for r in rows), 1.0)

    def loss_scales(self, powers: range = range(25)) -> dict[int, tuple[float, float]]:
        """What a loss scale of ``2**k`` would do to the gradients, for each k.

        Returns:
            The shares of the backward pass's nonzero numbers that would still be flushed, and that
            would overflow; from the histograms of the shadow, whole binades. Nothing if there is no
            backward pass.
        """
        rows = [row for row in self.rows if row.direction == "backward"]
        return shares(rows, self.smallest / 2, self.largest, powers) if rows else {}
