"""The measurements of a comparison: figures derived from them, tables and curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from rich.console import Console

from ..._output import Rows, Tabular, tables_page
from ..._output._templates import STYLE, Panel, chart_svg
from ..._output._text import Text
from ..._types import Json

WINDOW = 50  # number of last steps over which the final loss is averaged
EARLY = 20  # number of first steps in which losses are compared with the reference's
SMOOTHING = 25  # steps
LEVELS = "▁▂▃▄▅▆▇█"
COLOURS = ("blue", "red", "green", "dark_orange", "magenta", "cyan")
HEADINGS = (  # the table fits into 80 columns
    "\nmethod", "final\nloss", "loss\nratio", "non-\nfinite", "bytes/\nparam", "step\nms",
    "step\nratio", "build\ns", "build\nratio",
)  # fmt: skip


@dataclass(frozen=True)
class Divergence:
    """The first step whose loss or new state was non-finite, and the cause that was found."""

    step: int
    why: str


@dataclass(frozen=True)
class Record:
    """The measurements of one method."""

    name: str
    what: str
    # one for each step; NaN if it wasn't finite or the method had stopped
    losses: tuple[float, ...]
    seconds: tuple[float, ...]  # wall time of each step that ran
    trace_seconds: float  # JAX traces its own functions once in a process
    compile_seconds: float
    state_bytes: int  # bytes of the state's arrays
    parameters: int
    non_finite: int  # steps whose loss or new state wasn't finite
    divergence: Divergence | None = None  # the first of them
    scales: tuple[float, ...] = ()  # the loss scale of each step
    skipped: int = 0  # steps that the method left out
    temporary_bytes: int = 0  # of the compiled step, beside arguments and results
    finals: tuple[float, ...] = ()  # the final loss from each seed; all else is of the first

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
class Comparison(Tabular):
    """The measurements of all methods on the same data."""

    program: str
    steps: int  # asked for
    seed: int
    records: tuple[Record, ...]
    interrupted: bool  # by a signal
    folder: str  # where the files are; "" if none were written
    environment: tuple[tuple[str, str], ...] = ()
    failure: str = ""  # what ended it early, or kept files from being written; "" for nothing
    signal: int = 0  # that ended it (SIGINT, SIGTERM, SIGHUP); 0 if none did

    def __repr__(self) -> str:
        names = ", ".join(record.name for record in self.records)
        return f"<Comparison of {names} on {self.program}, {self.steps_made} steps; summary()>"

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

    @property
    def title(self) -> str:
        return f"{self.program}, {len(self.records)} methods side by side"

    def sentences(self) -> list[str]:
        found = [
            f"{self.program}: {self.steps_made} steps, ratios to {self.reference.name}; final "
            f"loss: mean of the last {WINDOW}"
        ]
        for r in self.records:
            if r.divergence:
                found.append(f"{r.name}, step {r.divergence.step}: {r.divergence.why}")
        for r in self.records:
            if r.scales:
                scales = f"loss scale {r.scales[0]:g} to {r.scales[-1]:g}"
                found.append(f"{r.name}, {scales}, {r.skipped} steps left out")
        if self.interrupted:
            found.append(f"interrupted after {self.steps_made} of {self.steps} steps")
        return found + [f"Ended early: {self.failure}"] * bool(self.failure)

    def tables(self, *, everything: bool = True) -> list[Rows]:
        styles = [COLOURS[i % len(COLOURS)] for i in range(len(self.records))]
        found = [Rows("Methods", HEADINGS, [self._cells(r) for r in self.records], styles)]
        if everything:
            heads = ("method", "state, MB", "temporaries of a step, MB", "what it is")
            rows = [
                (r.name, f"{r.state_bytes / 1e6:.2f}", f"{r.temporary_bytes / 1e6:.2f}", r.what)
                for r in self.records
            ]
            found += [Rows("Memory", heads, rows), Rows("Run", ("", ""), self.environment)]
        return found

    def _cells(self, r: Record) -> list[str]:
        figures = (
            (r.final_loss, 3), (self.ratio(r, "final_loss"), 4), (r.non_finite, 0),
            (r.bytes_per_parameter, 2), (r.median_seconds * 1e3, 1),
            (self.ratio(r, "median_seconds"), 2), (r.build_seconds, 2),
            (self.ratio(r, "build_seconds"), 2),
        )  # fmt: skip
        cells = [f"{x:.{digits}f}" if math.isfinite(x) else "–" for x, digits in figures]
        if math.isfinite(r.spread):
            cells[0] += f"±{r.spread:.3f}"
        return [r.name, *cells]

    def show(self, console: Console | None = None, *, everything: bool = False) -> None:
        console = console or Console()
        super().show(console, everything=everything)
        curves = {r.name: smoothed(r.losses, 10) for r in self.records}
        lines = sparklines(curves, min(console.width, 100))
        for i, line in enumerate(lines):
            console.print(Text(line, style=COLOURS[(i - 1) % 6] if i else ""), no_wrap=True)
        if self.folder:
            console.print(Text(f"report: {self.folder}/report.html"), soft_wrap=True)

    def _page(self) -> str:
        scaled = [r for r in self.records if r.scales]
        charts = self.curves_svg()
        if scaled:
            exponents = [[math.log2(x) for x in r.scales] for r in scaled]
            panel = _panel(exponents, "loss scale, exponent of two")
            charts += chart_svg("Loss scales", [panel], _legend(scaled))
        return tables_page(
            self.title,
            self.sentences(),
            self.tables(),
            chart=Markup(charts),  # its template escapes names
            styles=f"<style>{STYLE}</style>",
        )

    def curves_svg(self) -> str:
        """Draws two panels: smoothed losses, and their differences from the reference."""
        losses = [smoothed(r.losses, SMOOTHING) for r in self.records]
        reference = losses[self.records.index(self.reference)]
        apart = [
            [100 * (a / b - 1) if b else math.nan for a, b in zip(ys, reference, strict=True)]
            for ys in losses
        ]
        panels = [_panel(losses, f"training loss, mean of the last {SMOOTHING} steps")]
        if len(losses) > 1:
            panels.append(_panel(apart, f"difference of that to {self.reference.name}, %"))
        return chart_svg("Loss curves", panels, _legend(self.records))

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

    as_dict = summary

    def _row(self, record: Record) -> dict[str, Json]:
        same = (
            "name", "what", "trace_seconds", "compile_seconds", "state_bytes", "parameters",
            "temporary_bytes",
        )  # fmt: skip
        row: dict[str, Json] = {name: getattr(record, name) for name in same}
        for name in ("final_loss", "median_seconds", "build_seconds", "bytes_per_parameter"):
            row[name] = finite_or_none(getattr(record, name))
            row[f"{name}_ratio"] = finite_or_none(self.ratio(record, name))
        first = record.divergence
        return row | {
            "non_finite_steps": record.non_finite,
            "skipped_steps": record.skipped,
            "final_loss_by_seed": [finite_or_none(x) for x in record.finals],
            "final_loss_spread": finite_or_none(record.spread),
            "early_difference": finite_or_none(self.early_difference(record)),
            "loss_scale_at_end": record.scales[-1] if record.scales else None,
            "first_non_finite": first and {"step": first.step, "why": first.why},
        }


def finite_or_none(x: float) -> float | None:
    """Returns x, or None if it is NaN or infinite, which JSON doesn't have."""
    return x if math.isfinite(x) else None


