"""The folder of a run: ``run.json``, ``step.jaxpr``, checkpoints, metrics, TensorBoard's events."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from importlib.metadata import version
from itertools import count, zip_longest
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from ..._check import checked
from ..._output import Folder, check_source
from ..._types import Json, PyTree
from ..._user_file import InputError
from .._compare._results import finite_or_none
from . import _checkpoint as checkpoint
from ._sharding import all_gather_json, call_on_first, is_first

if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager

FILE, PROGRAM = "run.json", "step.jaxpr"


class CheckpointError(RuntimeError):
    """Raised if a checkpoint can't be written; the message names the last good one."""


def run_folder(
    out: str | Path | Folder | None, resume: bool, settings: checkpoint.Settings
) -> Folder | None:
    """Returns the folder of a run, None if it has none; creates and writes nothing."""
    if not resume:
        return None if out is None else Folder.at(out)
    if out is None:
        raise InputError("resume needs the folder of the run: give it as out (--out)")
    folder = Folder(out.path if isinstance(out, Folder) else Path(out), new=False)
    if folder.path.exists() and not folder.path.is_dir():
        raise InputError(f"{out} is no folder of scalewise train: it is no folder")
    _read_identity(folder, settings)
    return folder


@contextmanager
def claimed_by_first(folder: Folder | None) -> Iterator[Folder | None]:
    """Creates and locks the first process' folder for all; yields it under the name that it got."""
    with ExitStack() as stack:

        def claim() -> str | None:
            return folder and str(stack.enter_context(folder.claimed()).path.absolute())

        path = call_on_first(claim)
        yield None if path is None else Folder(Path(path), new=False)


class RunFolder:
    """Reads and writes a run's files and checkpoints; all processes call the same methods.

    ``settings`` are what checkpoints and ``run.json`` say about the run.
    """

    def __init__(
        self, folder: Folder, settings: checkpoint.Settings, keep: int, allow_changes: bool
    ):
        self._folder, self._settings, self._keep = folder, settings, keep
        self._path = folder.path.absolute() / "checkpoints"
        self._expected = {} if allow_changes else settings
        self._run = ""  # the identity that its checkpoints carry

    @cached_property
    def _manager(self) -> CheckpointManager:
        """Orbax's manager, created after damaged checkpoints were renamed: it fails on some."""
        ocp = checkpoint.orbax()
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # errors are raised as well
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        return ocp.CheckpointManager(self._path, options=options)

    def save(self, step: int, state: PyTree) -> None:
        items = checkpoint.items_of(step, state, self._settings, self._run)
        try:
            with checkpoint.closed_loops_ignored():
                manager = self._manager
                if not manager.save(step, args=items, force=True):
                    raise OSError("Orbax declined to save")
        except Exception as error:  # whatever Orbax, tensorstore or the system raises
            for left in self._path.glob(f"{step}.orbax-checkpoint-tmp*") if is_first() else ():
                shutil.rmtree(left, ignore_errors=True)
            good = [p.name for p in self._checkpoints() if p.name != str(step)]
            last = f"the last good one is of step {good[0]}" if good else "there is none before it"
            raise CheckpointError(
                f"the checkpoint of step {step} can't be written to {self._path}: "
                f"{checkpoint.in_short(error)}; {last}"
            ) from error

    def restore(self, template: PyTree, program: str) -> tuple[int, PyTree, list[str]] | None:
        """Reads the newest good checkpoint, renames damaged ones to ``<step>.damaged``, and writes
        ``run.json`` and ``step.jaxpr``.

        Returns the step, the state, and a sentence for each damaged checkpoint; None if there is no
        checkpoint at all. Nothing is renamed if the run is another one, or none is whole.
        """
        if self._expected:
            call_on_first(lambda: _check_program(self._folder, program))
        run = call_on_first(lambda: _read_identity(self._folder, self._expected))
        found, self._run = self._newest(template, run)
        call_on_first(lambda: self._write_identity(program))
        return found

    def _newest(
        self, template: PyTree, run: str | None
    ) -> tuple[tuple[int, PyTree, list[str]] | None, str]:
        """Returns the newest good checkpoint, and the identity of the run: ``run``, or most's."""
        good: dict[Path, dict[str, Json]] = {}
        damaged: dict[Path, str] = {}
        for folder in self._checkpoints():
            try:
                good[folder] = checkpoint.read_meta(folder)
            except checkpoint.DamagedError as error:
                damaged[folder] = str(error)
        seen = {folder.name: meta["seal"] for folder, meta in good.items()}
        if any(other != seen for other in all_gather_json(seen)):
            raise InputError(
                f"the processes of this run see different checkpoints in {self._path}: give them a "
                "folder on a file system that all of them share"
            )
        if run is None and good:
            runs = [meta["run"] for meta in good.values()]
            run = max(runs, key=runs.count)
        found: tuple[int, PyTree] | None = None
        for folder, meta in good.items():
            try:
                if meta["run"] != run:
                    raise checkpoint.DamagedError("it belongs to another run")
                if found is None:
                    _check_settings(meta["about"], self._expected, self._path)
                    found = meta["step"], checkpoint.read_state(folder, meta, template)
            except checkpoint.DamagedError as error:
                damaged[folder] = str(error)
        told = {
            folder: f"the checkpoint of step {folder.name} is damaged: {damaged[folder]}"
            for folder in self._checkpoints()
            if folder in damaged
        }
        if found is not None and run is not None:
            aside = {p: call_on_first(partial(_set_aside, p)) for p in told}
            return (*found, [f"{told[p]}; set aside as {name}" for p, name in aside.items()]), run
        if told:
            raise InputError(f"no checkpoint in {self._path} is whole: {'; '.join(told.values())}")
        if run is None:
            raise InputError(
                f"{FILE} isn't what scalewise train wrote there, and there is no checkpoint to "
                "tell which run it was: begin another folder as out (--out)"
            )
        return None, run

    def _checkpoints(self) -> list[Path]:
        """Returns the entries whose names are numbers, the largest first."""
        there = self._path.iterdir() if self._path.is_dir() else ()
        named = (p for p in there if re.fullmatch("0|[1-9][0-9]*", p.name))
        return sorted(named, key=lambda p: -int(p.name))

    def _write_identity(self, program: str) -> None:
        # first: a folder without it is foreign
        self._folder.write_json(FILE, self._settings | {"run": self._run})
        file = self._folder.path / PROGRAM
        if not file.exists() or file.read_bytes() != program.encode():
            self._folder.write(PROGRAM, program)

    def close(self) -> None:
        if "_manager" in self.__dict__:
            self._manager.close()


