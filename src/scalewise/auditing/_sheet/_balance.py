"""The pass backwards: multipliers of all values, and the shares of all roundings."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ...interpret import Equation, is_float
from ...primitives import having
from .._tape._cells import At, Cell, Entry, Leaf, inner, size
from .._tape._secants import copied

NOISE = 1e-12  # of the functional: what float64's own rounding leaves of one operation
CANCELS = 1e3  # from this factor an operation's own error cancels the one that it is given
HIDDEN_ERROR, HIDDEN_SHARE = 0.5, 0.01  # of a branch that is wrong where no output shows it
ADDS, WHOLE = having("adds"), having("whole")

Key = tuple[Equation | Leaf, str]  # what is charged, and the cause


@dataclasses.dataclass(eq=False)
class Balance:
    """The shares of a functional, as the pass backwards finds them.

    Attributes:
        shares: by equation or leaf, and by cause, in units of the functional.
        iterations: by the outermost loop's line, and iteration.
        total: the functional.
        tape: what the pass read.
    """

    tape: Sequence[Entry]
    total: float
    smallest_normal: float
    top: float
    shares: dict[Key, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    iterations: dict[tuple[str, int], float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )

    def charge(self, what: Equation | Leaf, cause: str, share: float, entry: Entry | None) -> None:
        if share:
            self.shares[what, cause] += share
            if entry is not None and entry.iteration is not None:
                self.iterations[entry.iteration] += share

    @property
    def residual(self) -> float:
        """How far the shares' sum is from the functional, relative to it."""
        return abs(sum(self.shares.values()) - self.total) / abs(self.total) if self.total else 0.0

    def hidden(self) -> list[Equation]:
        """Returns the operations that are wrong by half, with a share of the outputs' error."""
        by_equation: dict[Equation | Leaf, float] = collections.defaultdict(float)
        for (what, _), share in self.shares.items():
            by_equation[what] += share
        least = HIDDEN_SHARE * abs(self.total)
        return [e for e in wrong_by_half(self.tape) if abs(by_equation[e]) > least]


def wrong_by_half(tape: Sequence[Entry]) -> list[Equation]:
    """Returns the operations whose own rounding makes half of a result, the last first."""
    found: dict[Equation, None] = {}
    for entry in reversed(tape):
        equation = entry.operation.equation
        if equation not in found and any(_is_wrong(entry, y) for y in entry.outs):
            found[equation] = None
    return list(found)


def _is_wrong(entry: Entry, y: Cell) -> bool:
    """Returns whether an operation's own rounding makes half of its result, in norm."""
    rounds = y.rounds and entry.operation.pull is not copied
    if not rounds or not any(map(is_float, entry.operation.equation.out_avals)):
        return False
    return 0 < HIDDEN_ERROR * size(y.middle) <= size(y.end - y.middle)


@dataclasses.dataclass(eq=False)
class Bars:
    """Multipliers by cell, apart for what reaches the outputs by a decision alone."""

    cells: dict[int, Cell] = dataclasses.field(default_factory=dict)
    plain: dict[int, Any] = dataclasses.field(default_factory=dict)
    decided: dict[int, Any] = dataclasses.field(default_factory=dict)

    def of(self, decided: bool) -> dict[int, Any]:
        return self.decided if decided else self.plain

    def add(self, x: Cell, bar: Any, decided: bool) -> None:
        table, key = self.of(decided), id(x)
        self.cells[key] = x
        if isinstance(bar, At):
            if key not in table:
                table[key] = np.zeros(x.shape, np.result_type(bar.bar, np.float64))
            table[key][bar.index] += bar.bar
        else:
            # an array of its own, to which single elements can be added
            table[key] = np.array(bar) if key not in table else table[key] + bar


