"""Programs whose products a device's matrix units compute, and all else as it is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..devices import MatrixUnits
from ..interpret import Applied, Equation, Interpretation, State, Value, unit_for, unit_result


@dataclasses.dataclass(frozen=True)
class OnDevice(Interpretation):
    units: MatrixUnits

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        unit = unit_for(equation, self.units)
        if unit is None:
            return super().apply(state, equation, inputs)
        wide = [x.astype(np.float64 if x.dtype == np.float64 else np.float32) for x in inputs]
        return state, [unit_result(equation, unit, wide).astype(equation.out_avals[0].dtype)]