def smoothed(losses: Sequence[float], width: int) -> list[float]:
    """Returns the means over a sliding window of the last `width` steps."""
    windows = (losses[max(0, i + 1 - width) : i + 1] for i in range(len(losses)))
    return [sum(w) / len(w) for w in windows]


def sparklines(curves: Mapping[str, Sequence[float]], width: int) -> list[str]:
    """Returns a line on the range of all curves, and a line that draws each over its index."""
    finite = [y for ys in curves.values() for y in ys if math.isfinite(y)]
    if not finite:
        return ["no finite loss to draw"]
    low, high, longest = min(finite), max(finite), max(map(len, curves.values()))
    margin = max(map(len, curves)) + 1
    columns = max(width - margin, 8)

    def mark(y: float) -> str:
        top = len(LEVELS) - 1
        return LEVELS[round(top * (y - low) / ((high - low) or 1))] if math.isfinite(y) else " "

    lines = [f"loss {low:.3f} to {high:.3f} in {longest} steps"]
    for name, ys in curves.items():
        at = [x * longest // columns for x in range(columns)]
        lines.append(f"{name:{margin}}" + "".join(mark(ys[i]) for i in at if i < len(ys)))
    return lines


def _panel(curves: Sequence[Sequence[float]], title: str) -> Panel:
    return Panel(title, "step", [list(enumerate(ys, start=1)) for ys in curves])


def _legend(records: Sequence[Record]) -> list[str]:
    dead = [r.divergence is not None and not math.isfinite(r.final_loss) for r in records]
    return [r.name + (" (diverged)" if d else "") for r, d in zip(records, dead, strict=True)]
