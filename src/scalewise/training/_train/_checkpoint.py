"""Checkpoints of a training state: written atomically by Orbax, verified when they are read.

A checkpoint is a flat list of arrays, a description of them, a digest of each array's bytes and a
digest of the description. The digests tell a good checkpoint from a damaged one, from one of
another step, run, model or recipe, and from one under another checkpoint's name.

Arrays that are split over devices are written and read part by part, each by the process that has
it. All processes of a run call the same methods and see the same folder.
"""

from __future__ import annotations

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
import numpy as np

from ..._extras import require
from ..._types import Json, PyTree
from ..._user_file import InputError
from ._digest import digests, is_key, is_whole, without_keys
from ._identity import check_settings
from ._meta import KIND, DamagedError, ForeignError, Meta, read_meta
from ._processes import all_gather_json, call_on_first, is_first
from ._sharding import placed_like

if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager


def _orbax() -> ModuleType:
    """Returns ``orbax.checkpoint``, which takes seconds to import."""
    return require("orbax.checkpoint", "train", "a checkpoint")


class CheckpointError(RuntimeError):
    """Raised if a checkpoint can't be written; the message names the last good one."""


@dataclass(frozen=True)
class Restored:
    """The content of a checkpoint that was read.

    Attributes:
        step: the number of steps made.
        state: the training state.
        run: the identity of the run.
        damaged: a sentence for each checkpoint that is damaged.
    """

    step: int
    state: PyTree
    run: str
    damaged: list[str]


