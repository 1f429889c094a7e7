"""The state of an audited run: its statistics, and records that wait to be added to them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._jax import Tree, quick_compilation
from ...interpret import outlined
from ...rounding import FORMAT_PARAMS
from ._elementary import Uncounted
from ._statistics import (
    DECIDED,
    EVENTS,
    FIRST,
    RECORD,
    SATURATED,
    VISITS,
    Statistics,
    add_events,
    add_visits,
    empty_statistics,
    summaries,
    summarize,
)

BATCH = 32  # records that one call adds to the statistics
IN_FLIGHT = 1 << 22  # numbers of results dispatched and not yet computed
MIN_ROWS = 64  # statistics have this many rows times a power of four: programs share the code


class Accumulator:
    """The statistics of a run, and records that wait to be added to them, in order."""

    def __init__(self, formats: np.ndarray, keeps: bool = True):
        self.keeps = keeps
        rows = MIN_ROWS
        while rows <= len(formats):  # one row to spare, for the padding of a batch
            rows *= 4
        self.formats = formats  # of each equation's results
        padded = np.concatenate([formats, np.tile(formats[:1], (rows - len(formats), 1))])
        self._statistics, self._sent = empty_statistics(padded), formats.tobytes()
        (self._device,) = self._statistics.formats.devices()
        self._pending: list[tuple[int, jax.Array]] = []
        self._in_flight: collections.deque[tuple[int, jax.Array]] = collections.deque()
        self._in_flight_numbers = 0
        self._events: list[tuple[int, jax.Array, bool]] = []

    def op_params(self, index: int, rest: np.ndarray) -> jax.Array:
        return _on_device(self.formats[index].tobytes() + rest.tobytes())

    def add(self, index: int, record: jax.Array, numbers: int) -> Accumulator:
        """Waits while more than IN_FLIGHT numbers are being computed, so that freed memory is
        reused."""
        if not self.keeps:
            return self
        self._pending.append((index, record))
        self._in_flight.append((numbers, record))
        self._in_flight_numbers += numbers
        while self._in_flight_numbers > IN_FLIGHT and len(self._in_flight) > 1:
            before, done = self._in_flight.popleft()
            self._in_flight_numbers -= before
            done.block_until_ready()
        if len(self._pending) == BATCH:
            self._flush_records()
        return self

    def add_events(self, index: int, events: jax.Array, visited: bool) -> Accumulator:
        if self.keeps:
            self._events.append((index, events, visited))
        return self

    def muted(self) -> Accumulator:
        """Returns an accumulator that keeps no records: of a run that goes on after the other's
        end."""
        other = Accumulator(self.formats, keeps=False)
        other._statistics = self._statistics
        return other

    def prepare(self) -> None:
        with jax.enable_x64(True):
            _compiled_update(len(self._statistics.formats), self._device)

    def flush(self) -> Statistics:
        if not self.keeps:
            return jax.tree.map(jnp.copy, self._statistics)  # a compiled loop may donate it
        self._flush_records()
        self._send_formats()
        if self._events:
            counts = np.array(self._statistics.counts)
            for index, events, visited in self._events:
                row, (decided, differ, size, saturated, *_) = counts[index], np.asarray(events)
                row[VISITS] += visited
                if differ and row[FIRST] < 0:
                    row[FIRST] = row[DECIDED] // decided
                elif saturated and row[FIRST] < 0:
                    row[FIRST] = row[SATURATED - 1] // size  # visits of as many numbers each
                row[EVENTS] += np.asarray(events)
            on_device = jax.device_put(counts, may_alias=False)
            self._statistics = dataclasses.replace(self._statistics, counts=on_device)
            self._events = []
        return self._statistics

    def _send_formats(self) -> None:
        if self.formats.tobytes() != self._sent:
            self._sent, n = self.formats.tobytes(), len(self.formats)
            padded = np.concatenate([self.formats, np.asarray(self._statistics.formats)[n:]])
            on_device = jax.device_put(padded, may_alias=False)
            self._statistics = dataclasses.replace(self._statistics, formats=on_device)

    def _flush_records(self) -> None:
        if self._pending:
            self._send_formats()
            count = len(self._statistics.formats)
            padding = [(count - 1, np.zeros(RECORD))] * (BATCH - len(self._pending))
            self._pending = self._on_own_device(self._pending)
            indices, records = zip(*self._pending, *padding, strict=True)
            arguments = self._statistics, np.array(indices), records
            self._statistics = _compiled_update(count, self._device)(*arguments)
            self._pending = []

    def replace(self, statistics: Statistics) -> None:
        assert not self._pending
        if self.keeps:
            self._statistics = self._on_own_device(statistics)

    def _on_own_device(self, tree: Tree) -> Tree:
        """Returns arrays that another device may have computed, on the statistics' own."""
        arrays = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
        if all(x.device == self._device for x in arrays):
            return tree
        return jax.device_put(jax.device_get(tree))  # uncommitted: a loop on any device takes it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Visits:
    """The statistics in a loop that is compiled as a whole."""

    statistics: Statistics  # without the visits of this iteration
    # of the equations visited in this iteration; one operation adds them all at its end
    records: dict[int, jax.Array | Uncounted] = dataclasses.field(default_factory=dict)
    events: dict[int, jax.Array] = dataclasses.field(default_factory=dict)

    @property
    def formats(self) -> jax.Array:
        return self.statistics.formats

    def op_params(self, index: int, rest: np.ndarray) -> jax.Array:
        return outlined(_op_params, None, self.statistics.formats, np.int64(index), rest)

    def add(self, index: int, record: jax.Array | Uncounted, numbers: int) -> Visits:
        """Returns the state with a visit of equation ``index``."""
        return dataclasses.replace(self, records={**self.records, index: record})

    def add_events(self, index: int, events: jax.Array, visited: bool) -> Visits:
        return dataclasses.replace(self, events={**self.events, index: events})

    def settled(self) -> Visits:
        if not self.records and not self.events:
            return self
        order = sorted(self.records, key=self._length)
        groups = [np.array([*some]) for _, some in itertools.groupby(order, self._length)]
        records = [(some, [self.records[i] for i in some]) for some in groups]
        apart = np.array([i not in self.records for i in self.events], np.float64)
        events = np.array([*self.events], np.int64), [*self.events.values()], apart
        return Visits(outlined(_settle, None, self.statistics, records, events))

    def _length(self, index: int) -> int:
        record = self.records[index]
        return record.size if isinstance(record, Uncounted) else 0


