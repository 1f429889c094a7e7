"""``Setting``: what a run in one format may choose."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from .._run._interpretations import FP32_MAX
from .._run._rounding import FP32_PARAMS, FP64_PARAMS, scale_params
from .._run._session import Outcome, Session


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a run in one format may choose: the format of each equation, and literals replaced."""

    formats: np.ndarray  # a table with a format's parameters for each equation
    constants: tuple[tuple[float, float], ...] = ()  # pairs (old, new)
    double: bool = False  # whether an operation is widened to float64 rather than float32

    @property
    def word(self) -> str:
        return "float64" if self.double else "float32"

    def run(self, session: Session) -> Outcome:
        return session.run(self.formats, dict(self.constants))

    def with_format(self, indices: Sequence[int], params: np.ndarray) -> Setting:
        formats = self.formats.copy()
        formats[list(indices)] = params
        return dataclasses.replace(self, formats=formats)

    def widened(self, indices: Sequence[int]) -> Setting:
        return self.with_format(indices, FP64_PARAMS if self.double else FP32_PARAMS)

    def scaled(self, indices: Sequence[int], power: int) -> Setting:
        formats = self.formats.copy()
        for index in indices:
            formats[index] = scale_params(formats[index], power)
        return dataclasses.replace(self, formats=formats)

    def without_limits(self, limits: Sequence[float]) -> Setting:
        setting = self
        for number in limits:
            setting = setting.with_constant(number, math.copysign(FP32_MAX, number))
        return setting

    def with_constant(self, old: float, new: float) -> Setting:
        return dataclasses.replace(self, constants=(*self.constants, (old, new)))
