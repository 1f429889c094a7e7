"""A program under audit: traced once, then run as often as fixes are to be tried."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ...interpret import Equation, Program, is_float, lifted
from ._ahead import compile_ahead
from ._lane import nominal, number_by_number
from ._lanes import Rounded, Wide
from ._ledger import Ledger
from ._lockstep import Lockstep
from ._loss_scale import carrying
from ._pair import shaped
from ._rounding import as_row
from ._rows import Row, rows_of
from ._statistics import Statistics


@dataclasses.dataclass(frozen=True, order=True)
class Error:
    """How far the low outputs are from the shadow's; ordered, worst last.

    Attributes:
        broken: numbers of the outputs that aren't finite where the shadow's are.
        relative: root mean square over the float outputs of ``||low - shadow|| / ||shadow||``, what
            isn't finite left out.
    """

    broken: int
    relative: float

    def __float__(self) -> float:
        return math.inf if self.broken else self.relative

    def __str__(self) -> str:
        return f"{self.broken:,} not finite" if self.broken else f"{self.relative:.2g}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One run: what was noted, and the error of each output.

    Attributes:
        seen, statistics: the equations, and what was noted of each.
    """

    seen: tuple[Equation, ...]
    statistics: Statistics
    error: Error
    outputs: tuple[tuple[str, Error], ...]
    shadow_broken: tuple[str, ...]
    low: tuple[Any, ...]
    shadow: tuple[Any, ...]

    @functools.cached_property
    def rows(self) -> list[Row]:
        """What was noted, by equation; of most trials nobody asks."""
        return rows_of(self.seen, self.statistics)


@dataclasses.dataclass(eq=False)
class Session:
    """A traced program and its two lanes.

    Attributes:
        program: with its arguments.
        low, shadow: interpretations.
        steps: how often the program runs, its first result in place of its first argument; each
            lane goes its own way.
        batches: of each step, the arrays that take the place of the second argument's; () if they
            stay the same.
        runs: how many were made.
        first: the arguments as pairs, once they are needed.
    """

    program: Program
    low: Any
    shadow: Wide
    steps: int = 1
    batches: Sequence[Sequence[Any]] = ()
    runs: int = 0
    first: list[Any] | None = None
    lockstep: Lockstep = dataclasses.field(init=False)

    def __post_init__(self):
        self.lockstep = Lockstep(self.low, self.shadow)

    @property
    def carried(self) -> int:
        """How many arrays the first argument has."""
        return sum(path.startswith("[0]") for path in self.program.arguments)

    def _inputs(self, step: int, state: list[Any], lockstep: Lockstep) -> list[Any]:
        """The arguments of a step, as pairs."""
        if self.first is None:
            self.first = lifted(self.program, self.lockstep, self.program.arrays)
        n = len(state)
        if step and self.batches:
            avals, batch = self.program.in_avals[n:], self.batches[step]
            with lockstep.context():
                pairs = [
                    lockstep.lift(x, a) if is_float(a) else x
                    for x, a in zip(batch, avals, strict=False)
                ]
            return [*state, *pairs, *self.first[n + len(batch) :]]
        return [*state, *self.first[n:]]

    def with_lane(self, low: Any) -> Session:
        """The same program in another low lane; its runs count here as well."""
        self.runs += 1
        return Session(self.program, low, self.shadow, self.steps, self.batches)

    @property
    def adjustable(self) -> bool:
        """Whether each equation's format can be chosen, so that fixes can be tried."""
        return isinstance(self.low, Rounded)

    @functools.cached_property
    def carrying(self) -> frozenset[int]:
        """The rows that a loss scale would multiply, once there was a run."""
        if not any(e.direction == "backward" for e in self.lockstep.seen):
            return frozenset()
        paths = carrying(self.program)
        return frozenset(self.lockstep.rows[path] for path in paths if path in self.lockstep.rows)

    def formats(self) -> np.ndarray:
        """The table of formats, all of them the low lane's own (see ``as_row``); of a policy or
        recipe the narrow one, whose units errors are measured in."""
        own = as_row(nominal(self.low), getattr(self.low, "saturate", False))
        return np.tile(own, (max(self.program.equations, 1), 1))

    def run(
        self,
        formats: np.ndarray | None = None,
        constants: Mapping[float, float] | None = None,
    ) -> Outcome:
        """Both lanes over the program.

        Args:
            formats: of each row's results; None for the low lane's own.
            constants: literals that the low lane has otherwise (see :class:`Lockstep`).
        """
        self.runs += 1
        lockstep = self.lockstep
        if constants:  # loops have their literals compiled in
            lockstep = dataclasses.replace(lockstep, constants=dict(constants), kept={})
        with jax.enable_x64(True):
            ledger = Ledger(self.formats() if formats is None else formats)
        if not lockstep.plans:
            compile_ahead(self.program, lockstep, ledger)
        values: list[Any] = []
        for step in range(self.steps):
            state = values[: self.carried] if step else []
            inputs = self._inputs(step, state, lockstep)
            values = lockstep.walked(self.program, ledger, inputs)[1]
        with jax.enable_x64(True):
            statistics = ledger.settle()
        return self._outcome(tuple(lockstep.seen), statistics, values)

    def _outcome(self, seen, statistics, values) -> Outcome:
        pairs = [
            (path, shaped(jax.tree.map(np.asarray, v) if number_by_number(self.low) else v, a), a)
            for path, v, a in zip(self.program.paths, values, self.program.out_avals, strict=True)
            if is_float(a)
        ]
        lows = tuple(_plain(self.low, v.low, a) for _, v, a in pairs)
        shadows = tuple(v.shadow for _, v, _ in pairs)
        table = [_distance(y, s) for y, s in zip(lows, shadows, strict=True)]
        errors = [Error(int(n), _root(noise, signal)) for noise, signal, n, _ in table]
        total = math.sqrt(sum(min(e.relative, 1e150) ** 2 for e in errors) / max(len(errors), 1))
        return Outcome(
            seen=seen,
            statistics=statistics,
            error=Error(sum(e.broken for e in errors), total),
            outputs=tuple((p, e) for (p, _, _), e in zip(pairs, errors, strict=True)),
            shadow_broken=tuple(p for (p, _, _), r in zip(pairs, table, strict=True) if r[3]),
            low=lows,
            shadow=shadows,
        )


def _root(noise: float, signal: float) -> float:
    if noise == 0:
        return 0.0
    return math.sqrt(noise / signal) if signal else math.sqrt(noise)


def _plain(low: Any, value: Any, aval: Any) -> Any:
    return value if isinstance(low, Rounded) else low.lower(value, aval)


def _distance(low: Any, shadow: Any) -> tuple[float, float, int, int]:
    """Of an output: squared error, squared size, numbers broken, NaNs of the shadow."""
    y, s = (np.asarray(x).ravel() for x in (low, shadow))  # the shadow float32 at least
    with np.errstate(invalid="ignore", over="ignore"):
        noise, signal = _square(y - s), _square(s)
    if math.isfinite(noise) and math.isfinite(signal):
        return noise, signal, 0, 0
    y, s = y.astype(np.float64), s.astype(np.float64)
    whole = np.isfinite(y) & np.isfinite(s)
    noise = _square(np.where(whole, y, 0.0) - np.where(whole, s, 0.0))
    broken = int(np.sum(~np.isfinite(y) & np.isfinite(s)))
    return noise, _square(np.where(whole, s, 0.0)), broken, int(np.sum(np.isnan(s)))


def _square(x: np.ndarray) -> float:
    x = x.astype(np.float64, copy=False)
    return float(np.dot(x, x))
