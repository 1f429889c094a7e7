"""What a comparison measured: plain data, and the figures derived from it."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._deprecated import renamed_arguments

WINDOW = 50  # the final loss is the mean over so many last steps
EARLY = 20  # steps in which a method shows how good its scales are before it has seen much


@dataclass(frozen=True)
class Divergence:
    """The first step whose loss or new state was non-finite, and the cause that was found."""

    step: int
    why: str


@renamed_arguments(death="divergence")
@dataclass(frozen=True)
class Record:
    """One method's run.

    Attributes:
        name, what: of the method.
        losses: one for each step, NaN where the loss wasn't finite or the method had stopped.
        seconds: wall time of each step that ran.
        trace_seconds, compile_seconds: of the step, ahead of time.
        state_bytes, parameters: bytes in the state's live buffers, numbers in its params.
        non_finite: steps whose loss or new state wasn't finite.
        divergence: the first of them, None if there was none.
        scales: the loss scale of each step, for methods that have one.
        skipped: steps that the method left out, its state untouched.
        temporary_bytes: what the compiled step needs beside its arguments and results.
        finals: the final loss from each seed; figures and curves are the first one's.
    """

    name: str
    what: str
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    trace_seconds: float
    compile_seconds: float
    state_bytes: int
    parameters: int
    non_finite: int
    divergence: Divergence | None = None
    scales: tuple[float, ...] = ()
    skipped: int = 0
    temporary_bytes: int = 0
    finals: tuple[float, ...] = ()

    @property
    def final_loss(self) -> float:
        """Mean of the last steps' losses, and over the seeds; NaN if one of them is."""
        finals = self.finals or (last_mean(self.losses),)
        return sum(finals) / len(finals)

    @property
    def spread(self) -> float:
        """Standard deviation of the final loss over the seeds; NaN of one, or where one is."""
        return float(np.std(self.finals, ddof=1)) if len(self.finals) > 1 else math.nan

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds) if self.seconds else math.nan

    @property
    def build_seconds(self) -> float:
        return self.trace_seconds + self.compile_seconds

    @property
    def bytes_per_parameter(self) -> float:
        return self.state_bytes / self.parameters


def last_mean(losses: Sequence[float]) -> float:
    """The mean over the last steps; NaN if one of them is, or where there is none."""
    last = losses[-WINDOW:]
    return sum(last) / len(last) if last else math.nan


@dataclass(frozen=True)
class Comparison:
    """All methods' runs on the same data.

    Attributes:
        program: name of the program.
        steps: how many were asked for; `interrupted` tells whether fewer were made.
        seed: of parameters and data.
        records: one for each method; the first is what ratios refer to.
        folder: where the files are; "" if they couldn't be written anywhere.
        environment: versions and device.
        failure: what ended the run early or kept its files from their folder, a sentence; "" if
            nothing did.
        signal: the signal that ended it (SIGINT, SIGTERM, SIGHUP); 0 if none did.
    """

    program: str
    steps: int
    seed: int
    records: tuple[Record, ...]
    interrupted: bool
    folder: str
    environment: tuple[tuple[str, str], ...] = ()
    failure: str = ""
    signal: int = 0

    @property
    def reference(self) -> Record:
        """The float32 run where there is one, else the first."""
        return next((r for r in self.records if r.name == "float32"), self.records[0])

    @property
    def steps_made(self) -> int:
        return max(len(r.losses) for r in self.records)

    def ratio(self, record: Record, figure: str) -> float:
        """A record's figure over the reference's; NaN where either is missing."""
        ours, theirs = getattr(record, figure), getattr(self.reference, figure)
        return ours / theirs if theirs else math.nan

    def early_difference(self, record: Record) -> float:
        """Largest relative difference of a loss from the reference's in the first 20 steps."""
        pairs = zip(record.losses[:EARLY], self.reference.losses[:EARLY], strict=True)
        return float(np.max([abs(a / b - 1) if b else math.nan for a, b in pairs]))

    def summary(self) -> dict[str, Any]:
        """All figures, ready for JSON: no NaN, no infinity, null instead."""
        return {
            "program": self.program,
            "steps_asked": self.steps,
            "steps_made": self.steps_made,
            "seed": self.seed,
            "interrupted": self.interrupted,
            "failure": self.failure or None,
            "environment": dict(self.environment),
            "methods": [self._row(r) for r in self.records],
        }

    def _row(self, record: Record) -> dict[str, Any]:
        figures = ("final_loss", "median_seconds", "build_seconds", "bytes_per_parameter")
        row: dict[str, Any] = {"name": record.name, "what": record.what}
        for figure in figures:
            row[figure] = finite_or_none(getattr(record, figure))
            row[f"{figure}_ratio"] = finite_or_none(self.ratio(record, figure))
        row |= {"trace_seconds": record.trace_seconds, "compile_seconds": record.compile_seconds}
        row |= {"state_bytes": record.state_bytes, "parameters": record.parameters}
        row |= {"non_finite_steps": record.non_finite, "skipped_steps": record.skipped}
        row |= {"temporary_bytes": record.temporary_bytes}
        row |= {"final_loss_by_seed": [finite_or_none(x) for x in record.finals]}
        row |= {"final_loss_spread": finite_or_none(record.spread)}
        row |= {"early_difference": finite_or_none(self.early_difference(record))}
        row |= {"loss_scale_at_end": record.scales[-1] if record.scales else None}
        first = record.divergence
        row["first_non_finite"] = first and {"step": first.step, "why": first.why}
        return row


def finite_or_none(x: float) -> float | None:
    """x, or None for what JSON has no number for."""
    return x if math.isfinite(x) else None


def smoothed(losses: Sequence[float], width: int) -> list[float]:
    """Mean over a sliding window of the last `width` steps; a NaN in it is a NaN.

    Example:
        >>> smoothed([4.0, 2.0, 0.0], width=2)
        [4.0, 3.0, 1.0]
    """
    windows = (losses[max(0, i + 1 - width) : i + 1] for i in range(len(losses)))
    return [sum(w) / len(w) for w in windows]