def balance(
    tape: Sequence[Entry], seeds: Iterable[tuple[Cell, Any]], smallest_normal: float, top: float
) -> Balance:
    """Returns the shares of a functional: ``sum(bar * (low - reference))`` over the seeds.

    Every cell gets the sum of the multipliers that the operations that read it pull back. An
    operation's share is the product of its results' multipliers and their own rounding.
    """
    seeds, bars = list(seeds), Bars()
    total = sum(inner(bar, x.end - x.start) for x, bar in seeds)
    found = Balance(tape, total, smallest_normal, top)
    for x, bar in seeds:
        bars.add(x, np.broadcast_to(bar, x.shape), False)
    for entry in reversed(tape):
        for decided in (False, True):
            table = bars.of(decided)
            given = [table.pop(id(y), None) for y in entry.outs]
            if any(b is not None for b in given):
                _settle(found, bars, entry, given, decided)
    for decided in (False, True):
        for key, bar in bars.of(decided).items():
            x = bars.cells[key]
            if x.leaf is not None and x.differs:
                found.charge(x.leaf, x.leaf.cause, inner(bar, x.end - x.start), None)
    return found


def _settle(found: Balance, bars: Bars, entry: Entry, given: list[Any], decided: bool) -> None:
    equation, carried = entry.operation.equation, 0.0
    for i, (y, bar) in enumerate(zip(entry.outs, given, strict=True)):
        if bar is None or not y.differs:
            continue
        if y.rounds:
            given[i] = bar = _made(found, entry, y, bar, decided)
        carried += inner(bar, y.middle - y.start)
    given = [np.zeros(y.shape) if b is None else b for y, b in zip(entry.outs, given, strict=True)]
    passed = 0.0
    if any(x.differs for x in entry.ins) and any(np.any(b) for b in given):
        turns = any(not y.is_float for y in entry.outs) or equation.name in WHOLE
        turns = turns and entry.operation.pull is not copied and any(x.is_float for x in entry.ins)
        pulled = entry.operation.pull(entry, given, found.top)
        for x, bar in zip(entry.ins, pulled, strict=True):
            if bar is None or not x.differs:
                continue
            at = (bar.bar, x.end[bar.index] - x.start[bar.index]) if isinstance(bar, At) else None
            share = inner(*at) if at else inner(bar, x.end - x.start)
            passed += share
            if x.leaf is not None and not x.leaf.name:  # a literal has no line of its own
                found.charge(equation, "constant", share, entry)
            else:
                bars.add(x, bar, decided or turns)
    if abs(carried - passed) > NOISE * abs(found.total):
        found.charge(equation, "unexplained", carried - passed, entry)


def _made(found: Balance, entry: Entry, y: Cell, bar: Any, decided: bool) -> Any:
    """Charges an operation for its own rounding; returns the multiplier of its exact results.

    Where a rounding cancels nearly all of the error that is carried in, no slope makes sense: each
    of the two gets what is left in proportion to its size.
    """
    operation = entry.operation
    equation, made, given = operation.equation, y.end - y.middle, y.middle - y.start
    parts = np.real(bar * made)
    whole = np.abs(made) + np.abs(given)
    cancels = whole > CANCELS * np.abs(made + given)
    if np.any(cancels):
        left = np.real(bar * (made + given)) / np.where(cancels, whole, 1.0)
        parts = np.where(cancels, left * np.abs(made), parts)
        safe = np.where(given != 0, given, 1.0)
        bar = np.where(cancels & (given != 0), left * np.abs(given) / safe, bar)
    parts = np.array(parts)
    for cause, mask in _events(entry, y, found.smallest_normal) if not decided else ():
        if mask.any():
            found.charge(equation, cause, float(np.sum(parts[mask])), entry)
            parts[mask] = 0.0
    found.charge(equation, "decision" if decided else "rounding", float(np.sum(parts)), entry)
    return bar


def _events(entry: Entry, y: Cell, smallest_normal: float) -> Iterator[tuple[str, np.ndarray]]:
    """Yields where a result is beyond the format, flushed or swamped, by cause."""
    low, exact = np.asarray(y.low), np.asarray(y.exact)
    if not (finite := np.isfinite(low)).all():
        yield "overflow", ~finite & np.isfinite(exact)
    size = np.abs(exact)
    yield "underflow", (size < smallest_normal) & (np.abs(y.end - y.middle) > 0.5 * size)
    if entry.operation.rounds_each and low.dtype.kind == "f":
        yield "swamping", low != exact
    elif entry.operation.equation.name in ADDS and entry.operation.pull is not copied:
        a, b = (np.asarray(x.low) for x in entry.ins)
        unchanged = ((low == a) & (b != 0)) | ((np.abs(low) == np.abs(b)) & (a != 0))
        yield "swamping", unchanged & (low != exact)
