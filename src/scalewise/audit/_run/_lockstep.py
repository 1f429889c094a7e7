"""The interpretation behind an audit: the low-precision run and the reference run in lockstep."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer

from ...interpret import CALLBACKS, Applied, Equation, Program, State, Value, is_float, run
from ._accumulator import Accumulator
from ._equation import Plan, make_plan, only_reshapes
from ._evaluate import Evaluator
from ._flat import flat, is_flat, padded_size
from ._interpretations import FP32_MAX, TableEmulation
from ._pair import (
    ORIGINS,
    Decision,
    Draw,
    Pair,
    low_of,
    origins,
    reference_of,
    shaped,
    with_origin,
)
from ._rounding import FP32_PARAMS, is_wide
from ._statistics import Statistics, add_events, add_record

MAX_EAGER = 2000  # results of a loop up to which its iterations run one by one, without compiling


@dataclasses.dataclass(eq=False)
class Lockstep(Evaluator):
    """Interprets a program in two ways at once and records statistics of each equation.

    The low-precision run computes exactly what ``low`` alone would, the reference run what
    ``reference`` alone would. The program runs equation by equation, short loops and branches too,
    with an :class:`Accumulator` as the state. A long loop is compiled as a whole; in it the state
    is :class:`Statistics`.

    Attributes:
        indices: the index of each recorded equation, by its path.
        recorded: the recorded equations by index.
        loops: compiled loops by path.
        constants: literals replaced in the low-precision run: number to number. One that is mapped
            to itself is left unrounded.
        limits: literals that are the largest number of the program's own narrow dtype, or 1000 less
            (to which transformers clamps), or the negative of one. In the reference run they are
            float32's largest number, as if the program ran in float32.
        literals: scalars lifted so far.
        precomputed: by path, results that depend on no float and that weren't needed yet.
        operands: for each recorded equation, by operand, the recorded equations that it comes from
            at its first visit.
        flow: the same at all visits: also through the carries of loops that run one by one, and
            through the state from one step to the next.
        settled: whether a first run has recorded both.
    """

    indices: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)
    recorded: list[Equation] = dataclasses.field(default_factory=list)
    loops: dict[tuple[int, ...], Callable] = dataclasses.field(default_factory=dict)
    constants: dict[float, float] = dataclasses.field(default_factory=dict)
    limits: set[float] = dataclasses.field(default_factory=set)
    literals: dict[tuple[float, np.dtype], Pair] = dataclasses.field(default_factory=dict)
    precomputed: dict[tuple[int, ...], list[jax.Array | None]] = dataclasses.field(
        default_factory=dict
    )
    operands: dict[int, tuple[tuple[int, ...], ...]] = dataclasses.field(default_factory=dict)
    flow: dict[int, tuple[tuple[int, ...], ...]] = dataclasses.field(default_factory=dict)
    settled: bool = False

    inline = True

    def interpret(
        self, program: Program, state: State, values: Sequence[Value]
    ) -> tuple[State, list[Value]]:
        """Runs the program on pairs; precomputes float-independent values in one jitted call."""
        with self.context():
            self.precomputed = program.integers.known(values, self.call)
        state, outs = run(program, self, state, values=values)
        with self.context():
            return state, [self.rounded(y) for y in outs]

    def constant(self, x: np.ndarray, aval: ShapedArray) -> Value:
        if not is_float(aval):
            return x
        value = float(x) if x.size == 1 else math.nan
        wide = self.low.in_float32(x) if isinstance(self.low, TableEmulation) else x
        if value in self.constants:
            number = self.constants[value]
            new, kept = np.full(x.shape, number), number == value or abs(number) == FP32_MAX
            low = jnp.asarray(new, self.carrier) if kept else self.low.constant(new, aval)
            return Pair(low, self.reference.constant(wide, aval), np.bool_(False), constant=True)
        if wide is not x:
            if x.size == 1:
                self.limits.add(value)
            low, reference = self.low.constant(x, aval), self.reference.constant(wide, aval)
            return Pair(low, reference, np.bool_(False), constant=True)
        key = (value, aval.dtype) if x.ndim == 0 and value == value else None
        if key is None or key not in self.literals:
            from_table = isinstance(self.low, TableEmulation)
            low, reference = self.low.constant(x, aval), self.reference.constant(x, aval)
            plain = low if from_table else self.low.lower(low, aval)
            if key is None or isinstance(plain, Tracer):
                return Pair(low, reference, np.bool_(False), constant=True)
            result = np.asarray(plain)
            tainted = np.isfinite(x) & ~np.isfinite(result.astype(np.float64))
            if from_table:  # laid out like any other array
                low, reference = flat(low, padded_size(1)), flat(reference, padded_size(1))
            self.literals[key] = Pair(low, reference, np.bool_(tainted), constant=True)
        found = self.literals[key]  # a copy, since a value remembers what a trace makes of it
        return dataclasses.replace(found, low=jax.tree.map(lambda leaf: leaf, found.low))

    def fork(self, state: State) -> State:
        return state.muted() if isinstance(state, Accumulator) else state

    def eager_iterations(self, state: State, equation: Equation) -> int:
        """Returns how many iterations of a loop run one by one: those up to MAX_EAGER results."""
        return MAX_EAGER // equation.inner if isinstance(state, Accumulator) else 0

    def control(self, equation: Equation, run: Callable) -> Callable:
        def with_shapes(state, inputs):
            pairs = zip(inputs, equation.in_avals, strict=True)
            before, self.compiling = self.compiling, True
            try:
                return run(state, [shaped(x, a) for x, a in pairs])
            finally:
                self.compiling = before

        loop = self.loops.setdefault(equation.path, jax.jit(with_shapes))

        def run_loop(state, inputs):
            if not isinstance(state, Accumulator):
                return with_shapes(state, inputs)
            statistics, outs = loop(state.flush(), inputs)
            state.replace(statistics)
            return state, outs

        return run_loop

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        if self.is_reshape(equation, inputs):
            return state, inputs[:1]
        if self.draws(equation, inputs):
            return state, self.drawn(equation, inputs)
        return self.computed(state, equation, self.operands_of(equation, inputs))

    def computed(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        """Computes an equation in both runs, and records its statistics."""
        if not isinstance(state, Accumulator):
            plan = make_plan(self.low, equation, inputs)
            index = self._index(plan, equation, state)
            inputs = self.literals_of(equation, inputs, state.formats[index])
            state, outs = self._apply_traced(state, plan, index, inputs)
        else:
            plan, step = self.planned(equation, inputs)
            index = self._index(plan, equation, state)
            if plan.recorded:
                inputs = self.literals_of(equation, inputs, state.formats[index])
            op_params = state.op_params(index, plan.op_params)
            outs, record, events = self.evaluate((plan, step), inputs, op_params)
            if record is not None:
                state.add(index, record, plan.length)
            if events is not None:
                state.add_events(index, events, record is None)
        return state, self.with_origins(plan, index, inputs, outs)

    def literals_of(
        self, equation: Equation, inputs: Sequence[Value], fmt: jax.Array | np.ndarray
    ) -> list[Value]:
        """Returns inputs in which literals aren't rounded, if the operation is in float32.

        That is what a user gets who computes the line in float32. One that is in float32 without a
        fix keeps the program's own limits.
        """
        wide = is_wide(fmt)
        if self.limits and self.stays_wide(equation):
            return list(inputs)
        if not isinstance(self.low, TableEmulation) or (isinstance(fmt, np.ndarray) and not wide):
            return list(inputs)

        def unrounded(x: Value) -> Value:
            if not isinstance(x, Pair) or not x.constant or x.origin:
                return x
            low = jnp.where(wide, x.reference.astype(self.carrier), x.low)
            return dataclasses.replace(x, low=low)

        return [unrounded(x) for x in inputs]

    def with_origins(self, plan: Plan, index: int, inputs: Sequence[Value], outs: Sequence[Value]):
        """Returns results that know the equations they come from, and records those of operands."""
        constant = all(x.constant for x in inputs if isinstance(x, Pair))
        constant &= not any(isinstance(x, Decision) for x in inputs)
        origin = (index,) if plan.counts else origins(inputs)
        if plan.counts and not self.settled:
            own = tuple(origins([x]) for x in inputs)
            self.operands.setdefault(index, own)
            known = self.flow.setdefault(index, own)
            if own != known:
                both = zip(known, own, strict=True)
                self.flow[index] = tuple(tuple(dict.fromkeys((*a, *b)))[:ORIGINS] for a, b in both)
        return [with_origin(y, origin, constant) for y in outs]

    def draws(self, equation: Equation, inputs: Sequence[Value]) -> bool:
        """Returns whether an equation is a step from random bits to a random draw."""
        if not isinstance(self.low, TableEmulation) or equation.name in CALLBACKS:
            return False
        if not any(isinstance(x, Draw) for x in inputs):
            bits = equation.name == "bitcast_convert_type" and is_float(equation.out_avals[0])
            return bits and not any(map(is_float, equation.in_avals))
        floats = (x for x, a in zip(inputs, equation.in_avals, strict=True) if is_float(a))
        return all(isinstance(x, Draw) or x.constant for x in floats)

    def operands_of(self, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
        """Returns inputs with random draws rounded, unless the equation only compares them."""
        if not any(isinstance(x, Draw) for x in inputs):
            return list(inputs)
        if not any(map(is_float, equation.out_avals)):
            exact = np.bool_(False)
            return [Pair(x.exact, x.reference, exact) if isinstance(x, Draw) else x for x in inputs]
        return [self.rounded(x) for x in inputs]

    def unlifted(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        if any(isinstance(x, Decision) for x in inputs):
            lows, references = ([of(x) for x in inputs] for of in (low_of, reference_of))
            outs = zip(equation.bind(*lows), equation.bind(*references), strict=True)
            origin = origins(inputs)
            return state, [Decision(y, s, origin) for y, s in outs]
        outs = self.precomputed.pop(equation.path, None)
        return state, equation.bind(*inputs) if outs is None else outs

    def is_reshape(self, equation: Equation, inputs: Sequence[Value]) -> bool:
        """Returns True if the result is the first input, flat: nothing has to be computed."""
        if not inputs or not isinstance(inputs[0], Pair):
            return False
        shape = equation.in_avals[0].shape
        return only_reshapes(equation) and is_flat(inputs[0].low, shape)

    def _apply_traced(self, state: Statistics, plan: Plan, index: int, inputs: Sequence[Value]):
        """Applies one equation of a loop that is compiled as a whole."""
        op_params = jnp.concatenate([state.formats[index], jnp.asarray(plan.op_params)])
        outs, record, events = self.evaluate_traced(plan, op_params, inputs)
        if record is not None:
            state = add_record(state, index, record)
        if events is not None:
            state = add_events(state, index, events, record is None)
        return state, outs

    def _index(self, plan: Plan, equation: Equation, state: State) -> int:
        """Returns the equation's index, a new one at its first visit; 0 if it has no statistics."""
        if not plan.counts:
            return 0
        index = self.indices.setdefault(equation.path, len(self.indices))
        if index == len(self.recorded):
            self.recorded.append(equation)
            if isinstance(state, Accumulator) and self.stays_wide(equation):
                state.formats[index] = FP32_PARAMS
        return index

    def stays_wide(self, equation: Equation) -> bool:
        """Returns whether the program computes an equation in float32, and ``low`` keeps that."""
        low = self.low
        if not isinstance(low, TableEmulation) or low.low_dtype is None:
            return False
        floats = [a for a in equation.out_avals if is_float(a)]
        return bool(floats) and not any(map(low.is_low, floats))
