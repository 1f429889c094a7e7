"""Writes a run's metrics at each step: lines of JSON, and events for TensorBoard."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import cast

from ..._check import checked
from ..._output import Folder, check_source
from ..._types import Json
from .._compare._results import finite_or_none

NAME = "metrics.jsonl"


@checked
class Log:
    """Writes ``metrics.jsonl`` in a run's folder, and TensorBoard events if tensorboardX is there.

    Lines of steps after ``after``, which the run makes again, are removed. ``losses`` has those of
    the last 50 lines that are kept; NaN for one that wasn't finite.
    """

    def __init__(self, folder: Folder, *, after: int):
        self._folder = folder
        self.losses: list[float] = []
        file = folder.path / NAME
        if file.exists():
            check_source(file)
            lines = file.read_bytes().splitlines()
            rows = {row["step"]: row for row in map(_read, lines) if row}
            kept = [rows[n] for n in sorted(rows) if n <= after]
            folder.write(NAME, "".join(json.dumps(row) + "\n" for row in kept))
            self.losses = [_loss(row) for row in kept[-50:]]
        self._events: _Events | None = None
        with suppress(ImportError, OSError):  # no tensorboardX, or its file can't be written
            self._events = _Events(folder.path / "tensorboard", after)

    def step(
        self, row: Mapping[str, Json], histograms: Mapping[str, Mapping[int, int]] | None = None
    ) -> None:
        """Writes one line, whole or not at all; numbers that aren't finite become null.

        ``histograms`` are counts by exponent of two. If TensorBoard's events can't be written, no
        more of them are.
        """
        row = {k: finite_or_none(v) if isinstance(v, float) else v for k, v in row.items()}
        counted = histograms or {}
        lists: dict[str, Json] = {k: {str(e): n for e, n in v.items()} for k, v in counted.items()}
        self._folder.append(NAME, [row | lists])
        if self._events is not None:
            numbers = {k: float(v) for k, v in row.items() if k != "step" and v is not None}
            try:
                self._events.write(row["step"], numbers, counted)
            except OSError:
                self._events = None

    def close(self) -> None:
        if self._events is not None:
            with suppress(OSError):
                self._events.close()


def _read(line: bytes) -> dict[str, Json] | None:
    """Returns a line's row; None if the line was cut short by a kill, or is damaged."""
    try:
        row = json.loads(line.decode())
        json.dumps(row, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(row, dict) and isinstance(row.get("step"), int)
    return row if whole and not isinstance(row["step"], bool) else None


def _loss(row: Mapping[str, Json]) -> float:
    loss = row.get("loss")
    return float(loss) if isinstance(loss, int | float) else math.nan


class _Events:
    """Writes TensorBoard's events from the calling thread.

    tensorboardX's SummaryWriter writes from a thread of its own, which ends with an exception when
    the disk is full; the program then waits for it forever.
    """

    def __init__(self, path: Path, after: int):
        from tensorboardX.event_file_writer import EventsWriter  # pyright: ignore
        from tensorboardX.proto import event_pb2, summary_pb2  # pyright: ignore

        self._event = cast(ModuleType, event_pb2)
        self._summary = cast(ModuleType, summary_pb2)
        path.mkdir(exist_ok=True, parents=True)
        number = len(list(path.iterdir()))  # two resumptions within a second write two files
        suffix = f".{os.getpid()}.{number}"
        self._writer = EventsWriter(str(path / "events"), suffix)
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._write(after + 1, session_log=start)  # makes TensorBoard drop later steps' old events
        self._flushed = time.monotonic()

    def write(
        self,
        step: int,
        numbers: Mapping[str, float],
        histograms: Mapping[str, Mapping[int, int]],
    ) -> None:
        value = [self._summary.Summary.Value(tag=tag, simple_value=x) for tag, x in numbers.items()]
        value += [
            self._summary.Summary.Value(tag=tag, histo=self._histogram(bins))
            for tag, bins in histograms.items()
            if bins
        ]
        self._write(step, summary=self._summary.Summary(value=value))
        if time.monotonic() - self._flushed > 10:
            self._writer.flush()
            self._flushed = time.monotonic()

    def _histogram(self, bins: Mapping[int, int]) -> object:
        exponents = range(min(bins), max(bins) + 1)
        counts = [float(bins.get(e, 0)) for e in exponents]
        return self._summary.HistogramProto(
            min=exponents[0],
            max=exponents[-1] + 1,
            num=sum(counts),
            sum=sum((e + 0.5) * n for e, n in bins.items()),
            sum_squares=sum((e + 0.5) ** 2 * n for e, n in bins.items()),
            bucket_limit=[float(e + 1) for e in exponents],
            bucket=counts,
        )

    def _write(self, step: int, **content: object) -> None:
        self._writer.write_event(self._event.Event(wall_time=time.time(), step=step, **content))

    def close(self) -> None:
        self._writer.close()
