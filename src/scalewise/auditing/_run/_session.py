"""A program under audit: traced once, then run once for each change that is tried."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from ...formats import FP32, Format
from ...interpret import Argument, Equation, Interpretation, Program, is_inexact
from ...rounding import FP32_PARAMS, format_params
from .._tape._arithmetic import Choice
from .._tape._both import TapedRun, run_both
from .._tape._cells import Node, is_key
from .._tape._interpretations import TableEmulation
from .._tape._loss_scale import loss_scaled_paths
from .._tape._specialize import Low, kind_of_run
from .._tape._statistics import is_discrete
from ._changes import Update, started_at_zero, updates, wrong
from ._dataflow import Dataflow, dataflow, sums
from ._outcome import ExactSums, Floors, Numbers, Outcome, OutputError, in_parts, norm


def new_code() -> dict[Hashable, Callable[..., Any]]:
    """Returns where an audit keeps its compiled code; the tests' audits share one."""
    return {}


@dataclasses.dataclass(eq=False)
class Session:
    """A traced program, and how it is run.

    Attributes:
        low: the interpretation of the low-precision run.
        wide: float32, or float64: roundings of this format are no error of the low-precision run.
        steps: how often the program is called; its first result is the next first argument, in
            each run.
        batches: for each step, those of the second argument.
        runs: how many there were.
        code: compiled code that the runs share.
        exact_sums: the run without the device's matrix units.
        recorded, indices: the equations that round or decide, in the order in which they first ran,
            and the place of each there, by its path.
        limits: literals that are the largest number of the program's own narrow dtype.
        before: the run whose steps later runs don't compute again.
    """

    program: Program
    low: Interpretation
    wide: Format = FP32
    steps: int = 1
    batches: Sequence[Sequence[ArrayLike]] = ()
    runs: int = 0
    code: dict[Hashable, Callable[..., Any]] = dataclasses.field(default_factory=lambda: new_code())
    floors: Floors = dataclasses.field(default_factory=Floors)
    exact_sums: ExactSums | None = None
    recorded: list[Equation] = dataclasses.field(default_factory=list)
    indices: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)
    limits: set[float] = dataclasses.field(default_factory=set)
    before: TapedRun | None = None
    # how many equations were recorded when the dataflow was found, and that
    known: tuple[int, Dataflow] | None = None

    @property
    def state_size(self) -> int:
        return sum(path.startswith("[0]") for path in self.program.arguments)

    @property
    def eps(self) -> float:
        return float(self.wide.eps)

    def with_low(self, low: Interpretation) -> Session:
        """Returns a session of the same program, which knows what this one does."""
        return dataclasses.replace(self, low=low, before=None)

    @property
    def dataflow(self) -> Dataflow:
        count = len(self.recorded)
        if self.known is None or self.known[0] != count:
            state = self.state_size if self.steps > 1 else 0
            self.known = count, dataflow(self.program, self.indices, state)
        return self.known[1]

    @functools.cached_property
    def sums(self) -> tuple[str, ...]:
        return sums(self.program)

    @property
    def kind(self) -> Low:
        return kind_of_run(self.low)

    @property
    def adjustable(self) -> bool:
        """Whether a run may choose the format of each equation."""
        return self.kind.run == "format"

    @functools.cached_property
    def loss_scaled(self) -> frozenset[int]:
        """The indices of the equations that a loss scale would multiply; needs a run before."""
        if not self.trained:
            return frozenset()
        indices = self.indices
        paths = (p[:n] for p in loss_scaled_paths(self.program) for n in range(1, len(p) + 1))
        return frozenset(indices[p] for p in paths if p in indices)  # of a step, its operation's

    def formats(self) -> np.ndarray:
        """Returns the parameters of each equation's format; NaN of those that never ran."""
        own = format_params(self.kind.fmt(self.low), getattr(self.low, "saturate", False))
        table = np.full((max(self.program.equations, 1), own.size), np.nan)
        for index, equation in enumerate(self.recorded):
            asked = self._asked_for(equation)
            table[index] = own if asked is None else asked
        return table

    def _asked_for(self, equation: Equation) -> np.ndarray | None:
        """Returns the format that the program itself asks for in an equation, if ``low`` keeps it
        (see :meth:`TableEmulation.own_params`)."""
        return self.low.own_params(equation) if isinstance(self.low, TableEmulation) else None

    def stays_wide(self, equation: Equation) -> bool:
        """Returns whether the program computes an equation in float32, and ``low`` keeps that."""
        return self._asked_for(equation) is FP32_PARAMS

    def run(
        self,
        formats: np.ndarray | None = None,
        constants: Mapping[float, float] | None = None,
        arrays: Sequence[Argument] | None = None,
    ) -> Outcome:
        self.runs += 1
        choice = Choice()
        if formats is not None:
            choice = Choice(formats, dict(self.indices), dict(constants or {}))
        made = run_both(
            self.program, self.low, self.steps, self.batches, choice, self.code, arrays,
            before=self.before,
        )  # fmt: skip
        self.limits |= made.limits
        for path, (equation, _) in made.visited.items():
            if path not in self.indices:
                self.indices[path] = len(self.recorded)
                self.recorded.append(equation)
        return self._outcome(made)

    def _outcome(self, made: TapedRun) -> Outcome:
        avals = self.program.out_avals
        pairs = [_both(x) for x, a in zip(made.outputs, avals, strict=True) if is_inexact(a)]
        paths = [p for p, a in zip(self.program.paths, avals, strict=True) if is_inexact(a)]
        error, flow = OutputError(0, 0.0), self.dataflow
        outcome = Outcome(
            recorded=tuple(self.recorded),
            made=made,
            dataflow=flow,
            origins=tuple(own for own, a in zip(flow.outputs, avals, strict=True) if is_inexact(a)),
            error=error,
            outputs=tuple((p, error) for p in paths),
            reference_nans=(),
            low=tuple(low for low, _ in pairs),
            reference=tuple(reference for _, reference in pairs),
            decisions=tuple(_decisions(self.program, made.outputs)),
            exact_sums=self.exact_sums,
        )
        return self.with_errors(outcome)

    def updates(self, outcome: Outcome) -> list[Update]:
        """Returns the changes of the state that the program carries from one call to the next."""
        both = state_of(self.program, outcome)
        return updates(self.program, outcome, *both, self.eps, self.floors)

    def started_at_zero(self, outcome: Outcome) -> dict[int, float]:
        """See :func:`started_at_zero`; of a training step."""
        _, references = state_of(self.program, outcome)
        return started_at_zero(self.program, references) if self.trained else {}

    def wrong_changes(self, outcome: Outcome) -> list[Update]:
        """Returns the changes that a training step gets wrong (see :func:`wrong`)."""
        return wrong(self.updates(outcome), self.floors.changes) if self.trained else []

    @property
    def trained(self) -> bool:
        """Whether the program has a backward pass; known after the first run."""
        return any(e.direction == "backward" for e in self.recorded)

    def with_errors(self, outcome: Outcome) -> Outcome:
        pairs = enumerate(zip(outcome.low, outcome.reference, strict=True))
        table = [_distance(*(self.floors.compared(i, x) for x in both)) for i, both in pairs]
        floors = np.array(self.floors.norms or np.zeros(len(table)))
        for i, least in self.started_at_zero(outcome).items():
            floors[i] = max(floors[i], least)
        errors = [
            OutputError(int(n), made / (max(size, floor) or 1.0))
            for (made, size, n, _), floor in zip(table, floors.tolist(), strict=True)
        ]
        if not any(e.non_finite for e in errors):
            for update in self.wrong_changes(outcome):
                relative = errors[update.output].relative
                errors[update.output] = OutputError(0, max(update.error, relative))
        paths = [path for path, _ in outcome.outputs]
        decided = tuple(
            _differ(x, self.floors.undecided.get(x[0]), x[0] in self.sums)
            for x in outcome.decisions
        )
        outcome = dataclasses.replace(outcome, decided=decided)
        return dataclasses.replace(
            outcome,
            error=OutputError.of(errors or outcome.decision_errors),
            outputs=tuple(zip(paths, errors, strict=True)),
            reference_nans=tuple(p for p, row in zip(paths, table, strict=True) if row[3]),
        )


