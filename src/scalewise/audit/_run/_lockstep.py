"""The interpretation behind an audit: the low-precision run and the reference run in lockstep."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ...interpret import (
    CALLBACKS,
    Boundary,
    Equation,
    Interpretation,
    Program,
    State,
    Value,
    is_float,
    run,
)
from ._accumulator import Accumulator
from ._elementary import DIV, OTHER, SQRT, elementary, product, quotient, round_and_count
from ._equation import (
    Plan,
    any_tainted,
    broadcast_flat,
    compiled,
    count_result,
    lift_any,
    lift_from_table,
    make_plan,
    only_reshapes,
    operand_samples,
    round_draw,
    run_and_count,
    run_both,
    run_draw,
    split,
    taints_of,
    unrounded,
)
from ._flat import flat, is_flat, padded_size
from ._interpretations import Reference, Runs, TableEmulation
from ._pair import Decision, Draw, Pair, low_of, origins, reference_of, shaped, with_origin
from ._rounding import FP32_PARAMS, format_params, is_wide
from ._specialize import is_elementwise, specialize
from ._statistics import Record, Statistics, add_events, add_record

MAX_EAGER = 2000  # results of a loop up to which its iterations run one by one, without compiling


@dataclasses.dataclass(eq=False)
class Lockstep(Interpretation):
    """Interprets a program in two ways at once and records statistics of each equation.

    The low-precision run computes exactly what ``low`` alone would, the reference run what
    ``reference`` alone would. The program runs equation by equation, short loops and branches too,
    with an :class:`Accumulator` as the state; code is compiled once for each primitive, parameters
    and types. A long loop is compiled as a whole; in it the state is :class:`Statistics`.

    Attributes:
        low: any interpretation; :class:`TableEmulation` takes each equation's format from the
            state.
        reference: in float32 or float64.
        indices: the index of each recorded equation, by its path.
        recorded: the recorded equations by index.
        loops: compiled loops by path.
        plans: by path, how each equation outside of loops is computed, and its compiled code.
        constants: literals replaced in the low-precision run: number to number. One that is mapped
            to itself is left unrounded.
        literals: scalars lifted so far.
        precomputed: by path, results that depend on no float and that weren't needed yet.
        operands: for each recorded equation, by operand, the recorded equations that it comes from.
        compiling: whether a loop is being compiled as a whole.
        code: compiled code of equations, by step, runs and plan, released with the audit.
    """

    low: Interpretation
    reference: Reference
    indices: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)
    recorded: list[Equation] = dataclasses.field(default_factory=list)
    loops: dict[tuple[int, ...], Callable] = dataclasses.field(default_factory=dict)
    plans: dict[tuple[int, ...], tuple[Plan, Callable]] = dataclasses.field(default_factory=dict)
    constants: dict[float, float] = dataclasses.field(default_factory=dict)
    literals: dict[tuple[float, Any], Pair] = dataclasses.field(default_factory=dict)
    precomputed: dict[tuple[int, ...], list[Any]] = dataclasses.field(default_factory=dict)
    operands: dict[int, tuple[tuple[int, ...], ...]] = dataclasses.field(default_factory=dict)
    compiling: bool = False
    code: dict[tuple[Callable, Runs, Plan], Callable] = dataclasses.field(default_factory=dict)

    inline = True
    decides = True

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return jax.enable_x64(True)

    @property
    def runs(self) -> Runs:
        return Runs(self.low, self.reference)

    @property
    def carrier(self) -> Any:
        """The dtype that holds the low-precision run's numbers, if ``low`` emulates a format."""
        assert isinstance(self.low, TableEmulation)
        return self.low.carrier

    def is_argument(self, leaf: Any) -> bool:
        return self.low.is_argument(leaf)

    def abstract(self, leaf: Any) -> Any:
        return self.low.abstract(leaf)

    def lifts(self, aval: Any) -> bool:
        return True

    def lift(self, x: Any, aval: Any) -> Value:
        if not is_float(aval):
            return x
        if isinstance(self.low, TableEmulation):
            x = flat(x, padded_size(math.prod(aval.shape)))
            return Pair(*self.call(lift_from_table, self.runs, x, self.low.params_of(aval)))
        shape = aval.shape
        if is_elementwise(self.low):
            x = flat(x, padded_size(math.prod(shape)))
            shape = x.shape
        aval = jax.ShapeDtypeStruct(shape, aval.dtype)
        return Pair(*self.call(lift_any, self.runs, aval, x))

    def constant(self, x: np.ndarray, aval: Any) -> Value:
        if not is_float(aval):
            return x
        value = float(x) if x.size == 1 else math.nan
        if value in self.constants:
            new = np.full(x.shape, self.constants[value])
            kept = new == value
            low = jnp.asarray(new, self.carrier) if kept else self.low.constant(new, aval)
            reference = self.reference.constant(x, aval)
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

    def lower(self, value: Value, aval: Any) -> jax.Array:
        if not is_float(aval):
            return low_of(value)
        return self.low.lower(shaped(value, aval).low, aval)

    def canonical(self, value: Value, aval: Any, boundary: Boundary, equation: Equation) -> Value:
        value = self.rounded(value)
        if not isinstance(value, Pair):
            if not self.compiling:
                return value
            # of one type before and after a loop's body, which may compute it from floats
            return Decision(low_of(value), reference_of(value), origins([value]))
        value = shaped(value, aval)
        return Pair(
            self.low.canonical(value.low, aval, boundary, equation),
            self.reference.canonical(value.reference, aval, boundary, equation),
            jnp.asarray(value.tainted),
            value.origin,
        )

    def decisions(self, chosen: Any) -> Sequence[Any]:
        return chosen.ways if isinstance(chosen, Decision) else (chosen,)

    def join(self, results: Sequence[Any]) -> Value:
        own, other = results
        if isinstance(own, Pair):
            return dataclasses.replace(own, reference=other.reference)
        return Decision(low_of(own), reference_of(other), origins(results))

    def unfinished(
        self, equation: Equation, going: Sequence[Any], value: Value, aval: Any
    ) -> Value:
        """Returns a carry that is NaN in a run whose loop didn't end."""
        if not isinstance(value, Pair) or len(going) < 2:
            return value
        own, other = (jnp.broadcast_to(jnp.any(way), aval.shape) for way in going)
        nan = jnp.full(aval.shape, jnp.nan, aval.dtype)
        tainted = value.tainted | jnp.any(going[0])
        nans = Pair(self.low.lift(nan, aval), self.reference.lift(nan, aval), tainted)
        nans = self.canonical(nans, aval, "carry", equation)
        return self.select(Decision(own, other), nans, value)

    def fork(self, state: State) -> Any:
        return state.muted() if isinstance(state, Accumulator) else state

    def select(self, predicate: Any, on_true: Value, on_false: Value) -> Value:
        own, other = low_of(predicate), reference_of(predicate)
        origin = origins([on_true, on_false])
        if isinstance(on_true, Pair):
            low = self.low.select(own, on_true.low, on_false.low)
            reference = self.reference.select(other, on_true.reference, on_false.reference)
            return Pair(low, reference, on_true.tainted | on_false.tainted, origin)
        if not any(isinstance(x, Decision) for x in (predicate, on_true, on_false)):
            return jnp.where(own, on_true, on_false)
        low = jnp.where(own, low_of(on_true), low_of(on_false))
        reference = jnp.where(other, reference_of(on_true), reference_of(on_false))
        return Decision(low, reference, origin)

    def unstack(self, value: Value, aval: Any) -> Value:
        value = self.rounded(value)
        if not isinstance(value, Pair):
            return value
        value = shaped(value, aval)
        spread = jnp.broadcast_to if isinstance(value.tainted, Tracer) else np.broadcast_to
        return Pair(
            self.low.unstack(value.low, aval),
            self.reference.unstack(value.reference, aval),
            spread(value.tainted, aval.shape[:1]),
            value.origin,
        )

    def stack(self, value: Value, aval: Any) -> Value:
        if not isinstance(value, Pair):
            return value
        return Pair(
            self.low.stack(value.low, aval),
            self.reference.stack(value.reference, aval),
            value.tainted.any(),
            value.origin,
        )

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

    def apply(
        self, state: State, equation: Equation, inputs: Sequence[Value]
    ) -> tuple[Any, Sequence[Any]]:
        if self.is_reshape(equation, inputs):
            return state, inputs[:1]
        if self.draws(equation, inputs):
            return state, self.drawn(equation, inputs)
        inputs = self.operands_of(equation, inputs)
        if not isinstance(state, Accumulator):
            plan = make_plan(self.low, equation, inputs)
            index = self._index(plan, equation, state)
            inputs = self.literals_of(inputs, state.formats[index])
            state, outs = self._apply_traced(state, plan, index, inputs)
        else:
            plan, step = self.planned(equation, inputs)
            index = self._index(plan, equation, state)
            inputs = self.literals_of(inputs, state.formats[index]) if plan.recorded else inputs
            op_params = state.op_params(index, plan.op_params)
            outs, counted, events = self.evaluate((plan, step), inputs, op_params)
            if counted:
                tally, samples = counted
                state.add(index, Record(tally, samples, op_params), plan.length)
            if events is not None:
                state.add_events(index, events, not counted)
        return state, self.with_origins(plan, index, inputs, outs)

    def literals_of(self, inputs: Sequence[Value], fmt: Any) -> list[Any]:
        """Returns inputs in which literals aren't rounded, if the operation is in float32.

        That is what a user gets who computes the line in float32.
        """
        wide = is_wide(fmt)
        if not isinstance(self.low, TableEmulation) or (isinstance(fmt, np.ndarray) and not wide):
            return list(inputs)

        def unrounded(x: Any) -> Any:
            if not isinstance(x, Pair) or not x.constant or x.origin:
                return x
            low = jnp.where(wide, x.reference.astype(self.carrier), x.low)
            return dataclasses.replace(x, low=low)

        return [unrounded(x) for x in inputs]

    def with_origins(self, plan: Plan, index: int, inputs: Sequence[Value], outs: Sequence[Any]):
        """Returns results that know the equations they come from, and records those of operands."""
        constant = all(x.constant for x in inputs if isinstance(x, Pair))
        constant &= not any(isinstance(x, Decision) for x in inputs)
        origin = (index,) if plan.counts else origins(inputs)
        if plan.counts and index not in self.operands:
            self.operands[index] = tuple(origins([x]) for x in inputs)
        return [with_origin(y, origin, constant) for y in outs]

    def draws(self, equation: Equation, inputs: Sequence[Value]) -> bool:
        """Returns whether an equation is a step from random bits to a random draw."""
        floats = [x for x, a in zip(inputs, equation.in_avals, strict=True) if is_float(a)]
        if not isinstance(self.low, TableEmulation) or equation.name in CALLBACKS:
            return False
        if not floats:
            return equation.name == "bitcast_convert_type" and is_float(equation.out_avals[0])
        known = all(isinstance(x, Draw) or x.constant for x in floats)
        return known and any(isinstance(x, Draw) for x in floats)

    def drawn(self, equation: Equation, inputs: Sequence[Value]) -> list[Any]:
        """Runs such an equation without rounding."""
        key = (*equation.path, -1)  # the same equation may be called with other operands
        if key not in self.plans:
            plan = make_plan(self.low, equation, inputs)
            self.plans[key] = plan, self.compiled(run_draw, self.runs, plan)
        return self.call(self.plans[key][1], list(inputs))

    def rounded(self, value: Value) -> Any:
        """Returns a random draw as an operand, rounded; other values unchanged."""
        if not isinstance(value, Draw):
            return value
        assert isinstance(self.low, TableEmulation)
        params = format_params(self.low.fmt, self.low.saturate)
        return self.call(round_draw, self.runs, value, params)

    def operands_of(self, equation: Equation, inputs: Sequence[Value]) -> list[Any]:
        """Returns inputs with random draws rounded, unless the equation only compares them."""
        if not any(isinstance(x, Draw) for x in inputs):
            return list(inputs)
        if not any(map(is_float, equation.out_avals)):
            exact = np.bool_(False)
            return [Pair(x.exact, x.reference, exact) if isinstance(x, Draw) else x for x in inputs]
        return [self.rounded(x) for x in inputs]

    def unlifted(
        self, state: State, equation: Equation, inputs: Sequence[Value]
    ) -> tuple[Any, Sequence[Any]]:
        if any(isinstance(x, Decision) for x in inputs):
            lows, references = ([of(x) for x in inputs] for of in (low_of, reference_of))
            outs = zip(equation.bind(*lows), equation.bind(*references), strict=True)
            origin = origins(inputs)
            return state, [Decision(y, s, origin) for y, s in outs]
        outs = self.precomputed.pop(equation.path, None)
        return state, equation.bind(*inputs) if outs is None else outs

    def interpret(
        self, program: Program, state: State, values: Sequence[Value]
    ) -> tuple[Any, list[Any]]:
        """Runs the program on pairs; precomputes float-independent values in one jitted call."""
        with self.context():
            self.precomputed = program.integers.known(values, self.call)
        state, outs = run(program, self, state, values=values)
        with self.context():
            return state, [self.rounded(y) for y in outs]

    def is_reshape(self, equation: Equation, inputs: Sequence[Value]) -> bool:
        """Returns True if the result is the first input, flat: nothing has to be computed."""
        if not inputs or not isinstance(inputs[0], Pair):
            return False
        shape = equation.in_avals[0].shape
        return only_reshapes(equation) and is_flat(inputs[0].low, shape)

    def planned(self, equation: Equation, inputs: Sequence[Value]) -> tuple[Plan, Callable]:
        """Returns the cached plan and compiled code of an equation outside of loops."""
        if equation.path not in self.plans:
            plan = make_plan(self.low, equation, inputs)
            apart = self._rounds_apart(plan)
            low = self.low if apart else specialize(self.low, equation)[0]
            runs = Runs(low, self.reference)
            step = self.compiled(unrounded if apart else run_both, runs, plan)
            self.plans[equation.path] = plan, step
        return self.plans[equation.path]

    def compiled(self, step: Callable, runs: Runs, plan: Plan) -> Callable:
        """Returns compiled code, the same for equal plans."""
        key = step, runs, plan
        if key not in self.code:
            self.code[key] = compiled(step, runs, plan)
        return self.code[key]

    def evaluate(self, planned: tuple[Plan, Callable], inputs: Sequence[Value], op_params: Any):
        """Returns an equation's results in both runs; if it is recorded, its tally and samples; its
        events or None."""
        plan, step = planned
        if not self._rounds_apart(plan):
            outs, uncounted, events = self.call(step, op_params, list(inputs))
            if not uncounted:
                return outs, uncounted, events
            tainted, *counted = self.call(_count_result, op_params, *uncounted)
            outs = [dataclasses.replace(x, tainted=tainted) if isinstance(x, Pair) else x
                    for x in outs]  # fmt: skip
            return outs, counted, events
        if plan.operation == OTHER:
            arrays, scalars = self._as_operands(self.call(step, op_params, list(inputs)), inputs)
        else:
            arrays, scalars = self._operands(plan, inputs)
        combine = quotient if plan.operation in (DIV, SQRT) else product
        out, counted = self.call(elementary, combine, op_params, arrays, scalars)
        return [out], counted, None

    def _operands(self, plan: Plan, inputs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
        """Returns two flat arrays and two scalars: the operands and, elsewhere, placeholders."""
        out_shape, is_array = plan.equation.out_avals[0].shape, plan.is_array
        pairs = []
        for x, aval, w in zip(inputs, plan.equation.in_avals, is_array, strict=False):
            shape, length = (out_shape, plan.length) if w else ((), padded_size(1))
            if x.low.shape != (length,) or aval.shape not in (out_shape, ()):
                x = self.call(_broadcast_flat, aval.shape if w else (), shape, length, x)
            pairs.append(x)
        pairs = (pairs * 2)[:2]
        some = pairs[0 if is_array[0] else 1]
        arrays = [x if w else some for x, w in zip(pairs, is_array, strict=True)]
        return arrays, [self._zeros if w else x for x, w in zip(pairs, is_array, strict=True)]

    def _as_operands(self, result: tuple[Any, Any], inputs: Sequence[Value]):
        """Returns an exact result in this form, to be rounded; its inputs' taints on the four."""
        taints = taints_of(inputs)
        taints = taints if len(taints) <= 4 else [self.call(_any_tainted, taints)]
        taints = (taints + [self._zeros.tainted] * 4)[:4]
        zeros = self._zeros
        return (
            [Pair(*result, tainted) for tainted in taints[:2]],
            [Pair(zeros.low, zeros.reference, tainted) for tainted in taints[2:]],
        )

    @functools.cached_property
    def _zeros(self) -> Pair:
        """The placeholder of a scalar operand."""
        low, reference = (np.zeros(padded_size(1), t) for t in (self.carrier, self.reference.dtype))
        return jax.device_put(Pair(low, reference, np.False_))

    def call(self, f: Callable, *arguments: Any) -> Any:
        """Calls a jitted function; a subclass may compile it instead."""
        return f(*arguments)

    def _apply_traced(self, state: Statistics, plan: Plan, index: int, inputs: Sequence[Value]):
        """Applies one equation of a loop that is compiled as a whole."""
        events = None
        op_params = jnp.concatenate([state.formats[index], jnp.asarray(plan.op_params)])
        if self._rounds_apart(plan):
            exact, reference = unrounded(self.runs, plan, op_params, inputs)
            taints = [any_tainted(taints_of(inputs))]
            samples = operand_samples(plan, exact, split(plan, inputs)[0], op_params)
            out, counted = round_and_count(
                op_params, exact.astype, exact.dtype, reference, taints, samples
            )
            outs = [out]
        else:
            outs, counted, events = run_and_count(self.runs, plan, op_params, inputs)
        if counted:
            tally, samples = counted
            state = add_record(state, index, Record(tally, samples, op_params))
        if events is not None:
            state = add_events(state, index, events, not counted)
        return state, outs

    def _rounds_apart(self, plan: Plan) -> bool:
        """Returns True if the rounding is a program of its own: for one result, under emulation."""
        one_result = len(plan.equation.out_avals) == 1
        return plan.recorded and isinstance(self.low, TableEmulation) and one_result

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
        floats = [a for a in equation.out_avals if is_float(a)]
        low = self.low
        return isinstance(low, TableEmulation) and bool(floats) and not any(map(low.is_low, floats))


def release() -> None:
    """Releases the code that was compiled for particular shapes and interpretations.

    What is compiled for padded sizes alone stays, for later audits.
    """
    for function in (_broadcast_flat, lift_any, lift_from_table, round_draw, _any_tainted):
        function.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]


_count_result = jax.jit(count_result)
_any_tainted = jax.jit(any_tainted)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _broadcast_flat(shape: Sequence[int], target: Sequence[int], length: int, x: Pair) -> Pair:
    return broadcast_flat(x, shape, target, length)
