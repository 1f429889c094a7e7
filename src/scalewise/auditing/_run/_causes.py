"""Where an error comes from: the recorded operations that a result is computed from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .._thresholds import AMPLIFIED, CARRIED, DEPTH
from ._equation_statistics import EquationStatistics, Operands


class Causes:
    """The dataflow between recorded equations in all iterations of loops, and their statistics."""

    def __init__(self, operands: Operands, equations: Sequence[EquationStatistics]):
        self.operands = operands  # by index and operand, the equations that the operand comes from
        self.equations = {e.index: e for e in equations}

    def producers(self, index: int) -> list[EquationStatistics]:
        found = dict.fromkeys(i for operand in self.operands.get(index, ()) for i in operand)
        return [self.equations[i] for i in found if i in self.equations and i != index]

    def amplification(self, equation: EquationStatistics) -> float:
        if equation.adds_constant and not equation["cancelled"]:  # an epsilon may be replaced
            return 0.0
        if equation.inherited <= CARRIED * equation.introduced:  # made here
            return 0.0
        carried = max((e.inherited for e in self.producers(equation.index)), default=0.0)
        return equation.inherited / carried if 0 < carried < math.inf else 0.0

    def before(self, index: int) -> list[EquationStatistics]:
        found: dict[int, EquationStatistics] = {}
        level = [index]
        for _ in range(DEPTH):
            new = {e.index: e for i in level for e in self.producers(i) if e.index not in found}
            found |= new
            level = list(new)
        return [e for e in found.values() if e.introduced and e.index != index]

    def back(self, indices: Iterable[int], depth: float = math.inf) -> set[int]:
        """Returns the equations that some results come from, ``depth`` operations back."""
        level, found = set(indices), set()
        while level and depth > 0:
            level = {e.index for i in level for e in self.producers(i)} - found
            found, depth = found | level, depth - 1
        return found

    def amplified(
        self, indices: Iterable[int]
    ) -> tuple[EquationStatistics, EquationStatistics] | None:
        """Returns the equation whose error is amplified most, and the equation that amplifies it.

        None if no equation makes ``AMPLIFIED`` times as much error of what its operands carry.
        """
        start = set(indices)
        readers: dict[int, list[EquationStatistics]] = {}
        for e in self.equations.values():
            for before in self.producers(e.index):
                readers.setdefault(before.index, []).append(e)
        found: dict[int, tuple[EquationStatistics, EquationStatistics]] = {}
        level = {i: self.equations[i] for i in start}  # by index: where its error comes from
        for _ in range(DEPTH):
            new: dict[int, EquationStatistics] = {}
            for at, origin in level.items():
                for by in readers.get(at, ()):
                    worst = max(self.producers(by.index), key=_carried)
                    if by.index not in found and worst.index == at:
                        new[by.index] = self.equations[at] if at in start else origin
                        found[by.index] = new[by.index], by
            level = new
        steep = [x for x in found.values() if self.amplification(x[1]) >= AMPLIFIED]
        if not steep:
            return None
        made, by = max(steep, key=lambda x: self.amplification(x[1]))
        for _ in range(DEPTH):  # to where most of it is made
            before = self.producers(made.index)
            worst = max(before, key=_carried, default=made)
            if made.introduced * CARRIED >= made.inherited or not _carried(worst):
                break
            made = worst
        return made, by

    def path(self, index: int) -> list[EquationStatistics]:
        """Each equation's error is compared with the reference run's; the last one of the path made
        most of its own error."""
        at, found, seen = self.equations.get(index), [], {index}
        while at is not None and len(found) < DEPTH:
            found.append(at)
            if len(found) > 1 and at.inherited <= CARRIED * at.introduced:
                break
            before = [e for e in self.producers(at.index) if e.index not in seen]
            at = max(before, key=_carried, default=None)
            if at is None or not _carried(at):
                break
            seen.add(at.index)
        return found

    def flushed_before(self, index: int) -> EquationStatistics | None:
        """Returns the nearest equation whose flushed numbers make a result infinite or NaN: of a
        quotient, one that the divisor comes from."""
        level, seen = self.producers(index), {index}
        if self.equations[index].primitive == "div":
            divisor = self.operands.get(index, ((), ()))[1]
            level = [self.equations[i] for i in divisor if i in self.equations]
        for _ in range(DEPTH):
            before = {e.index: e for e in level if e.index not in seen}
            flushed = [e for e in before.values() if e["flushed"]]
            if flushed:
                return max(flushed, key=lambda e: e.share("flushed"))
            seen |= before.keys()
            level = [e for i in before for e in self.producers(i)]
        return None


def _carried(equation: EquationStatistics) -> float:
    """Returns how much of a result is wrong; of a decision, the share that differs."""
    if equation["decided"]:
        return equation["differ"] / equation["decided"]
    return equation.inherited
