"""Statistics of a program that runs equation by equation: notes are taken by the dozen."""

from __future__ import annotations

import collections
import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._rounding import WIDTH
from ._statistics import ABOUT, PARTS, SAMPLE, Note, Statistics, Tally, added, blank, measured

BATCH = 32  # notes that are taken by one call
UNDER_WAY = 1 << 22  # numbers of results that haven't been computed yet
UNUSED = 1 << 27  # numbers after which malloc is asked for what it holds and nobody uses
ROWS = 64  # rows come in powers of four times this, so that programs share the code


class Ledger:
    """Statistics and what hasn't been added to them yet; notes are taken in the order they came.

    Attributes:
        formats: float64[n, 8], the format of each equation's results.
    """

    def __init__(self, formats: np.ndarray):
        rows = ROWS
        while rows <= len(formats):  # one to spare, for what pads a batch
            rows *= 4
        self.formats = formats
        padded = np.concatenate([formats, np.tile(formats[:1], (rows - len(formats), 1))])
        self._statistics = blank(padded)
        self._pending: list[tuple[int, Note]] = []
        self._under_way: collections.deque[tuple[int, Tally]] = collections.deque()
        self._numbers = 0
        self._made = 0

    def about(self, row: int, rest: np.ndarray) -> jax.Array:
        """The row's format and the rest of what a program is told, as an array on the device."""
        return _array(self.formats[row].tobytes() + rest.tobytes())

    def add(self, row: int, note: Note, numbers: int) -> None:
        """One more visit of a row, of a result of so many numbers.

        Waits while much is under way: what was let go of is memory to use again, warm and paid for.
        """
        self._pending.append((row, note))
        self._under_way.append((numbers, note.tally))
        self._numbers += numbers
        self._made += numbers
        while self._numbers > UNDER_WAY and len(self._under_way) > 1:
            before, tally = self._under_way.popleft()
            self._numbers -= before
            tally.flushed.block_until_ready()
        if self._made > UNUSED:
            self._made = 0
            _give_back()
        if len(self._pending) == BATCH:
            self.settle()

    def prepare(self, integers: Any) -> None:
        """Compiles, in any thread, what takes the notes of a lane of floats as wide as these."""
        with jax.enable_x64(True):
            _taker(len(self._statistics.formats), integers)

    def settle(self) -> Statistics:
        """All that was noted so far."""
        if self._pending:
            count, integers = len(self._statistics.formats), self._pending[0][1].tally.flushed.dtype
            idle = [(count - 1, _idle(integers))] * (BATCH - len(self._pending))
            rows, notes = zip(*self._pending, *idle, strict=True)
            arguments = self._statistics, np.array(rows), notes
            self._statistics = _taker(count, integers)(*arguments)
            self._pending = []
        return self._statistics

    def replace(self, statistics: Statistics) -> None:
        """Goes on with what a compiled loop made of the settled statistics."""
        assert not self._pending
        self._statistics = statistics


def _give_back() -> None:
    """What arrays of many sizes leave between them, to the system: half as much again as what is in
    use, of a model that fills hundreds of megabytes. A C library without such a call keeps it."""
    if (trim := _trim()) is not None:
        trim(0)


@functools.cache
def _trim() -> Callable | None:
    try:
        return ctypes.CDLL(None).malloc_trim  # glibc's
    except (AttributeError, OSError, TypeError):
        return None


@functools.lru_cache(maxsize=8)
def _idle(integers: Any) -> Note:
    """A note of nothing, of a lane whose floats are as wide as these integers."""
    often, seldom = np.zeros(PARTS, integers), np.zeros(PARTS, np.int64)
    tally = Tally(often, often, often, seldom, seldom, seldom)
    return Note(tally, samples=np.zeros((5, SAMPLE)), about=np.zeros(ABOUT))


def _take_all(state: Statistics, rows: Any, notes: Sequence[Note]) -> Statistics:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *notes)
    new = jax.vmap(measured)(stacked, state.formats[rows])

    def one(state, x):
        return added(state, *x), None

    return lax.scan(one, state, (rows, *new))[0]


@functools.lru_cache(maxsize=64)
def _taker(rows: int, integers: Any) -> Callable:
    """``_take_all`` for statistics of so many rows, compiled once: under ``jit`` it would be again
    for each context that an equation was traced in."""
    example = blank(np.zeros((rows, WIDTH))), np.zeros(BATCH, np.int64), (_idle(integers),) * BATCH
    return jax.jit(_take_all, donate_argnums=0).lower(*example).compile()


@functools.lru_cache(maxsize=8192)
def _array(content: bytes) -> jax.Array:
    return jax.device_put(np.frombuffer(content))