def _both(x: Node) -> tuple[Numbers, Numbers]:
    return in_parts(x.cell.low), in_parts(x.cell.reference)


def state_of(program: Program, outcome: Outcome) -> tuple[list[Numbers], list[Numbers]]:
    """Returns the float arguments, in both runs."""
    given = zip(outcome.made.arguments, program.in_avals, strict=True)
    pairs = [_both(x) for x, a in given if is_inexact(a)]
    return [low for low, _ in pairs], [reference for _, reference in pairs]


def _decisions(
    program: Program, values: Sequence[Node]
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    for path, x, aval in zip(program.paths, values, program.out_avals, strict=True):
        if is_discrete(aval) and not is_key(x.cell.low):
            yield path, np.asarray(x.cell.low), np.asarray(x.cell.reference)


def _differ(
    decision: tuple[str, np.ndarray, np.ndarray], undecided: np.ndarray | None, is_sum: bool
) -> tuple[str, int, int]:
    """Returns an output's path, how many of its elements differ, and how many are compared; of sums
    how many of what they count."""
    path, low, reference = decision
    if undecided is not None:
        low, reference = low[~undecided], reference[~undecided]
    if not is_sum:
        return path, int(np.sum(low != reference)), reference.size
    low, reference = low.astype(np.float64), reference.astype(np.float64)
    size = max(np.abs(x).sum() for x in (low, reference))
    return path, int(min(np.abs(low - reference).sum(), size)), int(size)


def _distance(low: np.ndarray, reference: np.ndarray) -> tuple[float, float, int, int]:
    """Returns the norm of an output's error, that of the reference, how many low numbers are
    non-finite where the reference's are finite, and how many of the reference's are NaN."""
    with np.errstate(all="ignore"):
        error, size = norm(low - reference), norm(reference)
    if math.isfinite(error) and math.isfinite(size):
        return error, size, 0, 0
    finite = np.isfinite(low) & np.isfinite(reference)
    low_left, left = (np.where(finite, x, 0.0) for x in (low, reference))
    non_finite = int(np.sum(~np.isfinite(low) & np.isfinite(reference)))
    return norm(low_left - left), norm(left), non_finite, int(np.sum(np.isnan(reference)))
