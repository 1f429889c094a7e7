"""SHA-256 digests of training states, whose arrays may be split over devices and processes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..._types import PyTree
from ._processes import all_gather_json


def is_whole(x: object) -> bool:
    """Returns whether each device has all of an array."""
    return not isinstance(x, jax.Array) or x.is_fully_replicated


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
