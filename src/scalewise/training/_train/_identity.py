"""``run.json``: the settings of a run, its program, and the identity that its checkpoints carry."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..._output import check_source
from ..._types import Json
from ..._user_file import InputError
from .._compare import Folder

FILE, PROGRAM = "run.json", "step.jaxpr"
Settings: TypeAlias = dict[str, Json]


def program_text(jaxpr: Any) -> str:
    """Returns a step's jaxpr as text, with a digest of its constants and no memory addresses."""
    constants = hashlib.sha256()
    for x in jaxpr.consts:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        constants.update(np.asarray(jax.random.key_data(x) if is_key else x).tobytes())
    text = re.sub(r"\b0x[0-9a-f]+", "0x", jaxpr.pretty_print(source_info=False, name_stack=False))
    return f"jax {version('jax')}\nconstants {constants.hexdigest()}\n{text}\n"


def run_folder(out: str | Path | Folder | None, resume: bool, settings: Settings) -> Folder | None:
    """Returns the folder of a run, None if it has none; creates and writes nothing."""
    if not resume:
        return None if out is None else Folder.at(out)
    if out is None:
        raise InputError("resume needs the folder of the run: name it with --out")
    folder = Folder(out.path if isinstance(out, Folder) else Path(out), new=False)
    if folder.path.exists() and not folder.path.is_dir():
        raise InputError(f"{out} is no folder of scalewise train: it is no folder")
    read_identity(folder, settings)
    return folder


def read_identity(folder: Folder, settings: Settings) -> str | None:
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
    check_settings(found, settings, folder.path)
    return found["run"]


def write_identity(folder: Folder, settings: Settings, program: str, identity: str) -> None:
    folder.write_json(FILE, settings | {"run": identity})  # first: a folder without it is foreign
    file = folder.path / PROGRAM
    if not file.exists() or file.read_bytes() != program.encode():
        folder.write(PROGRAM, program)


def check_program(folder: Folder, program: str) -> None:
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


def check_settings(written: Mapping[str, Json], given: Mapping[str, Json], folder: Path) -> None:
    for name in given:
        if written.get(name) != given[name]:
            raise InputError(
                f"{folder} is a run with {name} {written.get(name)!r}, not {given[name]!r}: "
                "resume it as it was begun, or begin another folder with --out"
            )
