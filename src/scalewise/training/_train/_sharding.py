"""How a run's state and batches lie on the devices of one process, or of several."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._compare import InputError
from ._processes import exchange

Tree = Any


@dataclass(frozen=True)
class Sharding:
    """How :func:`train` splits a run over a mesh, whose devices may belong to several processes.

    Attributes:
        mesh: all of its axes ``Auto``, so that XLA finds the sharding of what is computed.
        state: the partition of an array of the training state, of its path and its shape. Paths
            are written as ``jax.tree_util.keystr`` writes them, ``.params['blocks'][0]['up']``;
            those of an optimizer's moments end like those of the parameters.
        batch: the partition of each array of a batch, whose axes beyond it are not split.

    Example:
        >>> mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> def state(path, shape):
        ...     return PartitionSpec("fsdp") if shape else PartitionSpec()
        >>> Sharding(mesh, state, PartitionSpec("fsdp")).about
        {'fsdp': 1}
    """

    mesh: Mesh
    state: Callable[[str, tuple[int, ...]], PartitionSpec]
    batch: PartitionSpec

    @property
    def about(self) -> dict[str, int]:
        """Axes and sizes of the mesh, which a run that is resumed has to have again."""
        return {str(name): int(n) for name, n in self.mesh.shape.items()}

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def of_state(self, shapes: Tree) -> Tree:
        """The sharding of each array of a state.

        Raises:
            InputError: a partition doesn't fit its array.
        """

        def one(path: Any, x: Any) -> NamedSharding:
            name = jax.tree_util.keystr(path)
            return self._checked(f"the state's {name}", self.state(name, x.shape), x.shape)

        return jax.tree_util.tree_map_with_path(one, shapes)

    def place(self, batch: Tree) -> Tree:
        """A batch that every process has as a whole, as arrays over the mesh.

        Raises:
            InputError: the batch can't be split so.
        """

        def one(x: Any) -> jax.Array:
            x = np.asarray(x)
            spec = PartitionSpec(*self.batch[: x.ndim])
            sharding = self._checked("an array of the batch", spec, x.shape)
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        return jax.tree.map(one, batch)

    def _checked(self, what: str, spec: Any, shape: tuple[int, ...]) -> NamedSharding:
        try:
            sharding = NamedSharding(self.mesh, spec)
            sharding.shard_shape(shape)
        except (TypeError, ValueError) as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(
                f"sharding: {what}, of shape {shape}, can't be split as {spec} over a mesh of "
                f"{self.about}: {why}"
            ) from None
        return sharding


def check_processes(sharding: Sharding | None) -> None:
    """Refuses a run of several processes that doesn't use them all.

    Raises:
        InputError: there are several processes and no sharding, or its mesh leaves one out.
    """
    count = jax.process_count()
    if sharding is None:
        if count > 1:
            raise InputError(
                f"train was called in {count} processes without sharding: give it sharding="
                "Sharding(mesh, state, batch) over the devices of all of them"
            )
        return
    there = {device.process_index for device in sharding.mesh.devices.flat}
    if missing := sorted(set(range(count)) - there):
        raise InputError(
            f"sharding: the mesh has no device of process {missing[0]} of {count}: make it of "
            "jax.devices(), which are those of all processes"
        )


def is_whole(x: Any) -> bool:
    """Whether each device has all of an array."""
    return not isinstance(x, jax.Array) or x.is_fully_replicated


def digests(arrays: list[Any]) -> list[str]:
    """SHA-256 of each array's bytes; of one that is split over devices, of its parts' digests.

    The same in all processes, each of which has to call it.
    """
    parts = [[] if is_whole(x) else _parts(x) for x in arrays]
    everywhere = [parts] if all(map(is_whole, arrays)) else exchange(parts)
    return [
        _sha(np.asarray(x)) if is_whole(x) else _joined(process[i] for process in everywhere)
        for i, x in enumerate(arrays)
    ]


def _parts(x: jax.Array) -> list[str]:
    """Where each part lies that this process answers for, and the digest of its bytes."""
    return [
        f"{[(s.start or 0, s.stop) for s in shard.index]} {_sha(np.asarray(shard.data))}"
        for shard in x.addressable_shards
        if shard.replica_id == 0
    ]


def _joined(parts: Iterable[list[str]]) -> str:
    lines = sorted(line for part in parts for line in part)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _sha(x: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()


def like(leaf: Any, array: Any) -> Any:
    """A restored array where ``leaf`` lies: on the default device, or on each one of a mesh."""
    if not is_whole(leaf):
        return array  # restored part by part, each to its device
    if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
        return jax.make_array_from_callback(array.shape, leaf.sharding, lambda index: array[index])
    return jnp.asarray(array)
