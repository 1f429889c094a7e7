"""What the balance sheet explains: the errors of the outputs, of gradients and of changes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...formats import Format
from ...interpret import Program, is_inexact
from .._run._changes import carried
from .._run._outcome import Floors, OutputError, norm
from .._tape._cells import Cell, Entry, Node, inner, is_key
from .._thresholds import CHANGE_LOST, FEW_DECIDED, MANY_DECIDED, limit_of, unusable

CHANGE_NOISE = 1e-12  # of an array: a change that is the reference run's rounding
NEGLIGIBLE = 1e-6  # an output that is this small beside the largest one is measured by that


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """One functional: the sum of the products of the seeds and the cells' differences.

    Attributes:
        name: what it is of: "outputs", "loss and gradients", or an output's path.
        non_finite: how many numbers aren't finite where the reference run's are; the seeds are of
            these alone then.
        error: otherwise, the relative error; of decisions, the share of elements that differ.
        limit: the error from which it is wrong.
        seeds: the cells, each with its multiplier.
        is_change: whether it is of a carried array's change.
        is_part: whether it is of one of several outputs, which "outputs" has too.
    """

    name: str
    non_finite: int
    error: float
    limit: float
    seeds: Sequence[tuple[Cell, Any]]
    is_change: bool = False
    is_part: bool = False

    @property
    def fails(self) -> bool:
        return self.non_finite > 0 or self.error >= self.limit

    @property
    def total(self) -> float:
        return sum(inner(bar, x.end - x.start) for x, bar in self.seeds)


def stages(
    program: Program, arguments: Sequence[Node], outputs: Sequence[Node], tape: Iterable[Entry],
    floors: Floors, least: Mapping[int, float], fmt: Format, *, trained: bool, scaled: bool,
) -> list[Stage]:  # fmt: skip
    """Returns the functionals, in the order in which a wrong one explains those behind it.

    Of a training step, they are its loss and gradients, then the change of each carried array, then
    the outputs. Of another program, its outputs, then the changes of what the next call gets.

    Args:
        least: by a float output's position, the least norm that its error is relative to.
        fmt: the format.
        scaled: whether operands of products alone have it, with scales.
    """
    eps = float(fmt.eps)
    floats = [x.cell for x, a in zip(outputs, program.out_avals, strict=True) if is_inexact(a)]
    given = [x.cell for x, a in zip(arguments, program.in_avals, strict=True) if is_inexact(a)]
    names = [p for p, a in zip(program.paths, program.out_avals, strict=True) if is_inexact(a)]
    kept = carried(program)
    every = [
        _Part(x, _compared(floors, i, x), max(_floor(floors, i), least.get(i, 0.0)))
        for i, x in enumerate(floats)
    ]
    limit, found = limit_of(fmt, scaled=scaled), []
    read = _gradients(tape) if trained else []
    if read and kept:
        replaced = {x.output for x in kept}
        first = [x for i, x in enumerate(every) if i not in replaced]
        # a few elements whose activation is decided otherwise make an error of many roundings
        most = max(limit, unusable(fmt.precision))
        found.append(_stage("loss and gradients", [*first, *read], most))
    for own in kept:
        mask = _compared(floors, own.output, floats[own.output])
        changed = _change(names[own.output], floats[own.output], given[own.argument], mask, eps)
        found += [changed] if changed is not None else []
    outputs_first = not found or found[0].name != "loss and gradients"
    if floats:
        found.insert(0 if outputs_first else len(found), _stage("outputs", every, limit))
    for name, own in zip(names, every, strict=True) if len(every) > 1 else ():
        found.append(dataclasses.replace(_stage(name, [own], limit), is_part=True))
    decided = [
        _Decided(x.cell, ~np.broadcast_to(floors.undecided.get(path, False), x.cell.shape))
        for x, path, a in zip(outputs, program.paths, program.out_avals, strict=True)
        if not is_inexact(a) and not is_key(x.cell.low)
    ]
    if floats:  # others may be one off
        decided = [x for x in decided if x.compared.size >= MANY_DECIDED]
    if decided:
        largest = max(int(x.compared.sum()) for x in decided)
        few, limit = FEW_DECIDED / max(largest, 1), unusable(fmt.precision)
        found.append(_decisions(decided, limit if floats or few >= limit else 1.01 * few))
    return found


def chosen(found: Sequence[Stage]) -> Stage | None:
    """Returns the stage that a balance sheet explains: the first one that fails, of failing changes
    the worst; the outputs if none does."""
    changes = [x for x in found if x.fails and x.is_change]
    whole = [x for x in found if not x.is_change and not x.is_part]
    if whole and whole[0].fails:
        return whole[0]
    if changes:
        return max(changes, key=lambda x: (x.non_finite, x.error))
    return next((x for x in reversed(whole) if x.seeds), None)


def _compared(floors: Floors, output: int, x: Cell) -> np.ndarray:
    everywhere = np.ones(x.shape, bool)
    masked = floors.numbers.get(output)
    if masked is None:
        return everywhere
    masked = np.reshape(masked, (*everywhere.shape, -1)) if masked.size else masked
    return ~np.any(masked, -1) if masked.size else everywhere


def _floor(floors: Floors, output: int) -> float:
    return floors.norms[output] if floors.norms else 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    cell: Cell
    compared: np.ndarray
    floor: float

    @property
    def lost(self) -> np.ndarray:
        x = self.cell
        return ~np.isfinite(x.low) & np.isfinite(x.reference)

    @property
    def finite(self) -> np.ndarray:
        return np.isfinite(self.cell.low) & np.isfinite(self.cell.reference) & self.compared


def _lost(name: str, parts: Sequence[_Part]) -> Stage | None:
    """Returns the stage of the numbers that aren't finite, each with the same weight."""
    count = sum(int(np.sum(x.lost)) for x in parts)
    if not count:
        return None
    seeds = []
    for x in parts:
        if x.lost.any():
            d = np.where(x.lost, x.cell.end - x.cell.start, 0.0)
            seeds.append((x.cell, np.where(d != 0, 1.0 / np.where(d != 0, d, 1.0), 0.0) / count))
    return Stage(name, count, math.inf, 0.0, seeds)