def _op_params(_: None, formats: jax.Array, index: jax.Array, rest: jax.Array) -> jax.Array:
    return jnp.concatenate([formats[index], rest])


def _counted(result: tuple[Uncounted, jax.Array]) -> tuple[jax.Array, ...]:
    return summarize(result[0].counted()[1], result[1])


def _settle(_: None, state: Statistics, records, events) -> Statistics:
    for indices, some in records:
        if isinstance(some[0], Uncounted):
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *some)
            results = stacked, state.formats[indices]
            found = lax.map(_counted, results)
        else:
            found = summaries(state, indices, some)
        state = add_visits(state, indices, *found)
    indices, counts, visited = events
    return add_events(state, indices, jnp.stack(counts), visited) if counts else state


def _update(state: Statistics, indices: jax.Array, records: Sequence[jax.Array]) -> Statistics:
    def one(state, x):  # an equation may be among them several times
        return add_visits(state, *[leaf[None] for leaf in x]), None

    return lax.scan(one, state, (indices, *summaries(state, indices, records)))[0]


@functools.lru_cache(maxsize=64)
def _compiled_update(rows: int, device: Any) -> Callable:
    """Ahead of time: under ``jit`` it would compile again for each tracing context."""
    empty = empty_statistics(np.zeros((rows, FORMAT_PARAMS)))
    example = empty, np.zeros(BATCH, np.int64), (np.zeros(RECORD),) * BATCH
    with jax.default_device(device):  # a thread has no default device of its caller
        return jax.jit(_update, donate_argnums=0).lower(*example).compile(quick_compilation(1))


@functools.lru_cache(maxsize=8192)
def _on_device(content: bytes) -> jax.Array:
    return jax.device_put(np.frombuffer(content))
