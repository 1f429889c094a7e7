"""Splits a run's state and batches over the devices of one process, or of several."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from ..._check import checked
from ..._jax import process_allgather
from ..._output import sentence
from ..._types import Json, PyTree
from ..._user_file import InputError
from .._console import Interrupted, signal_of


@checked
@dataclass(frozen=True)
class Sharding:
    """How :func:`train` splits a run over a mesh, whose devices may belong to several processes.

    Attributes:
        mesh: a mesh whose axes are all ``Auto``, so that XLA shards what is computed.
        state: maps path and shape of an array of the training state to its partition. Paths are
            written as by ``jax.tree_util.keystr``, ``.params['blocks'][0]['up']``; the paths of an
            optimizer's moments end like those of the parameters.
        batch: the partition of each array of a batch; axes beyond it are not split.

    Example:
        >>> mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> def state(path, shape):
        ...     return PartitionSpec("fsdp") if shape else PartitionSpec()
        >>> Sharding(mesh, state, PartitionSpec("fsdp")).mesh_shape
        {'fsdp': 1}
    """

    mesh: Mesh
    state: Callable[[str, tuple[int, ...]], PartitionSpec]
    batch: PartitionSpec

    @property
    def mesh_shape(self) -> dict[str, int]:
        """The mesh's axes and their sizes; a resumed run has to have the same."""
        return {str(name): int(n) for name, n in self.mesh.shape.items()}

    def of_state(self, shapes: PyTree) -> PyTree:
        def one(path: jax.tree_util.KeyPath, x: PyTree) -> NamedSharding:
            name = jax.tree_util.keystr(path)
            return self._checked(f"the state's {name}", self.state(name, x.shape), x.shape)

        return jax.tree_util.tree_map_with_path(one, shapes)

    def place(self, batch: PyTree) -> PyTree:
        """Splits a batch, which every process has as a whole, over the mesh."""

        def one(x: ArrayLike) -> jax.Array:
            x = np.asarray(x)
            spec = PartitionSpec(*self.batch[: x.ndim])
            sharding = self._checked("an array of the batch", spec, x.shape)
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        return jax.tree.map(one, batch)

    def _checked(self, what: str, spec: PartitionSpec, shape: tuple[int, ...]) -> NamedSharding:
        try:
            sharding = NamedSharding(self.mesh, spec)
            sharding.shard_shape(shape)
        except (TypeError, ValueError) as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(
                f"sharding: {what}, of shape {shape}, can't be split as {spec} over a mesh of "
                f"{self.mesh_shape}: {why}"
            ) from None
        return sharding


def check_processes(sharding: Sharding | None) -> None:
    count = jax.process_count()
    if sharding is None:
        if count > 1:
            raise InputError(
                f"train was called in {count} processes without sharding: give it sharding="
                "Sharding(mesh, state, batch) over the devices of all of them"
            )
        return
    present = {device.process_index for device in sharding.mesh.devices.flat}
    if missing := sorted(set(range(count)) - present):
        raise InputError(
            f"sharding: the mesh has no device of process {missing[0]} of {count}; expected a "
            "mesh of jax.devices(), which are those of all processes"
        )


def is_first() -> bool:
    return jax.process_index() == 0


def all_gather_json(value: Json) -> list[Json]:
    """Returns the values of all processes, in the order of the processes; all have to call it."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = process_allgather(np.int32(len(text))).ravel()
    rows = process_allgather(np.pad(text, (0, max(sizes) - len(text)))).astype(np.uint8)
    return [json.loads(row[:n].tobytes()) for row, n in zip(rows, sizes, strict=True)]


def call_on_first(call: Callable[[], Json], kind: type[Exception] = InputError) -> Json:
    """Calls ``call`` in the first process, and returns its result, or raises its error, in all."""
    value, failed, told = None, None, None
    if is_first():
        try:
            value = call()
        except Exception as error:
            failed, told = error, sentence(error) if isinstance(error, OSError) else str(error)
    found, told = all_gather_json([value, told])[0]
    if failed is not None:
        raise failed
    if told is not None:
        raise kind(told)
    return found


def checked_everywhere(check_interrupt: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that raises an interrupt of any process in all of them, at one step."""

    def check() -> None:
        own: KeyboardInterrupt | None = None
        try:
            check_interrupt()
        except KeyboardInterrupt as error:
            own = error
        signals = all_gather_json(0 if own is None else signal_of(own))
        if any(signals):
            raise own or Interrupted(max(signals))

    return check
