"""A program under audit: traced once, then run once for each change that is tried."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._jax import ShapedArray
from ..._types import PyTree
from ...interpret import (
    Applied,
    Argument,
    Equation,
    Interpretation,
    Program,
    State,
    Value,
    is_float,
    is_inexact,
    lifted,
)
from ...rounding import format_params
from ._accumulator import Accumulator
from ._changes import Update, started_at_zero, updates, wrong
from ._compiled import Compiled
from ._dataflow import Dataflow, dataflow, sums
from ._equation import EquationPlan, is_discrete
from ._interpretations import Reference, Runs
from ._lockstep import Lockstep
from ._loss_scale import loss_scaled_paths
from ._outcome import ExactSums, Floors, Numbers, Outcome, OutputError, in_parts, squared_norm
from ._pair import Pair, low_of, reference_of, shaped
from ._specialize import Low, kind_of_run
from ._statistics import OP_PARAMS


@dataclasses.dataclass(eq=False)
class CompilingLockstep(Lockstep):
    """A lockstep that is traced: functions that it would call are compiled in a thread pool.

    Loops and branches are skipped: only the types of their results matter here.
    """

    pool: ThreadPoolExecutor = dataclasses.field(default_factory=ThreadPoolExecutor)
    submitted: dict[Hashable, Future] = dataclasses.field(default_factory=dict)

    def constant(self, x: np.ndarray, aval: ShapedArray) -> Pair:
        with jax.ensure_compile_time_eval():  # concrete, as it will be in the run
            return super().constant(x, aval)

    def eager_iterations(self, state: State, equation: Equation) -> int:
        return 0

    def control(self, equation: Equation, run: Callable) -> Callable:
        def skip(state, inputs):
            outs = ((jnp.zeros(a.shape, a.dtype), a) for a in equation.out_avals)
            return state, [
                self.canonical(self.lift(y, a), a, "carry", equation) if is_float(a) else y
                for y, a in outs
            ]

        return skip

    def computed(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        op_params = jnp.zeros(OP_PARAMS, jnp.float64)
        planned = self.planned(equation, inputs)
        outs, record, _ = self.evaluate(planned, inputs, op_params, *self.past(equation))
        if record is not None and Accumulator not in self.submitted:
            self.submitted[Accumulator] = self.pool.submit(state.prepare)
        return state, self.with_constancy(planned[0], inputs, outs)

    def call(self, f: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten(arguments)
        types = [jax.typeof(x) if hasattr(x, "shape") else x for x in leaves]
        key = (f, tree, tuple(map(str, types)))
        if key not in self.submitted:
            shapes = [
                jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type)
                if hasattr(t, "weak_type") else t
                for t in types
            ]  # fmt: skip
            own = f.chosen(*arguments) if isinstance(f, Compiled) else f
            lowered = cast(jax.stages.Wrapped, own).lower(*jax.tree.unflatten(tree, shapes))
            self.submitted[key] = self.pool.submit(lowered.compile)
        return f(*arguments)


def compile_ahead(program: Program, lockstep: Lockstep, accumulator: Accumulator) -> None:
    """JAX caches compiled code by what was lowered, so that the run finds it."""

    def interpret(arrays):
        return tracer.interpret(program, accumulator, lifted(program, tracer, arrays))[1]

    arrays = [
        jax.ShapeDtypeStruct(a.shape, x.dtype) if is_float(a)
        else jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type)
        for x, a in zip(program.arrays, program.in_avals, strict=True)
    ]  # fmt: skip
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        shared = {
            "plans": lockstep.plans, "literals": lockstep.literals, "limits": lockstep.limits,
            "code": lockstep.code,
        }  # fmt: skip
        runs = {"low": lockstep.low, "reference": lockstep.reference}
        tracer = CompilingLockstep(**runs, **shared, pool=pool)
        with lockstep.context():
            jax.eval_shape(interpret, arrays)
        for future in tracer.submitted.values():
            future.result()


def new_code() -> dict[tuple[Callable, Runs, EquationPlan], Callable]:
    """Returns where an audit keeps its compiled code; the tests' audits share one."""
    return {}