def _stage(name: str, parts: Sequence[_Part], limit: float) -> Stage:
    """Returns the root mean square of the relative errors, as a sum over the differences."""
    lost = _lost(name, parts)
    if lost is not None:
        return lost
    differences = [np.where(x.finite, x.cell.end - x.cell.start, 0.0) for x in parts]
    norms = [norm(np.where(x.finite, x.cell.start, 0.0)) for x in parts]
    sizes = [n / math.sqrt(max(d.size, 1)) for n, d in zip(norms, differences, strict=True)]
    largest = max(sizes, default=0.0) or 1.0
    scales = [
        max(x.floor, n if s > NEGLIGIBLE * largest else largest * math.sqrt(max(d.size, 1)))
        for x, n, s, d in zip(parts, norms, sizes, differences, strict=True)
    ]
    relative = [norm(d) / scale for d, scale in zip(differences, scales, strict=True)]
    error = math.sqrt(sum(x * x for x in relative) / max(len(parts), 1))
    seeds = [
        (x.cell, np.conj(d) / (scale * scale * len(parts) * error))
        for x, d, scale in zip(parts, differences, scales, strict=True) if error and d.any()
    ]  # fmt: skip
    return Stage(name, 0, error, limit, seeds)


@dataclasses.dataclass(frozen=True, eq=False)
class _Decided:
    cell: Cell
    compared: np.ndarray


def _decisions(parts: Sequence[_Decided], limit: float) -> Stage:
    """Returns the share of elements that differ, over the outputs of integers and predicates."""
    seeds = []
    for x in parts:
        if x.cell.differs:
            d = np.where(x.compared, x.cell.end - x.cell.start, 0)
            each = np.where(d != 0, 1 / np.where(d != 0, d, 1), 0)
            seeds.append((x.cell, each / max(int(x.compared.sum()), 1) / len(parts)))
    found = Stage("decisions", 0, 0.0, limit, seeds)
    error = found.total
    return dataclasses.replace(found, error=error, limit=limit if error else math.inf)


def _change(name: str, new: Cell, old: Cell, compared: np.ndarray, eps: float) -> Stage | None:
    lost = _lost(name, [_Part(new, compared, 0.0)])
    if lost is not None:
        return dataclasses.replace(lost, is_change=True)
    change = np.where(compared, new.start - old.start, 0.0)
    difference = np.where(compared, (new.end - old.end) - (new.start - old.start), 0.0)
    size, error = norm(change), norm(difference)
    if size <= CHANGE_NOISE * norm(old.start) or not error:
        return None
    bar = np.conj(difference) / (error * size)
    return Stage(name, 0, error / size, CHANGE_LOST, [(new, bar), (old, -bar)], True)


def gradient_error(tape: Iterable[Entry]) -> OutputError:
    """Returns the error of a training step's gradients as one vector."""
    read = _gradients(tape)
    lost = sum(int(np.sum(x.lost)) for x in read)
    error, size = (
        math.hypot(*(norm(np.where(x.finite, y, 0.0)) for x in read for y in [of(x.cell)]))
        for of in (lambda x: x.end - x.start, lambda x: x.start)
    )
    return OutputError(lost, error / (size or 1.0))


def _gradients(tape: Iterable[Entry]) -> list[_Part]:
    """Returns what the update of a training step reads of the backward pass."""
    backward: set[int] = set()
    found: dict[int, Cell] = {}
    for entry in tape:
        direction = entry.operation.equation.direction
        if direction == "backward":
            backward |= {id(y) for y in entry.outs}
        elif direction == "update":
            found |= {id(x): x for x in entry.ins if id(x) in backward and x.is_float}
    return [_Part(x, np.ones(x.shape, bool), 0.0) for x in found.values()]
