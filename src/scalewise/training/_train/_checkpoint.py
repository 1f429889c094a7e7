"""Checkpoints of a training state by Orbax: whole or not there, and checked when they are read.

A state is written as a flat list of arrays beside a description of what they are, a digest of
each one's bytes and a digest of the description, so that a damaged checkpoint, one of another step,
run, model or recipe, and a folder under another checkpoint's name are told from a good one.

Arrays that are split over devices are written and read part by part, each by the process that has
it. All processes of a run call the same methods and see the same folder.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compare import InputError
from ._meta import KIND, DamagedError, ForeignError, Meta, read_meta
from ._processes import exchange, from_first, is_first
from ._sharding import digests, is_whole, like

Tree = Any


class CheckpointError(RuntimeError):
    """A checkpoint couldn't be written; the message says which one is the last good one."""


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was read.

    Attributes:
        step: the number of steps made.
        state: the training state.
        run: the identity of the run.
        damaged: a sentence for each checkpoint that can't be what it says it is.
    """

    step: int
    state: Tree
    run: str
    damaged: list[str]


class Checkpoints:
    """The checkpoints in one folder; of older ones the last few are kept."""

    def __init__(self, folder: Path, *, keep: int = 3):
        self._folder = folder.absolute()
        self._keep = keep

    @cached_property
    def _manager(self) -> Any:
        """Orbax's manager, made when damaged entries are out of its way."""
        import orbax.checkpoint as ocp  # takes seconds: only who trains pays for it

        logging.getLogger("absl").setLevel(logging.CRITICAL)  # what fails is raised, too
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
        """The steps of which there is a whole checkpoint, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Tree, about: Mapping[str, Any], run: str) -> None:
        """Writes a checkpoint, atomically.

        Raises:
            CheckpointError: it can't be written (a full disk, say); those before it are untouched.
        """
        import orbax.checkpoint as ocp

        arrays = [np.asarray(x) if is_whole(x) else x for x in plain(jax.tree.leaves(state))]
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

    def restore(self, template: Tree, about: Mapping[str, Any], run: str | None) -> Restored | None:
        """Reads the newest checkpoint that is whole, and sets damaged ones aside.

        A checkpoint is identified by its description, not by its folder's name: one under another
        one's name (swapped, copied, a symbolic link), of another run, or with arrays of other bytes
        than were written is damaged. Damaged ones are renamed to ``<step>.damaged`` once a good one
        is found; if there is none, nothing is changed.

        Args:
            template: a state of the structure that is expected.
            about: what has to be the same as when it was written: model, recipe, seed, data.
            run: the identity of the run; None to take over that of most checkpoints.

        Returns:
            What was read; None if the folder holds no checkpoint at all.

        Raises:
            InputError: a checkpoint isn't ours, is of another run, or none of them is whole.
        """
        damaged: dict[Path, str] = {}
        metas: dict[Path, Meta] = {}
        for folder in self._folders():
            try:
                metas[folder] = self._meta(folder)
            except DamagedError as error:
                damaged[folder] = _damage(folder, error)
        seen = {folder.name: meta.seal for folder, meta in metas.items()}
        if any(other != seen for other in exchange(seen)):
            raise InputError(
                f"the processes of this run see different checkpoints in {self._folder}: give them "
                "a folder on a file system that all of them share"
            )
        if run is None and metas:
            runs = [meta.run for meta in metas.values()]
            run = max(runs, key=runs.count)
        found: tuple[Meta, Tree] | None = None
        for folder, meta in metas.items():
            try:
                if meta.run != run:
                    raise DamagedError("it belongs to another run")
                if found is None:
                    _same_run(meta.about, about, self._folder)
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
            f"{damaged[folder]}; set aside as {from_first(partial(_set_aside, folder))}"
            for folder in sorted(damaged, key=lambda p: -int(p.name))
        ]
        meta, state = found
        return Restored(meta.step, state, meta.run, sentences)

    def close(self) -> None:
        if "_manager" in self.__dict__:
            self._manager.close()

    def _folders(self) -> list[Path]:
        """Whatever has a number for a name, the largest first."""
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

    def _state(self, folder: Path, meta: Meta, template: Tree) -> Tree:
        if meta.arrays != _described(template):
            raise InputError(
                f"{self._folder}: the checkpoint of step {meta.step} holds other arrays than this "
                f"model's: {_first_difference(meta.arrays, _described(template))}"
            )
        leaves, treedef = jax.tree.flatten(template)
        data = plain(leaves)
        names, arrays, failed = _named(list(map(_expected, data))), [], None
        try:
            if is_first():
                _probe(folder / "state", list(names))
            with _closed_loops_ignored():
                found = _restored(folder / "state", names)
            arrays = [
                np.asarray(found[name]) if is_whole(x) else found[name]
                for name, x in zip(names, data, strict=True)
            ]
        except Exception as error:
            failed = error
        sentences = exchange(failed and _sentence(failed))
        if why := next(filter(None, sentences), None):
            raise DamagedError(why) from failed
        for entry, found, digest in zip(meta.arrays, digests(arrays), meta.digests, strict=True):
            if found != digest:
                raise DamagedError(f"{entry[0]} has other bytes than were written")
        return jax.tree.unflatten(treedef, map(_typed, leaves, map(like, data, arrays)))


def _expected(x: Any) -> Any:
    """What Orbax restores an array as: in this process' memory, or split as it is."""
    if is_whole(x):
        return np.empty(x.shape, x.dtype)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _restored(folder: Path, names: Mapping[str, Any]) -> Mapping[str, Any]:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, names)


