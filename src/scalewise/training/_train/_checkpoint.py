"""Checkpoints of a training state: committed by Orbax, verified by digests when they are read.

A checkpoint is a flat list of arrays and a description of them, with a digest of each array's bytes
and one of the description, which tell a good checkpoint from a damaged one, and from one of another
step, run, model or method. Arrays that are split over devices are written and read part by part.
All processes of a run call the same methods and see the same folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from ..._extras import require
from ..._output import check_source
from ..._types import Json, PyTree
from ..._user_file import InputError
from ._identity import Settings, check_settings
from ._sharding import all_gather_json, call_on_first, is_first, is_whole, placed_like

if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager

FAMILY = "scalewise train, "
KIND = FAMILY + "4"


def _orbax() -> ModuleType:
    return require("orbax.checkpoint", "train", "a checkpoint")


class CheckpointError(RuntimeError):
    """Raised if a checkpoint can't be written; the message names the last good one."""


class DamagedError(Exception):
    """Raised if a checkpoint is damaged; the message says why, as half a sentence."""


@dataclass(frozen=True)
class Restored:
    step: int
    state: PyTree
    run: str
    damaged: list[str]


class Checkpoints:
    """The checkpoints in one folder, of which the newest few are kept."""

    def __init__(self, folder: Path, keep: int):
        self._folder = folder.absolute()
        self._keep = keep

    @cached_property
    def _manager(self) -> CheckpointManager:
        """Orbax's manager, created after damaged checkpoints were renamed: it fails on some."""
        ocp = _orbax()
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # errors are raised as well
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        try:
            return ocp.CheckpointManager(self._folder, options=options)
        except Exception as error:  # whatever Orbax or the system raises
            raise CheckpointError(
                f"no checkpoint can be written to {self._folder}: {_sentence(error)}"
            ) from error

    def save(self, step: int, state: PyTree, about: Settings, run: str) -> None:
        """Writes the checkpoint of a step of a run with these settings, atomically."""
        ocp, manager = _orbax(), self._manager
        arrays = [np.asarray(x) if is_whole(x) else x for x in without_keys(jax.tree.leaves(state))]
        meta = {"kind": KIND, "run": run, "step": step, "about": about,
                "arrays": _described(state), "digests": digests(arrays)}  # fmt: skip
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(_named(arrays)),
            meta=ocp.args.JsonSave(meta | {"seal": _seal(meta)}),
        )
        try:
            with _closed_loops_ignored():
                if not manager.save(step, args=items, force=True):
                    raise OSError("Orbax declined to save")
                manager.wait_until_finished()
        except Exception as error:  # whatever Orbax, tensorstore or the system raises
            for left in self._folder.glob(f"{step}.orbax-checkpoint-tmp*") if is_first() else ():
                shutil.rmtree(left, ignore_errors=True)
            manager.reload()
            good = [s for s in sorted(manager.all_steps()) if s != step]
            last = f"the last good one is of step {good[-1]}" if good else "there is none before it"
            raise CheckpointError(
                f"the checkpoint of step {step} can't be written to {self._folder}: "
                f"{_sentence(error)}; {last}"
            ) from error

    def restore(self, template: PyTree, about: Settings, run: str | None) -> Restored | None:
        """Reads the newest good checkpoint, and renames damaged ones to ``<step>.damaged``.

        Args:
            template: a state with the expected structure.
            about: the settings, which have to be those of the run; {} to accept any.
            run: the identity of the run; None to take over the one that most checkpoints have.

        Returns:
            The checkpoint; None if the folder holds no checkpoint at all.

        Raises:
            InputError: another program wrote a checkpoint, the settings differ, or all checkpoints
                are damaged; nothing is renamed.
        """
        damaged: dict[Path, str] = {}
        metas: dict[Path, dict[str, Json]] = {}
        for folder in self._folders():
            try:
                metas[folder] = _read_meta(folder)
            except DamagedError as error:
                damaged[folder] = _damage(folder, error)
        seen = {folder.name: meta["seal"] for folder, meta in metas.items()}
        if any(other != seen for other in all_gather_json(seen)):
            raise InputError(
                f"the processes of this run see different checkpoints in {self._folder}: give them "
                "a folder on a file system that all of them share"
            )
        if run is None and metas:
            runs = [meta["run"] for meta in metas.values()]
            run = max(runs, key=runs.count)
        found: tuple[int, PyTree] | None = None
        for folder, meta in metas.items():
            try:
                if meta["run"] != run:
                    raise DamagedError("it belongs to another run")
                if found is None:
                    check_settings(meta["about"], about, self._folder)
                    found = meta["step"], _read_state(folder, meta, template)
            except DamagedError as error:
                damaged[folder] = _damage(folder, error)
        if found is None or run is None:
            if damaged:
                whole = "; ".join(damaged[folder] for folder in self._folders())
                raise InputError(f"no checkpoint in {self._folder} is whole: {whole}")
            return None
        sentences = [
            f"{damaged[folder]}; set aside as {call_on_first(partial(_set_aside, folder))}"
            for folder in sorted(damaged, key=lambda p: -int(p.name))
        ]
        return Restored(*found, run, sentences)

    def close(self) -> None:
        if "_manager" in self.__dict__:
            self._manager.close()

    def _folders(self) -> list[Path]:
        """Returns the entries whose names are numbers, the largest first."""
        if not self._folder.is_dir():
            return []
        named = [p for p in self._folder.iterdir() if p.name.isascii() and p.name.isdigit()]
        return sorted((p for p in named if p.name == str(int(p.name))), key=lambda p: -int(p.name))


