"""The description inside a checkpoint, and the digests that verify it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..._output import check_source, sentence
from ..._types import Json

KIND = "scalewise train, 2"
FAMILY = "scalewise train, "
LARGEST = 1 << 28  # bytes; a description has some hundred for each array


class DamagedError(Exception):
    """Raised if a checkpoint is damaged; the message says why, as half a sentence."""


class ForeignError(Exception):
    """Raised if another program, or another version of this one, wrote the checkpoint."""


@dataclass(frozen=True)
class Meta:
    """The description of a checkpoint; the names of its fields are part of the file format.

    Attributes:
        kind: the program that wrote it, with a version.
        run: the identity of the run that it belongs to.
        step: the number of steps made.
        about: the run's settings: model, recipe, seed, options and data.
        arrays: path, dtype and shape of each array.
        digests: SHA-256 of each array's bytes.
        seal: SHA-256 over all of the above.
    """

    kind: str
    run: str
    step: int
    about: dict[str, Json]
    arrays: list[list[Json]]
    digests: list[str]
    seal: str = ""

    def sealed(self) -> Meta:
        """Returns the same description with its seal."""
        content = {k: v for k, v in asdict(self).items() if k != "seal"}
        text = json.dumps(content, sort_keys=True, ensure_ascii=True)
        return replace(self, seal=hashlib.sha256(text.encode()).hexdigest())

    def as_dict(self) -> dict[str, Json]:
        """Returns the description as it is written to JSON."""
        return asdict(self)


def read_meta(folder: Path) -> Meta:
    """Reads a checkpoint's description and verifies its digest.

    Args:
        folder: of the checkpoint; its name is the step.

    Raises:
        DamagedError: the description is missing, was changed, or is of another step.
        ForeignError: another program wrote the checkpoint.
    """
    if folder.is_symlink():
        raise DamagedError("it is a symbolic link, not the folder that was written")
    if not folder.is_dir():
        raise DamagedError("it is not a folder")
    meta = _parsed(_text(folder))
    try:
        unchanged = meta.sealed().seal == meta.seal
    except RecursionError:  # deeply nested
        unchanged = False
    if not unchanged:
        raise DamagedError("its description is not the one that was written")
    if str(meta.step) != folder.name:
        raise DamagedError(f"it is the checkpoint of step {meta.step} under another name")
    if len(meta.arrays) != len(meta.digests):
        raise DamagedError("its description has not one digest for each array")
    return meta


def _text(folder: Path) -> str:
    file = folder / "meta" / "metadata"
    try:
        names = {path.name for path in folder.iterdir()}
        if names and not names & {"meta", "state"}:
            raise ForeignError("it has neither scalewise's description nor its state")
        size = check_source(file)
        if size > LARGEST:
            raise DamagedError(f"its description has {size:,} bytes")
        return file.read_bytes().decode()
    except FileNotFoundError:
        raise DamagedError("its description is missing") from None
    except (OSError, ValueError) as error:
        why = sentence(error) if isinstance(error, OSError) else error
        raise DamagedError(f"its description can't be read ({why})") from None


def _parsed(text: str) -> Meta:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise DamagedError("its description is no JSON") from None
    if not isinstance(found, dict):
        raise DamagedError("its description is no JSON object")
    kind = found.get("kind")
    if isinstance(kind, str) and kind.startswith(FAMILY) and kind != KIND:
        raise ForeignError(f"it is of the kind {kind!r}; this version reads {KIND!r}")
    types: Mapping[str, type] = {
        "kind": str, "run": str, "step": int, "about": dict, "arrays": list, "digests": list,
        "seal": str,
    }  # fmt: skip
    for name, expected in types.items():
        if type(found.get(name)) is not expected:
            raise DamagedError(f"its description has no {name}")
    if set(found) != set(types):
        raise DamagedError("its description has entries that were not written")
    return Meta(**found)
