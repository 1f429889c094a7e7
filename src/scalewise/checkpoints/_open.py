"""`load` and `save`: lazy trees of arrays and ScaledArrays."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import jax
import numpy as np

from .._types import Json
from ..rounding import EncodedArray
from ..scaled import ScaledArray, save_safetensors
from ..scaled._safetensors import _joined
from ._find import family_of, intact, refuse_unscaled
from ._orbax import OrbaxTensor, save_orbax
from ._source import Source
from ._weights import Weight

Array: TypeAlias = jax.Array | np.ndarray | ScaledArray | EncodedArray
Place: TypeAlias = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding]


class Tree(Mapping[str, Array]):
    """The arrays of a checkpoint by name, read from the mapped files when they are used.

    ``tree[name]`` is a NumPy array that maps the file, or a :class:`scalewise.ScaledArray` with the
    stored bytes; ``tree.value(name)`` has the numbers as the layout's own package decodes them.

    Attributes:
        layout: family of the layouts, None for plain tensors.
        evidence: what says so.
        source: the files.
    """

    def __init__(self, source: Source, weights: Mapping[str, Weight], place: Place | None = None):
        self.source = source
        self.layout, self.evidence = family_of(source)
        self.weights = dict(weights)
        self._place = place

    def __getitem__(self, name: str) -> Array:
        weight, place = self.weights[name], self._place
        if place is None:
            return weight.scaled()
        parts = [t for t in weight.parts.values() if isinstance(t, OrbaxTensor)]
        if not parts:
            x = weight.scaled()
            return jax.tree.map(
                lambda leaf: jax.device_put(leaf, _fitted(place, name, x.shape, leaf.shape)), x
            )
        shape = _shape_of(weight.record, weight.parts["codes"].shape)
        arrays: Json = {t.name: t.restored(_fitted(place, name, shape, t.shape)) for t in parts}
        return _joined(name, weight.record, arrays) if weight.record else arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    def value(self, name: str, dtype: np.dtype | type = np.float32) -> np.ndarray:
        """Returns the numbers of an array, rounded once to a dtype."""
        return self.weights[name].value(dtype)

    def select(self, pattern: str) -> Tree:
        """Returns the arrays whose names a regular expression matches anywhere."""
        found = {n: w for n, w in self.weights.items() if re.search(pattern, n)}
        return Tree(self.source, found, self._place)

    def nested(self) -> dict[str, Json]:
        """Returns all arrays as nested dictionaries, split at the dots of their names."""
        tree: dict[str, Json] = {}
        for name in self.weights:
            *path, last = name.split(".")
            node = tree
            for key in path:
                node = node.setdefault(key, {})
            node[last] = self[name]
        return tree

    def __repr__(self) -> str:
        return f"Tree({str(self.source.path)!r}, {len(self)} arrays, layout={self.layout!r})"


def _fitted(
    place: Place, name: str, shape: tuple[int, ...], part: tuple[int, ...]
) -> jax.sharding.Sharding:
    """Returns where a part of an array belongs; an axis that a mesh can't split is replicated."""
    sharding = place if isinstance(place, jax.sharding.Sharding) else place(name, shape)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    spec = [*sharding.spec, *(None,) * (len(part) - len(sharding.spec))][: len(part)]
    mesh = sharding.mesh.shape
    fits = [_splits(n, axis, mesh) for n, axis in zip(part, spec, strict=True)]
    spec = [axis if ok else None for axis, ok in zip(spec, fits, strict=True)]
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec))


def _shape_of(record: Json, codes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of an array by its record: packed codes have another last axis."""
    inner = (record or {}).get("data", record)
    return (*codes[:-1], inner["length"]) if inner and inner["length"] else codes


def _splits(n: int, axis: Json, mesh: Mapping[str, int]) -> bool:
    names = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
    return n % int(np.prod([mesh[a] for a in names], dtype=int)) == 0


def load(
    path: str | os.PathLike[str],
    select: str | None = None,
    *,
    sharding: Place | None = None,
    unscaled_fp8: bool = False,
) -> Tree:
    """Returns the arrays of a checkpoint of any known layout as a lazy tree.

    Args:
        path: a .safetensors or .gguf file, an index, a folder with shards, or a folder that
            :func:`save` wrote with Orbax.
        select: a regular expression; arrays whose names it doesn't match anywhere are left out.
        sharding: where arrays are placed: a sharding for all, or a function of name and shape. Of a
            NamedSharding, axes that don't divide a part of a ScaledArray replicate it.
        unscaled_fp8: whether FP8 tensors without a scale hold the numbers themselves.

    Raises:
        UnreadableError: the files are damaged or incomplete, or hold FP8 tensors without a scale
            that ``unscaled_fp8`` doesn't allow.
        OSError: a file can't be read.
    """
    source, weights = intact(path)
    tree = Tree(source, weights, sharding)
    tree = tree.select(select) if select else tree
    if not unscaled_fp8:
        refuse_unscaled(path, tree.weights)
    return tree


def save(
    path: str | os.PathLike[str], tree: Mapping[str, Json], *, layout: str = "scalewise"
) -> None:
    """Writes arrays and ScaledArrays, so that :func:`load` returns them again to the bit.

    Args:
        path: a .safetensors file, or with Orbax a folder that doesn't exist.
        tree: names to arrays, EncodedArrays and ScaledArrays; nested dictionaries are joined by
            dots.
        layout: ``"scalewise"``: one safetensors file; ``"orbax"``: a folder, in which each host
            writes its shards. :func:`cast` writes the layouts of other packages.

    Raises:
        ValueError: an unknown layout, a name or dtype that can't be stored, or a path that exists.
        OSError: the file can't be written.
    """
    flat = dict(_flat(tree))
    if layout == "scalewise":
        return save_safetensors(path, flat)
    if layout != "orbax":
        raise ValueError(f"save: layout is {layout!r}; expected scalewise or orbax")
    save_orbax(path, flat)


def _flat(tree: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    for name, x in tree.items():
        if isinstance(x, Mapping) and not isinstance(x, Tree):
            yield from _flat(x, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", x
