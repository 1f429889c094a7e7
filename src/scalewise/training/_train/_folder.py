"""The folder of a run: ``run.json``, ``step.jaxpr``, checkpoints, and their metrics' log."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from importlib.metadata import version
from itertools import count, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..._output import Folder, check_source
from ..._types import Json, PyTree
from ..._user_file import InputError
from . import _checkpoint as checkpoint
from ._sharding import call_on_first, is_first

if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager

Settings: TypeAlias = dict[str, Json]
FILE, PROGRAM = "run.json", "step.jaxpr"


class CheckpointError(RuntimeError):
    """Raised if a checkpoint can't be written; the message names the last good one."""


@contextmanager
def run_folder(
    out: str | Path | Folder | None, resume: bool, settings: Settings, keep: int, changed: bool
) -> Iterator[RunFolder | None]:
    """Creates a run's folder, or checks that it is this run's, and locks it; None without one.

    ``settings`` are what ``run.json`` says about the run; ``changed`` if they may be other ones.
    """
    if out is None:
        if resume:
            raise InputError("resume needs the folder of the run: give it as out (--out)")
        yield None
        return
    with ExitStack() as stack:

        def claim() -> list[str]:
            folder = Folder.at(out, resume=resume)
            folder = stack.enter_context(folder.claimed())
            return [str(folder.path.absolute()), _identity(folder, {} if changed else settings)]

        path, run = call_on_first(claim)
        folder = RunFolder(Folder(Path(path), new=False), settings, run, keep, changed)
        try:
            yield folder
        finally:
            folder.close()


def _identity(folder: Folder, settings: Settings) -> str:
    """Returns the identity that a run's checkpoints carry: a new one for an empty folder."""
    file = folder.path / FILE
    if not file.exists():
        if folder.entries():
            raise InputError(f"{folder.path} is no folder of scalewise train: it has no {FILE}")
        return secrets.token_hex(16)
    check_source(file)
    try:
        found = json.loads(file.read_bytes().decode())
        run = str(found["run"])
    except (ValueError, RecursionError, KeyError, TypeError):
        raise InputError(
            f"{file} isn't what scalewise train wrote there: begin another folder as out (--out)"
        ) from None
    for name, value in settings.items():
        if found.get(name) != value:
            raise InputError(
                f"{folder.path} is a run with {name} {found.get(name)!r}, not {value!r}: "
                "resume it as it was begun, or begin another folder as out (--out)"
            )
    return run


class RunFolder:
    """Reads and writes a run's files and checkpoints; all processes call the same methods."""

    def __init__(self, files: Folder, settings: Settings, run: str, keep: int, changed: bool):
        self.files, self.last = files, 0  # the step of the last checkpoint
        self._settings, self._keep, self._changed = settings | {"run": run}, keep, changed
        self._path = files.path / "checkpoints"

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
        if step == self.last:
            return
        items = checkpoint.items_of(step, state, self._settings["run"])
        try:
            with checkpoint.closed_loops_ignored():
                manager = self._manager
                manager.save(step, args=items, force=True)
        except Exception as error:  # whatever Orbax, tensorstore or the system raises
            for left in self._path.glob(f"{step}.orbax-checkpoint-tmp*") if is_first() else ():
                shutil.rmtree(left, ignore_errors=True)
            last = f"the last good one is of step {self.last}"
            raise CheckpointError(
                f"the checkpoint of step {step} can't be written to {self._path}: "
                f"{checkpoint.in_short(error)}; {last if self.last else 'there is none before it'}"
            ) from error
        self.last = step

    def restore(self, template: PyTree, program: str) -> tuple[PyTree, list[str]]:
        """Reads the newest good checkpoint, renames damaged ones to ``<step>.damaged``, and writes
        ``run.json`` and ``step.jaxpr``.

        Returns the state, ``template`` if there is no checkpoint at all, and a sentence for each
        damaged one; ``last`` is its step. Nothing is renamed if none is whole.
        """
        if not self._changed:
            call_on_first(lambda: _check_program(self.files.path, program))
        state, damaged = template, dict[Path, str]()
        for step in call_on_first(self._steps):
            folder = self._path / str(step)
            try:
                state, self.last = checkpoint.read(folder, template, self._settings["run"]), step
                break
            except checkpoint.DamagedError as error:
                damaged[folder] = f"the checkpoint of step {step} is damaged: {error}"
        if damaged and not self.last:
            raise InputError(
                f"no checkpoint in {self._path} is whole: {'; '.join(damaged.values())}"
            )
        aside = [call_on_first(partial(_set_aside, folder)) for folder in damaged]
        call_on_first(lambda: self._write_identity(program))
        return state, [
            f"{t}; set aside as {n}" for t, n in zip(damaged.values(), aside, strict=True)
        ]

    def _steps(self) -> list[int]:
        there = self._path.iterdir() if self._path.is_dir() else ()
        steps = (int(p.name) for p in there if re.fullmatch("[1-9][0-9]*", p.name))
        return sorted(steps, reverse=True)

    def _write_identity(self, program: str) -> None:
        # first: a folder without it is foreign
        self.files.write_json(FILE, self._settings)
        if _lines(self.files.path / PROGRAM) != program.splitlines():
            self.files.write(PROGRAM, program)

    def close(self) -> None:
        if "_manager" in self.__dict__:
            self._manager.close()


def _set_aside(folder: Path) -> str:
    """Renames a damaged checkpoint, so that it is kept but never read; returns the new name."""
    names = (f"{folder.name}.damaged" + f"-{n}" * (n > 1) for n in count(1))
    name = next(name for name in names if not os.path.lexists(folder.with_name(name)))
    folder.rename(folder.with_name(name))
    return name


def program_text(jaxpr: Any, batch: PyTree) -> str:
    """Returns a step's jaxpr as text, with digests of its constants and of the first batch, and no
    memory addresses."""
    text = re.sub(r"\b0x[0-9a-f]+", "0x", jaxpr.pretty_print(source_info=False, name_stack=False))
    constants, first = map(checkpoint.state_digest, (jaxpr.consts, batch))
    return f"jax {version('jax')}\nconstants {constants}\n{text}\nfirst batch {first}\n"


def _lines(file: Path) -> list[str]:
    if not file.exists():
        return []
    check_source(file)
    return file.read_bytes().decode(errors="replace").splitlines()


def _check_program(folder: Path, program: str) -> None:
    before, now = _lines(folder / PROGRAM), program.splitlines()
    for old, new in zip_longest(before, now, fillvalue="") if before else ():
        if old != new:
            raise InputError(
                f"{folder} is a run of another program (learning rate, loss, batches or "
                f"version of JAX): {old.strip()[:150]!r} is now {new.strip()[:150]!r}; allow it "
                "with allow_changes=True (--allow-changes), or begin another folder as out (--out)"
            )
