"""Makes the balance sheet of an audited program: the run, the functional, the pass backwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax.typing import ArrayLike

from ...autoscaling import Boundaries
from ...interpret import Interpretation, Program
from .._run._outcome import Floors, OutputError
from .._tape._both import TapedRun, on_host, run_both
from .._tape._specialize import nominal_format
from ._balance import Balance, balance
from ._functional import Stage, chosen, gradient_error, stages
from ._sheet import Sheet, sheet_from


def stages_of(run: TapedRun, floors: Floors, least: Mapping[int, float]) -> list[Stage]:
    """Returns the functionals of a run's outputs; see :func:`stages` for what is passed."""
    forward = run.forward
    with on_host():
        return stages(
            run.program, run.arguments, run.outputs, forward.tape, floors, least,
            nominal_format(run.low), trained="backward" in forward.directions,
            scaled=isinstance(run.low, Boundaries),
        )  # fmt: skip


def gradients_of(run: TapedRun) -> OutputError:
    """Returns the error of the gradients that a training step's update reads."""
    with on_host():
        return gradient_error(run.forward.tape)


def balance_of(run: TapedRun, stage: Stage) -> Balance:
    smallest, top = nominal_format(run.low).smallest_normal, run.forward.arithmetic.top
    with on_host():
        return balance(run.forward.tape, stage.seeds, float(smallest), top)


@dataclasses.dataclass(frozen=True)
class SheetSource:
    """The program of an audit, and how it ran, without cached results.

    Attributes:
        function, arithmetic: their names.
        low: the interpretation of the low-precision run.
        steps, batches: as of :class:`Session`.
        floors, least: what the outputs' errors are relative to at least.
    """

    function: str
    arithmetic: str
    program: Program
    low: Interpretation
    steps: int = 1
    batches: Sequence[Sequence[ArrayLike]] = ()
    floors: Floors = dataclasses.field(default_factory=Floors)
    least: Mapping[int, float] = dataclasses.field(default_factory=dict)


def make_sheet(source: SheetSource) -> Sheet:
    """Returns the balance sheet of the audit's low-precision run, against the program in float64.

    Raises:
        ValueError: see :func:`run_both`.
    """
    made = run_both(source.program, source.low, source.steps, source.batches)
    every = stages_of(made, source.floors, source.least)
    stage = chosen(every)
    found = None if stage is None else balance_of(made, stage)
    shown = [x for x in every if not x.is_part]
    fails = any(x.fails for x in shown if not x.is_change)
    return sheet_from(
        source.function, source.arithmetic, shown, stage, found, made.forward.visits, fails=fails
    )