class Checkpoints:
    """The checkpoints in one folder, of which the newest few are kept."""

    def __init__(self, folder: Path, *, keep: int = 3):
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

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, in ascending order."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: PyTree, about: Mapping[str, Json], run: str) -> None:
        """Writes a checkpoint atomically.

        Args:
            step: the number of steps made.
            state: the training state.
            about: the settings of the run.
            run: the identity of the run.

        Raises:
            CheckpointError: it can't be written (a full disk, say); earlier ones are unchanged.
        """
        ocp = _orbax()
        arrays = [np.asarray(x) if is_whole(x) else x for x in without_keys(jax.tree.leaves(state))]
        meta = Meta(KIND, run, step, dict(about), _described(state), digests(arrays))
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(_named(arrays)),
            meta=ocp.args.JsonSave(meta.sealed().as_dict()),
        )
        manager = self._manager
        try:
            with _closed_loops_ignored():
                if not manager.save(step, args=items, force=True):
                    raise OSError("Orbax declined to save")
                manager.wait_until_finished()
        except Exception as error:  # whatever Orbax, tensorstore or the system raises
            for left in self._folder.glob(f"{step}.orbax-checkpoint-tmp*") if is_first() else ():
                shutil.rmtree(left, ignore_errors=True)
            manager.reload()
            good = [s for s in self.steps() if s != step]
            last = f"the last good one is of step {good[-1]}" if good else "there is none before it"
            raise CheckpointError(
                f"the checkpoint of step {step} can't be written to {self._folder}: "
                f"{_sentence(error)}; {last}"
            ) from error

    def restore(
        self, template: PyTree, about: Mapping[str, Json], run: str | None
    ) -> Restored | None:
        """Reads the newest good checkpoint, and renames damaged ones.

        A checkpoint is identified by its description. It counts as damaged if its folder has
        another checkpoint's name (swapped, copied, a symbolic link), if it belongs to another run,
        or if the bytes of its arrays differ from those written. Damaged ones are renamed to
        ``<step>.damaged`` if there is a good one; otherwise nothing is changed.

        Args:
            template: a state with the expected structure.
            about: the settings, which have to be those of the run: model, recipe, seed, data.
            run: the identity of the run; None to take over the one that most checkpoints have.

        Returns:
            The checkpoint; None if the folder holds no checkpoint at all.

        Raises:
            InputError: another program wrote a checkpoint, the settings differ, or all checkpoints
                are damaged.
        """
        damaged: dict[Path, str] = {}
        metas: dict[Path, Meta] = {}
        for folder in self._folders():
            try:
                metas[folder] = self._meta(folder)
            except DamagedError as error:
                damaged[folder] = _damage(folder, error)
        seen = {folder.name: meta.seal for folder, meta in metas.items()}
        if any(other != seen for other in all_gather_json(seen)):
            raise InputError(
                f"the processes of this run see different checkpoints in {self._folder}: give them "
                "a folder on a file system that all of them share"
            )
        if run is None and metas:
            runs = [meta.run for meta in metas.values()]
            run = max(runs, key=runs.count)
        found: tuple[Meta, PyTree] | None = None
        for folder, meta in metas.items():
            try:
                if meta.run != run:
                    raise DamagedError("it belongs to another run")
                if found is None:
                    check_settings(meta.about, about, self._folder)
                    found = meta, self._state(folder, meta, template)
            except DamagedError as error:
                damaged[folder] = _damage(folder, error)
        if found is None and damaged:
            raise InputError(
                f"no checkpoint in {self._folder} is whole: "
                + "; ".join(damaged[folder] for folder in self._folders())
            )
        if found is None:
            return None
        sentences = [
            f"{damaged[folder]}; set aside as {call_on_first(partial(_set_aside, folder))}"
            for folder in sorted(damaged, key=lambda p: -int(p.name))
        ]
        meta, state = found
        return Restored(meta.step, state, meta.run, sentences)

    def close(self) -> None:
        """Closes Orbax's manager."""
        if "_manager" in self.__dict__:
            self._manager.close()

    def _folders(self) -> list[Path]:
        """Returns the entries whose names are numbers, the largest first."""
        if not self._folder.is_dir():
            return []
        named = [p for p in self._folder.iterdir() if p.name.isascii() and p.name.isdigit()]
        return sorted((p for p in named if p.name == str(int(p.name))), key=lambda p: -int(p.name))

    def _meta(self, folder: Path) -> Meta:
        try:
            return read_meta(folder)
        except ForeignError as error:
            raise InputError(
                f"{folder} is no checkpoint of scalewise train: {error}; expected a folder that "
                "scalewise train wrote"
            ) from None

    def _state(self, folder: Path, meta: Meta, template: PyTree) -> PyTree:
        ocp = _orbax()
        if meta.arrays != _described(template):
            raise InputError(
                f"{self._folder}: the checkpoint of step {meta.step} holds other arrays than this "
                f"model's: {_first_difference(meta.arrays, _described(template))}"
            )
        leaves, treedef = jax.tree.flatten(template)
        data = without_keys(leaves)
        names, arrays, failed = _named(list(map(_expected, data))), [], None
        try:
            if is_first():
                _probe(folder / "state", list(names))
            with _closed_loops_ignored(), ocp.StandardCheckpointer() as checkpointer:
                found = checkpointer.restore(folder / "state", names)
            arrays = [
                np.asarray(found[name]) if is_whole(x) else found[name]
                for name, x in zip(names, data, strict=True)
            ]
        except Exception as error:
            failed = error
        sentences = all_gather_json(failed and _sentence(failed))
        if why := next(filter(None, sentences), None):
            raise DamagedError(why) from failed
        for entry, found, digest in zip(meta.arrays, digests(arrays), meta.digests, strict=True):
            if found != digest:
                raise DamagedError(f"{entry[0]} has other bytes than were written")
        return jax.tree.unflatten(treedef, map(_typed, leaves, map(placed_like, data, arrays)))


def _expected(x: PyTree) -> PyTree:
    """Returns the array that Orbax restores into: on the host, or with the sharding of ``x``."""
    if is_whole(x):
        return np.empty(x.shape, x.dtype)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _probe(folder: Path, names: list[str]) -> None:
    """Reads all entries of a state's folder, and raises the first error.

    Orbax reads all arrays at once. If one fails, the reads still in progress find their event loop
    closed, and each of them prints a traceback.
    """
    import tensorstore as ts

    if not folder.is_dir():
        raise OSError("its state is missing")
    if not (folder / "manifest.ocdbt").exists():
        return  # not a database of tensorstore's; Orbax raises an error that says so
    spec = {"driver": "ocdbt", "base": f"{folder.as_uri()}/"}
    store = ts.KvStore.open(spec).result()
    keys = sorted(store.list().result())
    for first in range(0, len(keys), 16):
        for future in [store.read(key) for key in keys[first : first + 16]]:
            future.result()
    found = {key.split(b"/")[0].decode(errors="replace") for key in keys}
    missing = [name for name in names if name not in found]
    if missing:
        raise OSError(f"{len(missing)} of its {len(names)} arrays are missing")


@contextmanager
def _closed_loops_ignored() -> Iterator[None]:
    """Suppresses the "Event loop is closed" that tensorstore prints for reads after a failed one.

    The error of the failed read itself is raised.
    """
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
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