@dataclasses.dataclass(eq=False)
class Session:
    """A traced program, and the interpretations of its two runs."""

    program: Program
    low: Interpretation
    reference: Reference
    # how often the program is called; its first result is the next first argument, in each run
    steps: int = 1
    batches: Sequence[Sequence[ArrayLike]] = ()  # for each step, those of the second argument
    runs: int = 0
    arguments: list[Argument] | None = None
    # compiled code that runs with other interpretations share (see :class:`Lockstep`)
    code: dict[tuple[Callable, Runs, EquationPlan], Callable] = dataclasses.field(
        default_factory=lambda: new_code()
    )
    floors: Floors = dataclasses.field(default_factory=Floors)
    exact_sums: ExactSums | None = None  # the run without the device's matrix units
    # how many equations were recorded when the dataflow was found, and that
    known: tuple[int, Dataflow] | None = None
    lockstep: Lockstep = dataclasses.field(init=False)

    def __post_init__(self):
        self.lockstep = Lockstep(self.low, self.reference, code=self.code)

    @property
    def state_size(self) -> int:
        return sum(path.startswith("[0]") for path in self.program.arguments)

    def inputs(
        self, step: int, state: list[Value], arguments: list[Value], run: Lockstep | Reference
    ) -> list[Value]:
        n = len(state)
        if step and self.batches:
            avals, batch = self.program.in_avals[n:], self.batches[step]
            with run.context():
                new = [
                    run.lift(x, a) if is_float(a) else x for x, a in zip(batch, avals, strict=False)
                ]
            return [*state, *new, *arguments[n + len(batch) :]]
        return [*state, *arguments[n:]]

    def _arguments(self) -> list[Value]:
        if self.arguments is None:
            self.arguments = lifted(self.program, self.lockstep, self.program.arrays)
        return self.arguments

    def with_low(self, low: Interpretation) -> Session:
        self.runs += 1
        return Session(
            self.program, low, self.reference, self.steps, self.batches,
            code=self.code, floors=self.floors, exact_sums=self.exact_sums,
        )  # fmt: skip

    @property
    def dataflow(self) -> Dataflow:
        count = len(self.lockstep.recorded)
        if self.known is None or self.known[0] != count:
            state = self.state_size if self.steps > 1 else 0
            self.known = count, dataflow(self.program, self.lockstep.indices, state)
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
        indices = self.lockstep.indices
        paths = (p[:n] for p in loss_scaled_paths(self.program) for n in range(1, len(p) + 1))
        return frozenset(indices[p] for p in paths if p in indices)  # of a step, its operation's

    def formats(self) -> np.ndarray:
        own = format_params(self.kind.fmt(self.low), getattr(self.low, "saturate", False))
        table = np.tile(own, (max(self.program.equations, 1), 1))
        for index, equation in enumerate(self.lockstep.recorded):
            own = self.lockstep.own_params(equation)
            if own is not None:
                table[index] = own
        return table

    def run(
        self,
        formats: np.ndarray | None = None,
        constants: Mapping[float, float] | None = None,
        arrays: Sequence[Argument] | None = None,
    ) -> Outcome:
        self.runs += 1
        lockstep = self.lockstep
        if arrays is not None:
            arguments = lifted(self.program, lockstep, arrays)
        else:
            arguments = self._arguments()
        if constants:
            lockstep = dataclasses.replace(lockstep, constants=dict(constants))
        with jax.enable_x64(True):
            accumulator = Accumulator(self.formats() if formats is None else formats)
        if not lockstep.plans:
            compile_ahead(self.program, lockstep, accumulator)
        values: list[Value] = []
        lockstep.magnitudes.restart()
        for step in range(self.steps):
            state = values[: self.state_size] if step else []
            inputs = self.inputs(step, state, arguments, lockstep)
            values = lockstep.interpret(self.program, accumulator, inputs)[1]
            lockstep.magnitudes.next_step()
        with jax.enable_x64(True):
            statistics = accumulator.flush()
        return self._outcome(tuple(lockstep.recorded), statistics, values)

    def _outcome(self, recorded, statistics, values) -> Outcome:
        avals = self.program.out_avals
        lows, references = self._both(values, avals)
        floats = [(p, v) for p, v, a in zip(self.program.paths, values, avals, strict=True)
                  if is_inexact(a)]  # fmt: skip
        error, flow = OutputError(0, 0.0), self.dataflow
        outcome = Outcome(
            recorded=recorded,
            statistics=statistics,
            dataflow=flow,
            origins=tuple(own for own, a in zip(flow.outputs, avals, strict=True) if is_inexact(a)),
            error=error,
            outputs=tuple((p, error) for p, _ in floats),
            reference_nans=(),
            low=lows,
            reference=references,
            decisions=tuple(_decisions(self.program, values)),
            exact_sums=self.exact_sums,
        )
        return self.with_errors(outcome)

    def _both(
        self, values: Sequence[Value], avals: Sequence[ShapedArray]
    ) -> tuple[tuple[Numbers, ...], tuple[Numbers, ...]]:
        pairs = [self._pair(v, a) for v, a in zip(values, avals, strict=True) if is_inexact(a)]
        return tuple(low for low, _ in pairs), tuple(reference for _, reference in pairs)

    def _pair(self, value: Value, aval: ShapedArray) -> tuple[Numbers, Numbers]:
        if not is_float(aval):
            return in_parts(low_of(value)), in_parts(reference_of(value))
        if self.kind.elementwise:
            value = jax.tree.map(np.asarray, value)
        both = shaped(value, aval)
        low = both.low if self.adjustable else self.low.lower(both.low, aval)
        return low, both.reference

    def state_arrays(self) -> tuple[tuple[Numbers, ...], tuple[Numbers, ...]]:
        return self._both(self._arguments(), self.program.in_avals)

    def updates(self, outcome: Outcome) -> list[Update]:
        """Returns the changes of the state that the program carries from one call to the next."""
        eps = float(np.finfo(self.reference.dtype).eps)
        return updates(self.program, outcome, *self.state_arrays(), eps, self.floors)

    @functools.cached_property
    def started_at_zero(self) -> dict[int, float]:
        """See :func:`started_at_zero`; of a training step, so that a run has to come before."""
        return started_at_zero(self.program, self.state_arrays()[1]) if self.trained else {}

    def wrong_changes(self, outcome: Outcome) -> list[Update]:
        """Returns the changes that a training step gets wrong (see :func:`wrong`)."""
        return wrong(self.updates(outcome), self.floors.changes) if self.trained else []

    @property
    def trained(self) -> bool:
        """Whether the program has a backward pass; known after the first run."""
        return any(e.direction == "backward" for e in self.lockstep.recorded)

    def with_errors(self, outcome: Outcome) -> Outcome:
        pairs = enumerate(zip(outcome.low, outcome.reference, strict=True))
        table = [_distance(*(self.floors.compared(i, x) for x in both)) for i, both in pairs]
        floors = np.array(self.floors.norms or np.zeros(len(table)))
        for i, least in self.started_at_zero.items():
            floors[i] = max(floors[i], least)
        errors = [
            OutputError(int(n), _ratio(noise, max(signal, floor * floor)))
            for (noise, signal, n, _), floor in zip(table, floors.tolist(), strict=True)
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


def _decisions(
    program: Program, values: Sequence[Value]
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    for path, value, aval in zip(program.paths, values, program.out_avals, strict=True):
        if is_discrete(aval):
            yield path, np.asarray(low_of(value)), np.asarray(reference_of(value))


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


def _ratio(noise: float, signal: float) -> float:
    if noise == 0:
        return 0.0
    return math.sqrt(noise / signal) if signal else math.sqrt(noise)


def _distance(low: np.ndarray, reference: np.ndarray) -> tuple[float, float, int, int]:
    """Returns an output's squared error, the reference's squared norm, how many low numbers are
    non-finite where the reference's are finite, and how many of the reference's are NaN."""
    y, s = low, reference
    with np.errstate(all="ignore"):
        noise = squared_norm(y - s)
    signal = squared_norm(s)
    if math.isfinite(noise) and math.isfinite(signal):
        return noise, signal, 0, 0
    y, s = y.astype(np.float64), s.astype(np.float64)
    finite = np.isfinite(y) & np.isfinite(s)
    noise = squared_norm(np.where(finite, y, 0.0) - np.where(finite, s, 0.0))
    non_finite = int(np.sum(~np.isfinite(y) & np.isfinite(s)))
    return noise, squared_norm(np.where(finite, s, 0.0)), non_finite, int(np.sum(np.isnan(s)))