def _probe(folder: Path, names: list[str]) -> None:
    """Reads all that a state's folder holds, so that Orbax never meets what can't be read.

    Orbax reads all arrays at once: where one fails, those still on their way find their event loop
    closed, and each prints a traceback.
    """
    import tensorstore as ts

    if not folder.is_dir():
        raise OSError("its state is missing")
    if not (folder / "manifest.ocdbt").exists():
        return  # no database of tensorstore's: Orbax tells what it is
    spec = {"driver": "ocdbt", "base": f"{folder.as_uri()}/"}
    store = ts.KvStore.open(spec).result()
    keys = sorted(store.list().result())
    for first in range(0, len(keys), 16):
        for future in [store.read(key) for key in keys[first : first + 16]]:
            future.result()
    there = {key.split(b"/")[0].decode(errors="replace") for key in keys}
    missing = [name for name in names if name not in there]
    if missing:
        raise OSError(f"{len(missing)} of its {len(names)} arrays are missing")


@contextmanager
def _closed_loops_ignored() -> Iterator[None]:
    """Keeps tensorstore from printing "Event loop is closed" for each array beside a failed one.

    The error that began it is raised; of what ends after it there is nothing to tell.
    """
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    except Exception:
        time.sleep(0.3)  # what is on its way ends within milliseconds
        raise
    finally:
        sys.unraisablehook = before


def _damage(folder: Path, error: DamagedError) -> str:
    return f"the checkpoint of step {folder.name} is damaged: {error}"


def _set_aside(folder: Path) -> str:
    """Renames a damaged checkpoint, so that it is kept and never taken for one; its new name."""
    name, number = f"{folder.name}.damaged", 1
    while os.path.lexists(folder.with_name(name)):
        number += 1
        name = f"{folder.name}.damaged-{number}"
    folder.rename(folder.with_name(name))
    return name


def plain(leaves: list[Any]) -> list[Any]:
    """Keys as the integers that they are."""
    return [jax.random.key_data(x) if _is_key(x) else x for x in leaves]


def _typed(leaf: Any, x: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(x, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else x


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _named(arrays: list[Any]) -> dict[str, Any]:
    return {f"{i:05}": x for i, x in enumerate(arrays)}


def _described(state: Tree) -> list[list[Any]]:
    """Path, dtype and shape of each leaf, as JSON has them, and how it is split if it is."""
    return [
        [jax.tree_util.keystr(path), str(x.dtype), list(x.shape)]
        + ([] if is_whole(x) else [f" split as {x.sharding.spec}"])
        for path, x in jax.tree_util.tree_leaves_with_path(state)
    ]


def _same_run(there: Mapping[str, Any], here: Mapping[str, Any], folder: Path) -> None:
    for name in here:
        if there.get(name) != here[name]:
            raise InputError(
                f"{folder} is of a run with {name} {there.get(name)!r}, not {here[name]!r}: resume "
                "it as it was begun, or begin another folder with --out"
            )


def _first_difference(there: list[Any], here: list[Any]) -> str:
    for a, b in zip(there, here, strict=False):
        if a != b:
            one, other = ("".join(map(str, x[1:])) for x in (a, b))
            return f"there {a[0]} is {one}, here {b[0]} is {other}"
    return f"there are {len(there)} of them, here {len(here)}"


def _sentence(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    if len(text) > 300:  # what it was about comes first, why it failed last
        text = f"{text[:100]} ... {text[-150:]}"
    return f"{type(error).__name__}: {text}"
