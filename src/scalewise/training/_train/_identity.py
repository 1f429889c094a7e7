"""``run.json``: the settings of a run, and the identity that its checkpoints carry."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path

from ..._output import check_source
from ..._types import Json
from ..._user_file import InputError
from .._compare import Folder

FILE = "run.json"


def run_folder(
    out: str | Path | Folder | None, resume: bool, settings: dict[str, Json]
) -> Folder | None:
    """Returns the folder of a run, None if it has none; creates and writes nothing.

    Raises:
        InputError: a new run's folder isn't empty, or the folder to resume holds another run.
    """
    if not resume:
        return None if out is None else Folder.at(out)
    if out is None:
        raise InputError("resume needs the folder of the run: name it with --out")
    folder = Folder(out.path if isinstance(out, Folder) else Path(out), new=False)
    if folder.path.exists() and not folder.path.is_dir():
        raise InputError(f"{out} is no folder of scalewise train: it is no folder")
    _read_identity(folder, settings)
    return folder


def identify(folder: Folder, settings: dict[str, Json]) -> str | None:
    """Returns the identity of the run in a locked folder; writes a new one to an empty folder.

    Returns:
        The identity; None if ``run.json`` is damaged, so that the checkpoints have to tell it.

    Raises:
        InputError: the folder holds another run.
    """
    there = (folder.path / FILE).exists()
    identity = _read_identity(folder, settings)
    if not there:
        identity = secrets.token_hex(16)
        write_identity(folder, settings, identity)
    return identity


def write_identity(folder: Folder, settings: dict[str, Json], identity: str) -> None:
    """Writes ``run.json``."""
    folder.write_json(FILE, settings | {"run": identity})


def _read_identity(folder: Folder, settings: dict[str, Json]) -> str | None:
    """Returns the identity in ``run.json``; None if there is none, or if it is damaged."""
    file = folder.path / FILE
    if not file.exists():
        if folder.entries():
            raise InputError(f"{folder.path} is no folder of scalewise train: it has no {FILE}")
        return None
    check_source(file)
    try:
        found = json.loads(file.read_bytes().decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("run"), str):
        return None
    check_settings(found, settings, folder.path)
    return found["run"]


def check_settings(written: Mapping[str, Json], given: Mapping[str, Json], folder: Path) -> None:
    """Raises InputError if a run's settings aren't those that its folder was written with."""
    for name in given:
        if written.get(name) != given[name]:
            raise InputError(
                f"{folder} is a run with {name} {written.get(name)!r}, not {given[name]!r}: "
                "resume it as it was begun, or begin another folder with --out"
            )
