"""The measurements of a comparison, and figures derived from them."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..._types import Json

WINDOW = 50  # number of last steps over which the final loss is averaged
EARLY = 20  # number of first steps in which losses are compared with the reference's


@dataclass(frozen=True)
class Divergence:
    """The first step whose loss or new state was non-finite, and the cause that was found."""

    step: int
    why: str


@dataclass(frozen=True)
class Record:
    """The measurements of one method.

    Attributes:
        name, what: name and description of the method.
        losses: one for each step; NaN if it wasn't finite or the method had stopped.
        seconds: wall time of each step that ran.
        trace_seconds, compile_seconds: time to trace and to compile the step. JAX traces its own
            functions once in a process: later methods reuse what earlier ones traced.
        state_bytes, parameters: bytes of the state's arrays, number of parameters.
        non_finite: number of steps whose loss or new state wasn't finite.
        divergence: the first of them, None if there was none.
        scales: the loss scale of each step; () for methods without one.
        skipped: number of steps that the method left out.
        temporary_bytes: memory of the compiled step beside arguments and results.
        finals: the final loss from each seed; all else is of the first seed.
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
        """The mean of the last steps' losses over all seeds; NaN if one of them is NaN."""
        finals = self.finals or (last_mean(self.losses),)
        return sum(finals) / len(finals)

    @property
    def spread(self) -> float:
        """The standard deviation of the final loss over the seeds; NaN for a single seed."""
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
    """Returns the mean over the last steps; NaN if one of them is NaN, or there is none."""
    last = losses[-WINDOW:]
    return sum(last) / len(last) if last else math.nan


@dataclass(frozen=True)
class Comparison:
    """The measurements of all methods on the same data.

    Attributes:
        program: name of the program.
        steps: number of steps asked for; fewer were made if `interrupted` or `failure`.
        seed: of parameters and data.
        records: one for each method.
        interrupted: True if a signal ended the training early.
        folder: where the files are; "" if none were written.
        environment: versions and device.
        failure: a sentence on the error that ended the training early or kept files from being
            written to the folder asked for; "" if there was none.
        signal: the signal that ended the training (SIGINT, SIGTERM, SIGHUP); 0 if none did.
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

    def __repr__(self) -> str:
        names = ", ".join(record.name for record in self.records)
        return f"<Comparison of {names} on {self.program}, {self.steps_made} steps; summary()>"

    def _repr_html_(self) -> str:
        """Returns the losses as a table, as a notebook shows it."""
        rows = "".join(
            f"<tr><td>{html.escape(record.name)}</td><td>{record.final_loss:.4f}</td></tr>"
            for record in self.records
        )
        head = f"<tr><th>{html.escape(self.program)}</th><th>final loss</th></tr>"
        return f"<table>{head}{rows}</table>"

    @property
    def reference(self) -> Record:
        """The record that ratios refer to: float32's if there is one, else the first."""
        return next((r for r in self.records if r.name == "float32"), self.records[0])

    @property
    def steps_made(self) -> int:
        return max(len(r.losses) for r in self.records)

    def ratio(self, record: Record, figure: str) -> float:
        """Returns a record's figure divided by the reference's; NaN if either is missing."""
        ours, theirs = getattr(record, figure), getattr(self.reference, figure)
        return ours / theirs if theirs else math.nan

    def early_difference(self, record: Record) -> float:
        """Returns the largest relative difference from the reference's loss in the first steps."""
        pairs = zip(record.losses[:EARLY], self.reference.losses[:EARLY], strict=True)
        return float(np.max([abs(a / b - 1) if b else math.nan for a, b in pairs]))

    def summary(self) -> dict[str, Json]:
        """Returns all figures for JSON, with None for NaN and infinity."""
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

    def _row(self, record: Record) -> dict[str, Json]:
        figures = ("final_loss", "median_seconds", "build_seconds", "bytes_per_parameter")
        same = ("trace_seconds", "compile_seconds", "state_bytes", "parameters", "temporary_bytes")
        row: dict[str, Json] = {name: getattr(record, name) for name in ("name", "what", *same)}
        for figure in figures:
            row[figure] = finite_or_none(getattr(record, figure))
            row[f"{figure}_ratio"] = finite_or_none(self.ratio(record, figure))
        row |= {"non_finite_steps": record.non_finite, "skipped_steps": record.skipped}
        row |= {"final_loss_by_seed": [finite_or_none(x) for x in record.finals]}
        row |= {"final_loss_spread": finite_or_none(record.spread)}
        row |= {"early_difference": finite_or_none(self.early_difference(record))}
        row |= {"loss_scale_at_end": record.scales[-1] if record.scales else None}
        first = record.divergence
        row["first_non_finite"] = first and {"step": first.step, "why": first.why}
        return row


def finite_or_none(x: float) -> float | None:
    """Returns x, or None if it is NaN or infinite, which JSON doesn't have."""
    return x if math.isfinite(x) else None


def smoothed(losses: Sequence[float], width: int) -> list[float]:
    """Returns the means over a sliding window of the last `width` steps.

    Example:
        >>> smoothed([4.0, 2.0, 0.0], width=2)
        [4.0, 3.0, 1.0]
    """
    windows = (losses[max(0, i + 1 - width) : i + 1] for i in range(len(losses)))
    return [sum(w) / len(w) for w in windows]
