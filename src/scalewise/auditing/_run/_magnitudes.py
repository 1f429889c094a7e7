"""Delayed scaling in an audit: the magnitudes of operands in the steps of one run."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

import numpy as np

OPERANDS = 2  # of a contraction


@dataclasses.dataclass(eq=False)
class Magnitudes:
    """The largest magnitudes of contractions' operands in the steps of one run.

    As :class:`scalewise.autoscaling.AmaxHistory` keeps them, whose ``init`` records the first step
    once more.

    Attributes:
        length: how many steps are remembered.
        past: by an equation's path, for each step float64[2], the newest first.
        newest: the same of this step, over all visits of the equation.
    """

    length: int
    past: dict[tuple[int, ...], collections.deque[np.ndarray]] = dataclasses.field(
        default_factory=dict
    )
    newest: dict[tuple[int, ...], np.ndarray] = dataclasses.field(default_factory=dict)

    def restart(self) -> None:
        self.past, self.newest = {}, {}

    def of(self, path: tuple[int, ...]) -> np.ndarray:
        """Returns the largest magnitude of each operand in earlier steps; 0 without one."""
        return np.max(self.past[path], axis=0) if path in self.past else np.zeros(OPERANDS)

    def add(self, path: tuple[int, ...], found: Iterable[float]) -> None:
        """Records a visit of an equation; magnitudes that aren't finite don't count."""
        sizes = np.nan_to_num(np.asarray(found, np.float64), nan=0.0, posinf=0.0)
        self.newest[path] = np.maximum(self.newest.get(path, 0.0), sizes)

    def next_step(self) -> None:
        for path, found in self.newest.items():
            if path not in self.past:
                self.past[path] = collections.deque([found], maxlen=self.length)
            self.past[path].appendleft(found)
        self.newest = {}
