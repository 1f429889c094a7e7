"""Which scales belong to the elements that an index selects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Index: TypeAlias = tuple[Any, ...]
Block: TypeAlias = tuple[int, int] | None


def indexed(
    shape: Sequence[int], block: Block, scale: Sequence[int], index: object
) -> tuple[Index, Index, Block] | None:
    """Returns the index of the data with an entry for each axis, that of the scale, and the block.

    Args:
        shape: of the data.
        block: (axis, size), the axis counted from the last.
        scale: the shape of the scale, with as many axes.
        index: as in ``x[index]``.

    Returns:
        None for a mask, for a slice that cuts blocks, and for an array of indices at or behind the
        blocked axis.
    """
    entries = _entries(index, len(shape))
    if entries is None:
        return None
    own: list[Any] = []
    new, axis = None, 0
    for i, entry in enumerate(entries):
        if entry is None:
            own.append(None)
            continue
        n, s = shape[axis], scale[axis]
        if block is not None and axis - len(shape) == block[0]:
            rest = entries[i + 1 :]
            arrays = any(_is_array(e) for e in (entry, *rest))
            part = None if arrays else _of_blocks(entry, n, s, block[1])
            if part is None:
                return None
            own.append(part)
            if isinstance(entry, slice):
                new = -1 - sum(e is None or isinstance(e, slice) for e in rest), block[1]
        else:
            own.append(_first(entry) if s == 1 else entry)
        axis += 1
    return entries, tuple(own), new


def _entries(index: object, ndim: int) -> Index | None:
    """Returns an index with an entry for each axis: None, an integer, a slice or integers."""
    entries: list[Any] = list(index) if isinstance(index, tuple) else [index]
    entries = [np.asarray(e) if isinstance(e, list) else e for e in entries]
    if any(_is_mask(e) for e in entries):
        return None
    missing = ndim - sum(e is not None and e is not Ellipsis for e in entries)
    if missing < 0:
        return None
    at = next((i for i, e in enumerate(entries) if e is Ellipsis), len(entries))
    return (*entries[:at], *[slice(None)] * missing, *entries[at + 1 :])


def _is_mask(entry: object) -> bool:
    if isinstance(entry, bool | np.bool_):
        return True
    return isinstance(entry, jax.Array | np.ndarray) and not jnp.issubdtype(
        entry.dtype, jnp.integer
    )


def _is_array(entry: object) -> bool:
    return isinstance(entry, jax.Array | np.ndarray) and entry.ndim > 0


def _first(entry: Any) -> Any:
    """Returns an index of the same kind into an axis of length 1."""
    if isinstance(entry, slice):
        return slice(None)
    return np.zeros((1,) * entry.ndim, np.int32) if _is_array(entry) else 0


def _of_blocks(entry: Any, n: int, blocks: int, size: int) -> Any:
    if blocks == 1:
        return _first(entry)
    if isinstance(entry, slice):
        start, stop, step = entry.indices(n)
        whole = step == 1 and start % size == 0 and (stop % size == 0 or stop == n)
        return slice(start // size, -(-stop // size)) if whole else None
    if isinstance(entry, jax.Array):
        return jnp.where(entry < 0, entry + n, entry) // size
    return (entry + n if entry < 0 else entry) // size
