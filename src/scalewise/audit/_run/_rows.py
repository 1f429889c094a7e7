"""What was noted of an equation, by name, beside where the user wrote it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...interpret import Equation, is_float
from ._statistics import COUNTS, FIRST, PEAKS, SUMS, TOPS, Statistics


@dataclasses.dataclass(frozen=True)
class Row:
    """One equation's statistics over all turns of the loops around it.

    Attributes:
        index: its place in the program, as it was first met.
        primitive, shape, dtype: of its (first float) result.
        file, line, function: the user's code; None, 0, "" where JAX doesn't know.
        caller: ``path:line`` of the user's own code that called a library's ``file``; "" if
            ``file`` is none.
        scope: the name stack.
        direction: "forward", "backward" or "optimizer".
        looped: whether it stands in a loop.
        numbers: by name, see ``_statistics``.
        histogram: counts of the shadow's exponents from ``LOWEST`` up.
    """

    index: int
    primitive: str
    shape: tuple[int, ...]
    dtype: str
    file: str | None
    line: int
    function: str
    caller: str
    scope: str
    direction: str
    looped: bool
    numbers: dict[str, float]
    histogram: tuple[int, ...]

    def __getitem__(self, name: str) -> float:
        return self.numbers[name]

    @property
    def short(self) -> str:
        """``file.py:12``."""
        return f"{Path(self.file).name}:{self.line}" if self.file else "unknown line"

    @cached_property
    def introduced(self) -> float:
        """Error made here, relative (root mean square) to the exact result of the same inputs."""
        return _ratio(self["introduced2"], self["exact2"])

    @cached_property
    def inherited(self) -> float:
        """Error against the shadow, its own and all that came with the inputs, relative."""
        return _ratio(self["inherited2"], self["shadow2"])

    @property
    def sqnr(self) -> float:
        """Signal to noise against the shadow, in dB; -inf where no number was finite in both."""
        if self["sampled"] and not self["compared"]:
            return -math.inf
        return -20 * math.log10(self.inherited) if self.inherited else math.inf

    @property
    def drift(self) -> float:
        """Bias of the rounding errors made here: -1 or 1 if all go one way, 0 if they cancel."""
        return self["drift"] / self["drift_size"] if self["drift_size"] else 0.0

    def share(self, name: str) -> float:
        """A count as a share of all numbers (of all additions, for what concerns additions)."""
        whole = self["added"] if name in ("swamped", "cancelled") else self["elements"]
        return self[name] / whole if whole else 0.0


def _ratio(noise: float, signal: float) -> float:
    if noise == 0:
        return 0.0
    return math.sqrt(noise / signal) if signal else math.inf


def rows_of(seen: Sequence[Equation], state: Statistics) -> list[Row]:
    """The rows of all equations that were met at least once."""
    counts, sums, tops = (np.asarray(x).tolist() for x in (state.counts, state.sums, state.tops))
    histogram = np.asarray(state.histogram).astype(int).tolist()
    trained = any(e.direction == "backward" for e in seen)
    rows = []
    for i, equation in enumerate(seen):
        if not counts[i][0]:
            continue
        numbers: dict[str, Any] = dict(zip(COUNTS, counts[i][:FIRST], strict=True))
        numbers["first"] = counts[i][FIRST]
        numbers |= zip(PEAKS, counts[i][FIRST + 1 :], strict=True)
        numbers |= zip(SUMS, sums[i], strict=True)
        numbers |= zip(TOPS, tops[i], strict=True)
        rows.append(_row(i, equation, trained, numbers, histogram[i]))
    return rows


def _row(i: int, equation: Equation, trained: bool, numbers: dict, histogram: list[int]) -> Row:
    file, line, function = equation.source or (None, 0, "")
    aval = next(a for a in equation.out_avals if is_float(a))
    return Row(
        index=i,
        primitive=equation.name,
        shape=tuple(aval.shape),
        dtype=str(aval.dtype),
        file=file,
        line=line,
        function=function,
        caller="{}:{}".format(*equation.caller) if equation.caller else "",
        scope=equation.scope,
        direction=direction_of(equation, trained),
        looped=numbers["visits"] > 1,
        numbers=numbers,
        histogram=tuple(histogram),
    )


def direction_of(equation: Equation, trained: bool) -> str:
    """``"optimizer"`` is what stands outside of a differentiated function, if there is one."""
    if equation.direction == "update":
        return "optimizer" if trained else "forward"
    return equation.direction
