"""One checkpoint of a training state: written by Orbax, verified by a digest when it is read.

All processes of a run call the same functions and see the same folder.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from ..._extras import require
from ..._jax import process_allgather
from ..._types import Json, PyTree
from ._sharding import all_gather_json


class DamagedError(Exception):
    """Raised if a checkpoint isn't the one that was written; the message is half a sentence."""


def orbax() -> ModuleType:
    return require("orbax.checkpoint", "train", "a checkpoint")


def items_of(step: int, state: PyTree, run: str) -> Json:
    """Returns what Orbax writes: the arrays, and what identifies them."""
    args, arrays = orbax().args, _named(state)
    meta = _meta(run, step, arrays) | {"digest": state_digest(state)}
    return args.Composite(state=args.StandardSave(arrays), meta=args.JsonSave(meta))


def read(folder: Path, template: PyTree, run: str) -> PyTree:
    """Reads a checkpoint, whose folder's name is its step, and places it like ``template``."""
    args, names = orbax().args, _named(template)
    meta = _restored(folder, meta=args.JsonRestore())
    for name, value in _meta(run, int(folder.name), names).items():
        if meta.get(name) != value:
            raise DamagedError(f"its {name} is {meta.get(name)}, not {value}")
    into = {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for k, x in names.items()
    }
    found = _restored(folder, state=args.StandardRestore(into))
    if state_digest([found[name] for name in names]) != meta.get("digest"):
        raise DamagedError("its arrays have other bytes than were written")
    leaves, treedef = jax.tree.flatten(template)
    return jax.tree.unflatten(
        treedef, [_typed(x, found[k]) for k, x in zip(names, leaves, strict=True)]
    )


def _meta(run: str, step: int, arrays: Mapping[str, PyTree]) -> dict[str, Json]:
    """Returns what identifies a checkpoint, each array by its path, dtype and shape."""
    about = {f"array {name}": f"{x.dtype}{list(x.shape)}" for name, x in arrays.items()}
    return {"run": run, "step": step, **about}


def _restored(folder: Path, **item: Json) -> dict[str, Json]:
    ocp, found, failed = orbax(), {}, None
    try:
        checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
        with closed_loops_ignored(), checkpointer:
            (values,) = checkpointer.restore(folder, args=ocp.args.Composite(**item)).values()
            found = dict(values)
    except Exception as error:  # whatever Orbax, tensorstore or the system raises
        failed = error
    if why := next(filter(None, all_gather_json(failed and in_short(failed))), None):
        raise DamagedError(why) from failed
    return found


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


def in_short(error: BaseException) -> str:
    """Returns an error's first line; of a long one the subject, and the cause, which is last."""
    text = (str(error).strip().splitlines() or [""])[0]
    text = text if len(text) <= 300 else f"{text[:100]} ... {text[-150:]}"
    return f"{type(error).__name__}: {text}"


def _is_key(x: jax.Array | np.ndarray) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _typed(leaf: PyTree, x: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(x, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else x


def _named(state: PyTree) -> dict[str, PyTree]:
    """Returns the arrays by their paths, typed random keys as the integers they consist of."""
    return {
        jax.tree_util.keystr(path): jax.random.key_data(x) if _is_key(x) else x
        for path, x in jax.tree_util.tree_leaves_with_path(state)
    }


def state_digest(tree: PyTree) -> str:
    """Returns the SHA-256 over those of the bytes of each array in a pytree, in order."""
    return _sha("\n".join(map(_digest, _named(tree).values())).encode())


def _digest(x: jax.Array | np.ndarray) -> str:
    here = not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated
    return _sha(np.ascontiguousarray(x if here else process_allgather(x, tiled=True)).tobytes())


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
