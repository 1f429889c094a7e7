"""Accumulates the statistics of a program that runs equation by equation, in batches of records."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ._rounding import FORMAT_PARAMS
from ._statistics import (
    DECIDED,
    EVENTS,
    FIRST,
    OP_PARAMS,
    PARTS,
    SAMPLE,
    VISITS,
    Record,
    Statistics,
    Tally,
    accumulate,
    empty_statistics,
    summarize,
)

BATCH = 32  # records that one call adds to the statistics
IN_FLIGHT = 1 << 22  # numbers of results dispatched and not yet computed
MIN_ROWS = 64  # statistics have this many rows times a power of four: programs share the code


class Accumulator:
    """The statistics of a run, and records that wait to be added to them, in order.

    Attributes:
        formats: float64[n, 8], the format of each equation's results.
    """

    def __init__(self, formats: np.ndarray):
        rows = MIN_ROWS
        while rows <= len(formats):  # one row to spare, for the padding of a batch
            rows *= 4
        self.formats = formats
        padded = np.concatenate([formats, np.tile(formats[:1], (rows - len(formats), 1))])
        self._statistics = empty_statistics(padded)
        self._pending: list[tuple[int, Record]] = []
        self._in_flight: collections.deque[tuple[int, Tally]] = collections.deque()
        self._in_flight_numbers = 0
        self._events: list[tuple[int, jax.Array, bool]] = []

    def op_params(self, index: int, rest: np.ndarray) -> jax.Array:
        """Returns the format of equation ``index`` and ``rest`` as one array on the device."""
        return _on_device(self.formats[index].tobytes() + rest.tobytes())

    def add(self, index: int, record: Record, numbers: int) -> None:
        """Adds a visit of equation ``index`` whose result has ``numbers`` numbers.

        Waits while more than IN_FLIGHT numbers are being computed, so that freed memory is reused.
        """
        self._pending.append((index, record))
        self._in_flight.append((numbers, record.tally))
        self._in_flight_numbers += numbers
        while self._in_flight_numbers > IN_FLIGHT and len(self._in_flight) > 1:
            before, tally = self._in_flight.popleft()
            self._in_flight_numbers -= before
            tally.flushed.block_until_ready()
        if len(self._pending) == BATCH:
            self._flush_records()

    def add_events(self, index: int, events: jax.Array, visited: bool) -> None:
        """Adds a visit of an equation that decides or rounds operands (see :func:`add_events`)."""
        self._events.append((index, events, visited))

    def muted(self) -> Muted:
        """Returns an accumulator with the same formats that keeps no records."""
        return Muted(self)

    def prepare(self, integers: np.dtype) -> None:
        """Compiles, in any thread, the update for a low run with floats as wide as ``integers``."""
        with jax.enable_x64(True):
            _compiled_update(len(self._statistics.formats), integers)

    def flush(self) -> Statistics:
        """Adds the pending records and events and returns the statistics."""
        self._flush_records()
        if self._events:
            counts = np.array(self._statistics.counts)
            for index, events, visited in self._events:
                row, (decided, differ, *_) = counts[index], np.asarray(events)
                row[VISITS] += visited
                if differ and row[FIRST] < 0:
                    row[FIRST] = row[DECIDED] // decided
                row[EVENTS] += np.asarray(events)
            on_device = jax.device_put(counts, may_alias=False)
            self._statistics = dataclasses.replace(self._statistics, counts=on_device)
            self._events = []
        return self._statistics

    def _flush_records(self) -> None:
        if self._pending:
            count, integers = len(self._statistics.formats), self._pending[0][1].tally.flushed.dtype
            padding = [(count - 1, _empty_record(integers))] * (BATCH - len(self._pending))
            indices, records = zip(*self._pending, *padding, strict=True)
            arguments = self._statistics, np.array(indices), records
            self._statistics = _compiled_update(count, integers)(*arguments)
            self._pending = []

    def replace(self, statistics: Statistics) -> None:
        """Sets the statistics to those that a compiled loop returned, given the flushed ones."""
        assert not self._pending
        self._statistics = statistics


class Muted(Accumulator):
    """An accumulator that keeps no records: of a run that goes on after the other's end."""

    def __init__(self, other: Accumulator):
        super().__init__(other.formats)
        self._statistics = other._statistics

    def add(self, index: int, record: Record, numbers: int) -> None:
        pass

    def add_events(self, index: int, events: jax.Array, visited: bool) -> None:
        pass

    def flush(self) -> Statistics:
        return jax.tree.map(jnp.copy, self._statistics)  # a compiled loop may donate it

    def replace(self, statistics: Statistics) -> None:
        pass

    def muted(self) -> Muted:
        return self


@functools.lru_cache(maxsize=8)
def _empty_record(integers: np.dtype) -> Record:
    """Returns a record without events, for a low run whose floats are as wide as ``integers``."""

    def zeros(shape: int | tuple[int, int], dtype: DTypeLike = np.float64) -> jax.Array:
        return cast(jax.Array, np.zeros(shape, dtype))  # on the host, until it is stacked

    narrow, wide = zeros(PARTS, integers), zeros(PARTS, np.int64)
    tally = Tally(narrow, narrow, narrow, wide, wide, wide, wide)
    return Record(tally, samples=zeros((5, SAMPLE)), op_params=zeros(OP_PARAMS))


def _update(state: Statistics, indices: jax.Array, records: Sequence[Record]) -> Statistics:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *records)
    summaries = jax.vmap(summarize)(stacked, state.formats[indices])

    def one(state, x):
        return accumulate(state, *x), None

    return lax.scan(one, state, (indices, *summaries))[0]


@functools.lru_cache(maxsize=64)
def _compiled_update(rows: int, integers: np.dtype) -> Callable:
    """Compiles ``_update`` for statistics with this many rows.

    Ahead of time: under ``jit`` it would compile again for each tracing context.
    """
    empty = empty_statistics(np.zeros((rows, FORMAT_PARAMS)))
    example = empty, np.zeros(BATCH, np.int64), (_empty_record(integers),) * BATCH
    return jax.jit(_update, donate_argnums=0).lower(*example).compile()


@functools.lru_cache(maxsize=8192)
def _on_device(content: bytes) -> jax.Array:
    return jax.device_put(np.frombuffer(content))
