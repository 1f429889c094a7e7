"""Checkpoints of a training state by Orbax: whole or not there, and checked when they are read.

A state is written as a flat list of arrays beside a description of what they are and a digest of
each one's bytes, so that a damaged file, another model or another recipe is told from a good one.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compare import InputError

Tree = Any
KIND = "scalewise train, 1"


class CheckpointError(RuntimeError):
    """A checkpoint couldn't be written; the message says which one is the last good one."""


class Checkpoints:
    """The checkpoints in one folder; of older ones the last few are kept."""

    def __init__(self, folder: Path, *, keep: int = 3):
        import orbax.checkpoint as ocp  # takes seconds: only who trains pays for it

        logging.getLogger("absl").setLevel(logging.CRITICAL)  # what fails is raised, too
        self._ocp = ocp
        self._folder = folder.absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def steps(self) -> list[int]:
        """The steps of which there is a whole checkpoint, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Tree, about: Mapping[str, Any]) -> None:
        """Writes a checkpoint, atomically.

        Raises:
            CheckpointError: it can't be written (a full disk, say); those before it are untouched.
        """
        arrays = [np.asarray(x) for x in _plain(jax.tree.leaves(state))]
        meta = {
            "kind": KIND,
            "step": step,
            "about": dict(about),
            "arrays": _described(state),
            "digests": [_digest(x) for x in arrays],
        }
        items = self._ocp.args.Composite(
            state=self._ocp.args.StandardSave(_named(arrays)),
            meta=self._ocp.args.JsonSave(meta),
        )
        try:
            if not self._manager.save(step, args=items, force=True):
                raise OSError("Orbax declined to save")
            self._manager.wait_until_finished()
        except Exception as error:  # whatever Orbax, tensorstore or the system raises
            self._manager.reload()
            good = [s for s in self.steps() if s != step]
            last = f"the last good one is of step {good[-1]}" if good else "there is none before it"
            raise CheckpointError(
                f"the checkpoint of step {step} can't be written to {self._folder}: "
                f"{_sentence(error)}; {last}"
            ) from error

    def restore(
        self, template: Tree, about: Mapping[str, Any]
    ) -> tuple[int, Tree, list[str]] | None:
        """The newest checkpoint that is whole.

        Args:
            template: a state of the structure that is expected.
            about: what has to be the same as when it was written: model, recipe, seed, data.

        Returns:
            Step, state, and a sentence for each newer one that was damaged; None if the folder
            holds no checkpoint at all.

        Raises:
            InputError: a checkpoint isn't ours, is of another run, or none of them is whole.
        """
        damaged: list[str] = []
        for step in reversed(self.steps()):
            try:
                state = self._read(step, template, about)
            except _Damaged as error:
                damaged.append(f"the checkpoint of step {step} is damaged: {error}")
                continue
            return step, state, damaged
        if damaged:
            raise InputError(f"no checkpoint in {self._folder} is whole: {'; '.join(damaged)}")
        return None

    def discard_after(self, step: int) -> None:
        """Deletes damaged checkpoints beyond the one that was restored."""
        for late in self.steps():
            if late > step:
                self._manager.delete(late)

    def close(self) -> None:
        self._manager.close()

    def _read(self, step: int, template: Tree, about: Mapping[str, Any]) -> Tree:
        ocp = self._ocp
        try:
            meta: Any = self._manager.restore(
                step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())
            )["meta"]
        except KeyError:
            meta = None
        except Exception as error:
            if not (self._folder / str(step) / "meta").exists():
                meta = None  # some other program's checkpoint has no such item
            else:
                raise _Damaged(_sentence(error)) from error
        if not isinstance(meta, dict) or meta.get("kind") != KIND:
            raise InputError(
                f"{self._folder / str(step)} is no checkpoint of scalewise train: accepted is a "
                "folder that scalewise train wrote"
            )
        _same_run(meta["about"], about, self._folder)
        if meta["arrays"] != _described(template):
            raise InputError(
                f"{self._folder}: the checkpoint of step {step} holds other arrays than this "
                f"model's: {_first_difference(meta['arrays'], _described(template))}"
            )
        leaves, treedef = jax.tree.flatten(template)
        shapes = _named([np.empty(x.shape, x.dtype) for x in _plain(leaves)])
        try:
            found = self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes))
            )["state"]
        except Exception as error:
            raise _Damaged(_sentence(error)) from error
        arrays = [np.asarray(found[name]) for name in shapes]
        for entry, array, digest in zip(meta["arrays"], arrays, meta["digests"], strict=True):
            if _digest(array) != digest:
                raise _Damaged(f"{entry[0]} has other bytes than were written")
        return jax.tree.unflatten(treedef, map(_like, leaves, arrays))


class _Damaged(Exception):
    pass


def _plain(leaves: list[Any]) -> list[Any]:
    """Keys as the integers that they are."""
    return [jax.random.key_data(x) if _is_key(x) else x for x in leaves]


def _like(leaf: Any, array: np.ndarray) -> jax.Array:
    x = jnp.asarray(array)
    return jax.random.wrap_key_data(x, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else x


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _named(arrays: list[Any]) -> dict[str, Any]:
    return {f"{i:05}": x for i, x in enumerate(arrays)}


def _described(state: Tree) -> list[list[Any]]:
    """Path, dtype and shape of each leaf, as JSON has them."""
    return [
        [jax.tree_util.keystr(path), str(x.dtype), list(x.shape)]
        for path, x in jax.tree_util.tree_leaves_with_path(state)
    ]


def _digest(x: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()


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
            return f"there {a[0]} is {a[1]}{a[2]}, here {b[0]} is {b[1]}{b[2]}"
    return f"there are {len(there)} of them, here {len(here)}"


def _sentence(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    if len(text) > 300:  # what it was about comes first, why it failed last
        text = f"{text[:100]} ... {text[-150:]}"
    return f"{type(error).__name__}: {text}"
