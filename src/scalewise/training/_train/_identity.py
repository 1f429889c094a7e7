"""``run.json``: what a run's folder is about, and the identity that its checkpoints carry."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from ..._output import check_source
from .._compare import Folder, InputError

FILE = "run.json"


def run_folder(out: str | Path | None, resume: bool, about: dict[str, Any]) -> Folder:
    """The folder of a run; nothing is created or written yet.

    Raises:
        InputError: a new run's folder has something in it, or what is to be resumed is another run.
    """
    if not resume:
        return Folder.at(out)
    if out is None:
        raise InputError("resume needs the folder of the run: name it with --out")
    folder = Folder(Path(out), new=False)
    if folder.path.exists() and not folder.path.is_dir():
        raise InputError(f"{out} is no folder of scalewise train: it is no folder")
    _identity(folder, about)
    return folder


def identify(folder: Folder, about: dict[str, Any]) -> str | None:
    """The identity of the run in a folder that is locked; a new one where nothing has begun.

    Returns:
        The identity; None if ``run.json`` is damaged, and only the checkpoints can tell.

    Raises:
        InputError: the folder is of another run.
    """
    if not (folder.path / FILE).exists():
        _identity(folder, about)
        identity = secrets.token_hex(16)
        write_identity(folder, about, identity)
        return identity
    return _identity(folder, about)


def write_identity(folder: Folder, about: dict[str, Any], identity: str) -> None:
    """Writes ``run.json``."""
    folder.write_json(FILE, about | {"run": identity})


def _identity(folder: Folder, about: dict[str, Any]) -> str | None:
    file = folder.path / FILE
    if not file.exists():
        if folder.entries():
            raise InputError(f"{folder.path} is no folder of scalewise train: it has no {FILE}")
        return None
    check_source(file)
    try:
        there = json.loads(file.read_bytes().decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(there, dict) or not isinstance(there.get("run"), str):
        return None
    for name in about:
        if there.get(name) != about[name]:
            raise InputError(
                f"{folder.path} is a run with {name} {there.get(name)!r}, not {about[name]!r}: "
                "resume it as it was begun, or begin another folder with --out"
            )
    return there["run"]
