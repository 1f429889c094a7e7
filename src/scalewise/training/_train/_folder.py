"""The folder of a run: ``run.json``, ``step.jaxpr``, and the checkpoints to continue from."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from importlib.metadata import version
from itertools import count, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._output import Folder, check_source
from ..._types import Json, PyTree
from ..._user_file import InputError
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
        raise InputError("resume needs the folder of the run: name it with --out")
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
        try:
            return ocp.CheckpointManager(self._path, options=options)
        except Exception as error:  # whatever Orbax or the system raises
            raise CheckpointError(
                f"no checkpoint can be written to {self._path}: {checkpoint.in_short(error)}"
            ) from error

    def save(self, step: int, state: PyTree) -> None:
        """Writes the checkpoint of a step, atomically."""
        manager, items = self._manager, checkpoint.items_of(step, state, self._settings, self._run)
        try:
            with checkpoint.closed_loops_ignored():
                if not manager.save(step, args=items, force=True):
                    raise OSError("Orbax declined to save")
                manager.wait_until_finished()
        except Exception as error:  # whatever Orbax, tensorstore or the system raises
            for left in self._path.glob(f"{step}.orbax-checkpoint-tmp*") if is_first() else ():
                shutil.rmtree(left, ignore_errors=True)
            manager.reload()
            good = [s for s in sorted(manager.all_steps()) if s != step]
            last = f"the last good one is of step {good[-1]}" if good else "there is none before it"
            raise CheckpointError(
                f"the checkpoint of step {step} can't be written to {self._path}: "
                f"{checkpoint.in_short(error)}; {last}"
            ) from error

    def restore(self, template: PyTree, program: str) -> tuple[int, PyTree, list[str]] | None:
        """Reads the newest good checkpoint, renames damaged ones to ``<step>.damaged``, and writes
        ``run.json`` and ``step.jaxpr``.

        Returns the step, the state, and a sentence for each damaged checkpoint; None if the folder
        holds no checkpoint at all. Nothing is renamed if program, settings or arrays differ from
        the template's, or if all checkpoints are damaged.
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
            raise InputError(f"the processes see different checkpoints in {self._path}: share it")
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
                "tell which run it was: begin another folder with --out"
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
                "resume it as it was begun, or begin another folder with --out"
            )


def program_text(jaxpr: Any) -> str:
    """Returns a step's jaxpr as text, with a digest of its constants and no memory addresses."""
    text = re.sub(r"\b0x[0-9a-f]+", "0x", jaxpr.pretty_print(source_info=False, name_stack=False))
    return f"jax {version('jax')}\nconstants {checkpoint.state_digest(jaxpr.consts)}\n{text}\n"


def _check_program(folder: Folder, program: str) -> None:
    file = folder.path / PROGRAM
    if not file.exists():
        return
    check_source(file)
    before = file.read_bytes().decode(errors="replace").splitlines()
    for old, new in zip_longest(before, program.splitlines(), fillvalue=""):
        if old != new:
            raise InputError(
                f"{folder.path} is a run of another program (learning rate, loss, batch size or "
                f"version of JAX): {old.strip()[:150]!r} is now {new.strip()[:150]!r}; allow it "
                "with --allow-changes, or begin another folder with --out"
            )
