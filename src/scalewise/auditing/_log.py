"""``metrics.jsonl`` of a monitored run, and TensorBoard's events."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .._output import append, check_source, replacing
from .._types import Json

NAME = "metrics.jsonl"


class Log:
    """Writes ``metrics.jsonl`` in a run's folder, and TensorBoard events if tensorboardX is there.

    Lines of steps after ``after``, which the run makes again, are removed.
    """

    def __init__(self, folder: Path, *, after: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._file = file = folder / NAME
        if file.exists():
            check_source(file)
            rows = {n: row for n, row in map(_read, file.read_bytes().splitlines()) if n <= after}
            kept = "".join(json.dumps(rows[n]) + "\n" for n in sorted(rows) if n >= 0)
            with replacing(file) as new:
                new.write(kept.encode())
        self._events: _Events | None = None
        with suppress(ImportError, OSError):  # no tensorboardX, or its file can't be written
            self._events = _Events(folder / "tensorboard", after)

    def step(
        self, row: Mapping[str, Json], histograms: Mapping[str, Mapping[int, int]] | None = None
    ) -> None:
        """Writes one line, whole or not at all; numbers that aren't finite become null.

        ``histograms`` are counts by exponent of two. If TensorBoard's events can't be written, no
        more of them are.
        """
        row = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
        }
        counted = histograms or {}
        lists: dict[str, Json] = {k: {str(e): n for e, n in v.items()} for k, v in counted.items()}
        append(self._file, (json.dumps(row | lists, allow_nan=False) + "\n").encode())
        if self._events is not None:
            try:
                self._events.write(row, counted)
            except OSError:
                self._events = None

    def close(self) -> None:
        if self._events is not None:
            with suppress(OSError):
                self._events.writer.close()


def _read(line: bytes) -> tuple[int, dict[str, Json]]:
    """Returns the step of a line and the line; step -1 if a kill cut it short, or it is damaged."""
    try:
        row = json.loads(line.decode())
        json.dumps(row, allow_nan=False)
        return (row["step"] if type(row["step"]) is int else -1), row
    except (ValueError, RecursionError, KeyError, TypeError):
        return -1, {}


class _Events:
    """Writes TensorBoard's events from the calling thread.

    tensorboardX's SummaryWriter writes from a thread of its own, which ends with an exception when
    the disk is full; the program then waits for it forever.
    """

    def __init__(self, path: Path, after: int):
        from tensorboardX import summary  # pyright: ignore
        from tensorboardX.event_file_writer import EventsWriter  # pyright: ignore
        from tensorboardX.proto import event_pb2  # pyright: ignore

        self._event: Any = event_pb2
        self._summary: Any = summary
        path.mkdir(exist_ok=True, parents=True)
        number = len(list(path.iterdir()))  # two resumptions within a second write two files
        self.writer = EventsWriter(str(path / "events"), f".{os.getpid()}.{number}")
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._write(after + 1, session_log=start)  # makes TensorBoard drop later steps' old events

    def write(self, row: Mapping[str, Json], histograms: Mapping[str, Mapping[int, int]]) -> None:
        step = row["step"]
        for tag, x in row.items():
            if tag != "step" and x is not None:
                self._write(step, summary=self._summary.scalar(tag, float(x)))
        for tag, bins in histograms.items():
            if bins:
                self._write(step, summary=self._histogram(tag, bins))
        self.writer.flush()

    def _histogram(self, tag: str, bins: Mapping[int, int]) -> object:
        exponents = range(min(bins), max(bins) + 1)
        counts = [float(bins.get(e, 0)) for e in exponents]
        return self._summary.histogram_raw(
            tag, min=exponents[0], max=exponents[-1] + 1, num=sum(counts),
            sum=sum((e + 0.5) * n for e, n in bins.items()),
            sum_squares=sum((e + 0.5) ** 2 * n for e, n in bins.items()),
            bucket_limits=[float(e + 1) for e in exponents], bucket_counts=counts,
        )  # fmt: skip

    def _write(self, step: int, **content: object) -> None:
        self.writer.write_event(self._event.Event(wall_time=time.time(), step=step, **content))
