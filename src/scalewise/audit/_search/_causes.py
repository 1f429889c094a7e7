"""Where an error comes from: the recorded operations that a result is computed from."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .._run._equation_statistics import EquationStatistics
from .._run._gradients import Operands

DEPTH = 12  # operations that a search goes back
CARRIED = 3.0  # a result's error is carried in, rather than made, from this multiple of its own


class Causes:
    """The dataflow between recorded equations, with their statistics.

    Attributes:
        operands: by an equation's index and operand, the equations that the operand comes from.
        equations: statistics by index.
    """

    def __init__(self, operands: Operands, equations: Sequence[EquationStatistics]):
        self.operands = operands
        self.equations = {e.index: e for e in equations}

    def producers(self, index: int) -> list[EquationStatistics]:
        """Returns the equations that the operands of an equation come from."""
        found = dict.fromkeys(i for operand in self.operands.get(index, ()) for i in operand)
        return [self.equations[i] for i in found if i in self.equations and i != index]

    def amplification(self, equation: EquationStatistics) -> float:
        """Returns a result's error relative to the largest error among its operands."""
        carried = max((e.inherited for e in self.producers(equation.index)), default=0.0)
        return equation.inherited / carried if 0 < carried < math.inf else 0.0

    def before(self, index: int) -> list[EquationStatistics]:
        """Returns the equations that made an error on the way to an equation, the nearest first."""
        found: dict[int, EquationStatistics] = {}
        level = [index]
        for _ in range(DEPTH):
            new = {e.index: e for i in level for e in self.producers(i) if e.index not in found}
            found |= new
            level = list(new)
        return [e for e in found.values() if e.introduced and e.index != index]

    def path(self, index: int) -> list[EquationStatistics]:
        """Returns how the largest error reached an equation, the equation itself first.

        Each equation's error is compared with the reference run's; the last one of the path made
        most of its own error.
        """
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
        """Returns the nearest equation that flushed numbers to zero on the way to an equation."""
        level, seen = [index], {index}
        for _ in range(DEPTH):
            before = {e.index: e for i in level for e in self.producers(i) if e.index not in seen}
            flushed = [e for e in before.values() if e["flushed"]]
            if flushed:
                return max(flushed, key=lambda e: e.share("flushed"))
            seen |= before.keys()
            level = list(before)
        return None


def _carried(equation: EquationStatistics) -> float:
    """Returns how much of a result is wrong; of a decision, the share that differs."""
    if equation["decided"]:
        return equation["differ"] / equation["decided"]
    return equation.inherited
