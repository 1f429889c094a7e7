"""Makes the balance sheet of an audited program: the run, the functional, the pass backwards."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from ..._jax import ShapedArray, unchecked
from ...autoscaling import Boundaries
from ...interpret import Argument, Interpretation, Program, is_float, run
from .._run._outcome import Floors
from .._run._specialize import nominal_format
from ._arithmetic import Choice, arithmetic_of
from ._balance import Balance, balance
from ._cells import Cell, Leaf, Node, cell, is_key
from ._forward import Forward
from ._functional import Stage, chosen, stages
from ._sheet import Sheet, sheet_from


@dataclasses.dataclass(frozen=True)
class SheetSource:
    """The program of an audit, and how it ran, without cached results.

    Attributes:
        function, arithmetic: their names.
        low: the interpretation of the low-precision run.
        steps, batches: as of :class:`Session`.
        floors, least: what the outputs' errors are relative to at least.
        choice: of a run with fixes, see :class:`Choice`.
        code: compiled code, which runs of one program share.
    """

    function: str
    arithmetic: str
    program: Program
    low: Interpretation
    steps: int = 1
    batches: Sequence[Sequence[ArrayLike]] = ()
    floors: Floors = dataclasses.field(default_factory=Floors)
    least: Mapping[int, float] = dataclasses.field(default_factory=dict)
    choice: Choice = dataclasses.field(default_factory=Choice)
    code: dict[Hashable, Callable[..., Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class SheetRun:
    """Both runs of a program on one tape, and the functionals of its outputs."""

    source: SheetSource
    forward: Forward
    stages: Sequence[Stage]

    @property
    def chosen(self) -> Stage | None:
        return chosen(self.stages)

    def balance(self, stage: Stage) -> Balance:
        fmt, top = nominal_format(self.source.low), self.forward.arithmetic.top
        with _host():
            return balance(self.forward.tape, stage.seeds, float(fmt.smallest_normal), top)


def run_sheet(source: SheetSource) -> SheetRun:
    """Runs the program of an audit on the host, in low precision and in float64.

    Raises:
        ValueError: the program computes too many operations, or runs on several devices.
    """
    fmt = nominal_format(source.low)
    with _host():
        forward, arguments, outputs = run_both(source)
        trained = "backward" in forward.directions
        found = stages(
            source.program, arguments, outputs, forward.tape, source.floors, source.least, fmt,
            trained=trained, scaled=isinstance(source.low, Boundaries),
        )  # fmt: skip
    return SheetRun(source, forward, found)


def make_sheet(source: SheetSource) -> Sheet:
    """Returns the balance sheet of the audit's low-precision run, against the program in float64.

    Raises:
        ValueError: see :func:`run_sheet`.
    """
    made = run_sheet(source)
    stage = made.chosen
    found = None if stage is None else made.balance(stage)
    shown = [x for x in made.stages if not x.is_part]
    fails = any(x.fails for x in shown if not x.is_change)
    return sheet_from(
        source.function, source.arithmetic, shown, stage, found, made.forward.visits,
        fails=fails,
    )  # fmt: skip


def _host() -> contextlib.ExitStack:
    """Returns a context in which the host computes in float64, and NaN is a number like others."""
    stack = contextlib.ExitStack()
    for own in (
        jax.disable_jit(False), unchecked(), np.errstate(all="ignore"), jax.enable_x64(True),
    ):  # fmt: skip
        stack.enter_context(own)
    return stack


def run_both(source: SheetSource) -> tuple[Forward, list[Node], list[Node]]:
    """Returns the recorded run, its arguments, and its outputs as the audit compares them."""
    program = source.program
    forward = Forward(arithmetic_of(source.low, source.choice, source.code))
    arguments = [
        _argument(forward, x, a, path)
        for x, a, path in zip(program.arrays, program.in_avals, program.arguments, strict=True)
    ]
    state_size = sum(path.startswith("[0]") for path in program.arguments)
    values: list[Node] = []
    for step in range(source.steps):
        inputs = arguments
        if step:
            batch = source.batches[step] if source.batches else ()
            avals = program.in_avals[state_size:]
            new = [_argument(forward, x, a, "batch") for x, a in zip(batch, avals, strict=False)]
            inputs = [*values[:state_size], *new, *arguments[state_size + len(new) :]]
        forward.iteration = ("step", step) if source.steps > 1 else None
        values = run(program, forward, (), values=inputs)[1]
        forward.arithmetic.next_step()
    pairs = zip(values, program.out_avals, strict=True)
    return forward, arguments, [_output(forward, x, a) for x, a in pairs]


def _argument(forward: Forward, x: Argument, aval: ShapedArray, path: str) -> Node:
    if not is_float(aval) and not is_key(x):
        x = np.asarray(x).astype(aval.dtype)
    return forward.leaf(x, aval, Leaf("argument", path))


def _output(forward: Forward, x: Node, aval: ShapedArray) -> Node:
    arithmetic = forward.arithmetic
    low = arithmetic.drawn(x.cell.low) if x.draw else arithmetic.lowered(x.cell, aval)
    if low is x.cell.low or np.array_equal(low, x.cell.low, equal_nan=True):
        return x
    maker = _maker(forward, x.cell)
    if maker is None:  # the same in both runs until here
        leaf = Leaf("constant", "a random draw" if x.draw else "an output's dtype")
        return Node(cell(low, x.cell.reference, top=arithmetic.top, leaf=leaf))
    return Node(forward.changed(x.cell, (low, x.cell.value), maker))


def _maker(forward: Forward, x: Cell) -> Any:
    """Returns the equation that made a cell; None of an argument."""
    made = (e.operation.equation for e in reversed(forward.tape) if any(x is y for y in e.outs))
    return next(made, None)