def _seal(meta: Mapping[str, Json]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _read_meta(folder: Path) -> dict[str, Json]:
    """Reads a checkpoint's description and verifies its digest; the folder's name is the step."""
    if folder.is_symlink() or not folder.is_dir():
        raise DamagedError("it is a symbolic link or no folder, and was not written so")
    file, names = folder / "meta" / "metadata", set[str]()
    try:
        names = {path.name for path in folder.iterdir()}
        check_source(file)
        meta = json.loads(file.read_bytes().decode())
        seal = _seal({k: v for k, v in meta.items() if k != "seal"})
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        if names and not names & {"meta", "state"}:
            raise _foreign(folder, "it has neither scalewise's description nor its state") from None
        raise DamagedError(f"its description can't be read ({_sentence(error)})") from None
    kind = meta.get("kind")
    if isinstance(kind, str) and kind.startswith(FAMILY) and kind != KIND:
        raise _foreign(folder, f"it is of the kind {kind!r}; this version reads {KIND!r}")
    if seal != meta.get("seal"):
        raise DamagedError("its description is not the one that was written")
    if str(meta["step"]) != folder.name:
        raise DamagedError(f"it is the checkpoint of step {meta['step']} under another name")
    return meta


def _foreign(folder: Path, why: str) -> InputError:
    return InputError(
        f"{folder} is no checkpoint of scalewise train: {why}; expected a folder that scalewise "
        "train wrote"
    )


def _read_state(folder: Path, meta: Mapping[str, Json], template: PyTree) -> PyTree:
    ocp, described = _orbax(), _described(template)
    if meta["arrays"] != described:
        raise InputError(
            f"{folder.parent}: the checkpoint of step {meta['step']} holds other arrays than this "
            f"model's: {_first_difference(meta['arrays'], described)}"
        )
    leaves, treedef = jax.tree.flatten(template)
    data = without_keys(leaves)
    # arrays that aren't split are restored on the host
    into = [
        np.empty(x.shape, x.dtype)
        if is_whole(x)
        else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for x in data
    ]
    names, arrays, failed = _named(into), [], None
    try:
        with _closed_loops_ignored(), ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.restore(folder / "state", names)
        pairs = zip(data, (found[name] for name in names), strict=True)
        arrays = [np.asarray(y) if is_whole(x) else y for x, y in pairs]
    except Exception as error:
        failed = error
    if why := next(filter(None, all_gather_json(failed and _sentence(failed))), None):
        raise DamagedError(why) from failed
    for entry, found, digest in zip(meta["arrays"], digests(arrays), meta["digests"], strict=True):
        if found != digest:
            raise DamagedError(f"{entry[0]} has other bytes than were written")
    return jax.tree.unflatten(treedef, map(_typed, leaves, map(placed_like, data, arrays)))


@contextmanager
def _closed_loops_ignored() -> Iterator[None]:
    """Suppresses the "Event loop is closed" that tensorstore prints for reads after a failed one.

    The error of the failed read itself is raised.
    """
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    except Exception:
        time.sleep(0.3)  # reads in progress end within milliseconds
        raise
    finally:
        sys.unraisablehook = before


def _damage(folder: Path, error: DamagedError) -> str:
    return f"the checkpoint of step {folder.name} is damaged: {error}"


def _set_aside(folder: Path) -> str:
    """Renames a damaged checkpoint, so that it is kept but never read; returns the new name."""
    name, number = f"{folder.name}.damaged", 1
    while os.path.lexists(folder.with_name(name)):
        number += 1
        name = f"{folder.name}.damaged-{number}"
    folder.rename(folder.with_name(name))
    return name


def _typed(leaf: PyTree, x: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(x, impl=jax.random.key_impl(leaf)) if is_key(leaf) else x


def _named(arrays: Sequence[PyTree]) -> dict[str, PyTree]:
    return {f"{i:05}": x for i, x in enumerate(arrays)}


def _described(state: PyTree) -> list[list[Json]]:
    """Returns path, dtype and shape of each leaf as JSON, and the sharding of a split one."""
    return [
        [jax.tree_util.keystr(path), str(x.dtype), list(x.shape)]
        + ([] if is_whole(x) else [f" split as {x.sharding.spec}"])
        for path, x in jax.tree_util.tree_leaves_with_path(state)
    ]


def _first_difference(there: list[list[Json]], here: list[list[Json]]) -> str:
    for a, b in zip(there, here, strict=False):
        if a != b:
            one, other = ("".join(map(str, x[1:])) for x in (a, b))
            return f"there {a[0]} is {one}, here {b[0]} is {other}"
    return f"there are {len(there)} of them, here {len(here)}"


def _sentence(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    if len(text) > 300:  # the subject comes first, the cause last
        text = f"{text[:100]} ... {text[-150:]}"
    return f"{type(error).__name__}: {text}"


def is_key(x: jax.Array | np.ndarray) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def without_keys(leaves: list[PyTree]) -> list[PyTree]:
    """Returns the arrays with typed random keys replaced by the integers that they consist of."""
    return [jax.random.key_data(x) if is_key(x) else x for x in leaves]


def digests(arrays: Sequence[jax.Array | np.ndarray]) -> list[str]:
    """Returns the SHA-256 of each array's bytes; of a split array, that of its parts' digests.

    All processes have to call this function; all get the same digests.
    """
    parts = [_parts(x) if isinstance(x, jax.Array) and not is_whole(x) else [] for x in arrays]
    everywhere = all_gather_json(parts) if any(parts) else [parts]
    return [
        _sha(np.ascontiguousarray(x).tobytes())
        if is_whole(x)
        else _sha("\n".join(sorted(line for process in everywhere for line in process[i])).encode())
        for i, x in enumerate(arrays)
    ]


def state_digest(tree: PyTree) -> str:
    """Returns the SHA-256 over the digests of every array in a pytree, in order."""
    return _sha("\n".join(digests(without_keys(jax.tree.leaves(tree)))).encode())


def _parts(x: jax.Array) -> list[str]:
    return [
        f"{[(s.start or 0, s.stop) for s in shard.index]} {_sha(np.asarray(shard.data).tobytes())}"
        for shard in x.addressable_shards
        if shard.replica_id == 0
    ]


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