def _set_aside(folder: Path) -> str:
    """Renames a damaged checkpoint, so that it is kept but never read; returns the new name."""
    names = (f"{folder.name}.damaged" + f"-{n}" * (n > 1) for n in count(1))
    name = next(name for name in names if not os.path.lexists(folder.with_name(name)))
    folder.rename(folder.with_name(name))
    return name


def _read_identity(folder: Folder, settings: checkpoint.Settings) -> str | None:
    """Returns the identity of the run in a folder: a new one for an empty folder.

    None if ``run.json`` is damaged, so that the checkpoints have to tell it.
    """
    file = folder.path / FILE
    if not file.exists():
        if folder.entries():
            raise InputError(f"{folder.path} is no folder of scalewise train: it has no {FILE}")
        return secrets.token_hex(16)
    check_source(file)
    try:
        found = json.loads(file.read_bytes().decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("run"), str):
        return None
    _check_settings(found, settings, folder.path)
    return found["run"]


def _check_settings(written: Mapping[str, Json], given: Mapping[str, Json], folder: Path) -> None:
    for name in given:
        if written.get(name) != given[name]:
            raise InputError(
                f"{folder} is a run with {name} {written.get(name)!r}, not {given[name]!r}: "
                "resume it as it was begun, or begin another folder as out (--out)"
            )


def program_text(jaxpr: Any, batch: PyTree) -> str:
    """Returns a step's jaxpr as text, with digests of its constants and of the first batch, and no
    memory addresses."""
    text = re.sub(r"\b0x[0-9a-f]+", "0x", jaxpr.pretty_print(source_info=False, name_stack=False))
    constants, first = map(checkpoint.state_digest, (jaxpr.consts, batch))
    return f"jax {version('jax')}\nconstants {constants}\n{text}\nfirst batch {first}\n"


def _check_program(folder: Folder, program: str) -> None:
    file = folder.path / PROGRAM
    if not file.exists():
        return
    check_source(file)
    before = file.read_bytes().decode(errors="replace").splitlines()
    for old, new in zip_longest(before, program.splitlines(), fillvalue=""):
        if old != new:
            raise InputError(
                f"{folder.path} is a run of another program (learning rate, loss, batches or "
                f"version of JAX): {old.strip()[:150]!r} is now {new.strip()[:150]!r}; allow it "
                "with allow_changes=True (--allow-changes), or begin another folder as out (--out)"
            )


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
    try:
        row = json.loads(line.decode())
        json.dumps(row, allow_nan=False)
    except (ValueError, RecursionError):  # cut short by a kill, or damaged
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
        from tensorboardX import summary  # pyright: ignore
        from tensorboardX.event_file_writer import EventsWriter  # pyright: ignore
        from tensorboardX.proto import event_pb2  # pyright: ignore

        self._event, self._summary = cast(ModuleType, event_pb2), cast(ModuleType, summary)
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
        for tag, x in numbers.items():
            self._write(step, summary=self._summary.scalar(tag, x))
        for tag, bins in histograms.items():
            if bins:
                self._write(step, summary=self._histogram(tag, bins))
        if time.monotonic() - self._flushed > 10:
            self._writer.flush()
            self._flushed = time.monotonic()

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
        self._writer.write_event(self._event.Event(wall_time=time.time(), step=step, **content))

    def close(self) -> None:
        self._writer.close()
