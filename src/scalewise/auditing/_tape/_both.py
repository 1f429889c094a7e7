"""Runs a program in low precision and in float64 on the host, with a tape of all results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from ..._jax import ShapedArray, unchecked
from ...interpret import Argument, Equation, Interpretation, Program, run
from ._arithmetic import Choice, FormatArithmetic, arithmetic_of
from ._cells import Cell, Leaf, Node, cell
from ._forward import Forward, Replay
from ._statistics import Visit, statistics

COLLECTED = 200_000, 50, 100  # thresholds of Python's garbage collector


@dataclasses.dataclass(frozen=True, eq=False)
class TapedRun:
    """Both runs of a program on one tape.

    Attributes:
        program, low: what was run, by which interpretation.
        arguments, outputs: the outputs as the audit compares them.
    """

    program: Program
    low: Interpretation
    forward: Forward
    arguments: Sequence[Node]
    outputs: Sequence[Node]

    @property
    def visited(self) -> Mapping[tuple[int, ...], tuple[Equation, Sequence[Visit]]]:
        return self.forward.visited

    @property
    def limits(self) -> set[float]:
        return getattr(self.forward.arithmetic, "limits", set())

    @functools.cached_property
    def statistics(self) -> dict[tuple[int, ...], Counted]:
        """The statistics of each equation that rounds or decides, by its path."""
        return {path: Counted(*own) for path, own in self.visited.items()}


class Counted:
    """The statistics of an equation's visits, computed when they are first read: a trial needs few.

    Attributes:
        visits: how many there were.
    """

    def __init__(self, equation: Equation, visits: Sequence[Visit]) -> None:
        self.visits = len(visits)
        self._source: tuple[Equation, Sequence[Visit]] | None = (equation, visits)

    @functools.cached_property
    def found(self) -> tuple[dict[str, float], tuple[int, ...]]:
        """What :func:`statistics` returns."""
        assert self._source is not None
        with on_host():
            found = statistics(*self._source)
        self._source = None  # the arrays of a run
        return found


def run_both(
    program: Program,
    low: Interpretation,
    steps: int = 1,
    batches: Sequence[Sequence[ArrayLike]] = (),
    choice: Choice | None = None,
    code: dict[Hashable, Callable[..., Any]] | None = None,
    arrays: Sequence[Argument] | None = None,
    forward: Forward | None = None,
    before: TapedRun | None = None,
) -> TapedRun:
    """Runs a program on the host, in low precision and in float64.

    Args:
        steps, batches: as of :class:`Session`.
        choice: of a run with fixes, see :class:`Choice`.
        code: compiled code, which runs of one program share.
        arrays: in place of the program's arguments.
        before: a run under the same format, with other fixes, whose equal steps aren't computed
            again.
        forward: runs the program, in place of one that is made of the other arguments.

    Raises:
        ValueError: the program computes too many operations.
    """
    if forward is None:
        arithmetic = arithmetic_of(low, choice or Choice(), {} if code is None else code)
        earlier = () if before is None else before.forward.replay.steps
        replayed = isinstance(arithmetic, FormatArithmetic)
        forward = Forward(arithmetic, Replay(earlier if replayed else None))
    arithmetic = forward.arithmetic
    with on_host():
        given = zip(arrays or program.arrays, program.in_avals, program.arguments, strict=True)
        arguments = [_argument(forward, x, a, path) for x, a, path in given]
        state_size = sum(path.startswith("[0]") for path in program.arguments)
        values: list[Node] = []
        for step in range(steps):
            inputs = arguments
            if step:
                batch = batches[step] if batches else ()
                avals = program.in_avals[state_size:]
                pairs = zip(batch, avals, strict=False)
                new = [_argument(forward, x, a, "batch") for x, a in pairs]
                inputs = [*values[:state_size], *new, *arguments[state_size + len(new) :]]
            forward.iteration = ("step", step) if steps > 1 else None
            values = run(program, forward, (), values=inputs)[1]
            arithmetic.next_step()
        pairs = zip(values, program.out_avals, strict=True)
        outputs = [_output(forward, x, a) for x, a in pairs]
    return TapedRun(program, low, forward, arguments, outputs)


def on_host() -> contextlib.ExitStack:
    """Returns a context in which the host computes in float64, and NaN is a number like others."""
    stack = contextlib.ExitStack()
    for own in (
        jax.disable_jit(False), unchecked(), np.errstate(all="ignore"), jax.enable_x64(True),
        _few_collections(),
    ):  # fmt: skip
        stack.enter_context(own)
    return stack


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Lets Python collect garbage less often: a tape, which it would read, has no cycles."""
    before = gc.get_threshold()
    gc.set_threshold(*(max(x, y) if x else 0 for x, y in zip(before, COLLECTED, strict=True)))
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _argument(forward: Forward, x: Argument, aval: ShapedArray, path: str) -> Node:
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
