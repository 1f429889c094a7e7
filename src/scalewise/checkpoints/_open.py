"""`load` and `save`: lazy trees of arrays and ScaledArrays."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import jax
import numpy as np

from .._extras import require
from .._output import replacing
from .._types import Json
from ..rounding import EncodedArray
from ..scaled import ScaledArray, save_safetensors
from ..scaled._safetensors import _joined, _parts
from ._files import UnreadableError, read_json
from ._find import family_of, intact, refuse_unscaled
from ._source import Source
from ._weights import Weight

Array: TypeAlias = jax.Array | np.ndarray | ScaledArray | EncodedArray
Place: TypeAlias = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding]
ORBAX = "scalewise.json"


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
        x = self.weights[name].scaled()
        if self._place is None:
            return x
        return jax.tree.map(lambda leaf: _placed(leaf, name, self._place, x.shape), x)

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


def _placed(leaf: Json, name: str, place: Json, shape: tuple[int, ...]) -> jax.Array:
    """Places an array or a part of a ScaledArray; an axis that a mesh can't split is replicated."""
    sharding = _sharding(place, name, shape)
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = [*sharding.spec, *(None,) * (leaf.ndim - len(sharding.spec))][: leaf.ndim]
        mesh = sharding.mesh.shape
        fits = [_splits(n, axis, mesh) for n, axis in zip(leaf.shape, spec, strict=True)]
        spec = [axis if ok else None for axis, ok in zip(spec, fits, strict=True)]
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec))
    return jax.device_put(leaf, sharding)


def _sharding(place: Json, name: str, shape: tuple[int, ...]) -> jax.sharding.Sharding:
    return place if isinstance(place, jax.sharding.Sharding) else place(name, shape)


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
    path = Path(path)
    if (path / ORBAX).is_file():
        return _load_orbax(path, select, sharding)
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
    path = Path(os.path.abspath(path))
    if path.exists():
        raise ValueError(f"save: {str(path)!r} exists")
    arrays, records = {}, {}
    for name, x in flat.items():
        parts, records[name] = _parts(name, x)
        arrays |= parts
    dtypes = {name: str(np.dtype(x.dtype)) for name, x in arrays.items()}
    bits = {name: _as_bits(x) for name, x in arrays.items()}
    with require("orbax.checkpoint", "train", "the layout orbax").StandardCheckpointer() as writer:
        writer.save(path / "arrays", bits)
    if jax.process_index() == 0:
        text = json.dumps({"records": records, "dtypes": dtypes})
        with replacing(path / ORBAX) as file:
            file.write(text.encode())


def _flat(tree: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    for name, x in tree.items():
        if isinstance(x, Mapping) and not isinstance(x, Tree):
            yield from _flat(x, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", x


def _as_bits(x: Json) -> jax.Array:
    """Returns narrow floats as integers of their bits, which every storage format has."""
    x = jax.numpy.asarray(x)
    return x.view(np.uint8) if x.dtype.itemsize == 1 and x.dtype != bool else x


def _load_orbax(path: Path, select: str | None, sharding: Place | None) -> Tree:
    found = read_json(path / ORBAX)
    try:
        records, dtypes = dict(found["records"]), dict(found["dtypes"])
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableError(f"{path / ORBAX} is damaged ({error!r})") from None
    wanted = {n for n in records if select is None or re.search(select, n)}
    source = Source(path, [], {}, {}, {}, [])
    return OrbaxTree(source, {n: records[n] for n in records if n in wanted}, dtypes, sharding)


class OrbaxTree(Tree):
    """A tree whose arrays Orbax reads, each host its own shards."""

    def __init__(
        self, source: Source, records: Mapping[str, Json], dtypes: Mapping[str, str],
        place: Place | None,
    ):  # fmt: skip
        self.source, self.layout, self.evidence = source, "orbax", f"the folder has {ORBAX}"
        self.weights, self._place, self._dtypes = dict(records), place, dtypes

    def __getitem__(self, name: str) -> Array:
        record = self.weights[name]
        names = [n for n in self._dtypes if n == name or n.removeprefix(f"{name}.") in (
            "scale", "exponent", "scale.scale", "scale.exponent")]  # fmt: skip
        ocp = require("orbax.checkpoint", "train", "the layout orbax")
        place = self._place or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        arguments = {n: ocp.ArrayRestoreArgs(sharding=_sharding(place, name, ())) for n in names}
        with ocp.PyTreeCheckpointer() as reader:
            meta = reader.metadata(self.source.path / "arrays")
            tree = getattr(meta, "item_metadata", meta)
            tree = getattr(tree, "tree", tree)
            item = {n: jax.ShapeDtypeStruct(tree[n].shape, tree[n].dtype) for n in names}
            found = reader.restore(
                self.source.path / "arrays", args=ocp.args.PyTreeRestore(
                    item=item, restore_args=arguments, partial_restore=True)
            )  # fmt: skip
        arrays = {n: found[n].view(jax.numpy.dtype(self._dtypes[n])) for n in names}
        return _joined(name, record, arrays) if record else arrays[name]

    def value(self, name: str, dtype: np.dtype | type = np.float32) -> np.ndarray:
        return np.asarray(self[name]).astype(dtype)

    def select(self, pattern: str) -> Tree:
        found = {n: r for n, r in self.weights.items() if re.search(pattern, n)}
        return OrbaxTree(self.source, found, self._dtypes, self._place)
