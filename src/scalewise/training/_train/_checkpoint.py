"""One checkpoint of a training state: written by Orbax, verified by digests when it is read.

A checkpoint is a flat list of arrays and a description of them, with a digest of each array's bytes
and one of the description, which tell a good checkpoint from a damaged one, and from one of another
step, run, model or method. Arrays that are split over devices are written and read part by part.
All processes of a run call the same functions and see the same folder.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..._extras import require
from ..._output import check_source
from ..._types import Json, PyTree
from ..._user_file import InputError
from ._sharding import all_gather_json, is_whole

Settings: TypeAlias = dict[str, Json]
FAMILY = "scalewise train, "
KIND = FAMILY + "5"


class DamagedError(Exception):
    """Raised if a checkpoint is damaged; the message says why, as half a sentence."""


def orbax() -> ModuleType:
    return require("orbax.checkpoint", "train", "a checkpoint")


def items_of(step: int, state: PyTree, about: Settings, run: str) -> Json:
    """Returns what Orbax writes: the arrays, and their description."""
    ocp, arrays = orbax(), without_keys(jax.tree.leaves(state))
    meta = {"kind": KIND, "run": run, "step": step, "about": about,
            "arrays": _described(state), "digests": digests(arrays)}  # fmt: skip
    return ocp.args.Composite(
        state=ocp.args.StandardSave(_named(arrays)),
        meta=ocp.args.JsonSave(meta | {"seal": _seal(meta)}),
    )


def read_meta(folder: Path) -> dict[str, Json]:
    """Reads a checkpoint's description and verifies its digest; the folder's name is the step."""
    if folder.is_symlink() or not folder.is_dir():
        raise DamagedError("it is a symbolic link or no folder, and was not written so")
    file, names, foreign = folder / "meta" / "metadata", set[str](), ""
    try:
        names = {path.name for path in folder.iterdir()}
        check_source(file)
        meta = json.loads(file.read_bytes().decode())
        seal = _seal({k: v for k, v in meta.items() if k != "seal"})
        kind = meta.get("kind")
        if isinstance(kind, str) and kind.startswith(FAMILY) and kind != KIND:
            foreign = f"it is of the kind {kind!r}; this version reads {KIND!r}"
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        if not names or names & {"meta", "state"}:
            raise DamagedError(f"its description can't be read ({in_short(error)})") from None
        meta, seal, foreign = {}, "", "it has neither scalewise's description nor its state"
    if foreign:
        raise InputError(
            f"{folder} is no checkpoint of scalewise train: {foreign}; begin another folder as "
            "out (--out)"
        )
    if seal != meta.get("seal"):
        raise DamagedError("its description is not the one that was written")
    if str(meta["step"]) != folder.name:
        raise DamagedError(f"it is the checkpoint of step {meta['step']} under another name")
    return meta


def _seal(meta: Mapping[str, Json]) -> str:
    return _sha(json.dumps(meta, sort_keys=True).encode())


def read_state(folder: Path, meta: Mapping[str, Json], template: PyTree) -> PyTree:
    """Reads a checkpoint's arrays, verifies their digests, and places them like a template's."""
    there, here = meta["arrays"], _described(template)
    if there != here:
        differ = (f"there {a}, here {b}" for a, b in zip(there, here, strict=False) if a != b)
        why = next(differ, f"there are {len(there)} of them, here {len(here)}")
        raise InputError(f"the checkpoint {folder} holds other arrays than this model's: {why}")
    leaves, treedef = jax.tree.flatten(template)
    into = _named([
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in without_keys(leaves)
    ])  # fmt: skip
    arrays, failed = [], None
    try:
        with closed_loops_ignored(), orbax().StandardCheckpointer() as checkpointer:
            found = checkpointer.restore(folder / "state", into)
        arrays = [found[name] for name in into]
    except Exception as error:  # whatever Orbax, tensorstore or the system raises
        failed = error
    if why := next(filter(None, all_gather_json(failed and in_short(failed))), None):
        raise DamagedError(why) from failed
    for entry, own, digest in zip(there, digests(arrays), meta["digests"], strict=True):
        if own != digest:
            raise DamagedError(f"{entry} has other bytes than were written")
    return jax.tree.unflatten(treedef, map(_typed, leaves, arrays))


@contextmanager
def closed_loops_ignored() -> Iterator[None]:
    """Suppresses "Event loop is closed", which tensorstore prints beside its own error."""
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


def _typed(leaf: PyTree, x: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(x, impl=jax.random.key_impl(leaf)) if is_key(leaf) else x


def _named(arrays: Sequence[PyTree]) -> dict[str, PyTree]:
    return {f"{i:05}": x for i, x in enumerate(arrays)}


def _described(state: PyTree) -> list[str]:
    return [
        f"{jax.tree_util.keystr(path)} is {x.dtype}{list(x.shape)}"
        + ("" if is_whole(x) else f" split as {x.sharding.spec}")
        for path, x in jax.tree_util.tree_leaves_with_path(state)
    ]


def in_short(error: BaseException) -> str:
    """Returns an error's first line; of a long one the subject, and the cause, which is last."""
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: " + (
        text if len(text) <= 300 else f"{text[:100]} ... {text[-150:]}"
    )


def is_key(x: jax.Array | np.ndarray) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def without_keys(leaves: Sequence[PyTree]) -> list[PyTree]:
    """Returns the arrays with typed random keys replaced by the integers that they consist of."""
    return [jax.random.key_data(x) if is_key(x) else x for x in leaves]


def digests(arrays: Sequence[jax.Array | np.ndarray]) -> list[str]:
    """Returns the SHA-256 of each array's bytes; of a split array, that of its parts' digests.

    All processes have to call this function; all get the same digests.
    """
    parts = [[] if is_whole(x) else _parts(x) for x in arrays]
    # some processes may have no first replica of any part
    everywhere = [parts] if all(map(is_whole, arrays)) else all_gather_json(parts)
    return [
        _sha(np.ascontiguousarray(x).tobytes())
        if is_whole(x)
        else _sha("\n".join(sorted(line for process in everywhere for line in process[i])).encode())
        for i, x in enumerate(arrays)
    ]


def state_digest(tree: PyTree) -> str:
    """Returns the SHA-256 over the digests of every array in a pytree, in order."""
    return _sha("\n".join(digests(without_keys(jax.tree.leaves(tree)))).encode())


def _parts(x: PyTree) -> list[str]:
    return [
        f"{[(s.start or 0, s.stop) for s in shard.index]} {_sha(np.asarray(shard.data).tobytes())}"
        for shard in x.addressable_shards
        if shard.replica_id == 0
    ]


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
