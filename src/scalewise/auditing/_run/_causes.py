"""Where an error comes from: the recorded operations that a result is computed from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .._thresholds import CARRIED
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

    def back(self, indices: Iterable[int], depth: float = math.inf) -> set[int]:
        """Returns the equations that some results come from, ``depth`` operations back."""
        level, found = set(indices), set()
        while level and depth > 0:
            level = {e.index for i in level for e in self.producers(i)} - found
            found, depth = found | level, depth - 1
        return found
