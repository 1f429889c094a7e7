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

from ...interpret import Boundary, Equation, Interpretation, Program, run
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
    run_and_count,
    run_both,
    split,
    taints_of,
    unrounded,
)
from ._flat import flat, is_flat, padded_size
from ._interpretations import Reference, Runs, TableEmulation
from ._pair import Pair, shaped
from ._rounding import format_params
from ._specialize import is_elementwise, specialize
from ._statistics import Record, Statistics, add_record

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

    inline = True

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

    def lift(self, x: Any, aval: Any) -> Pair:
        if isinstance(self.low, TableEmulation):
            x = flat(x, padded_size(math.prod(aval.shape)))
            params = format_params(self.low.fmt, self.low.saturate)
            return Pair(*self.call(lift_from_table, self.runs, x, params))
        shape = aval.shape
        if is_elementwise(self.low):
            x = flat(x, padded_size(math.prod(shape)))
            shape = x.shape
        aval = jax.ShapeDtypeStruct(shape, aval.dtype)
        return Pair(*self.call(lift_any, self.runs, aval, x))

    def constant(self, x: np.ndarray, aval: Any) -> Pair:
        value = float(x) if x.size == 1 else math.nan
        if value in self.constants:
            new = np.full(x.shape, self.constants[value])
            kept = new == value
            low = jnp.asarray(new, self.carrier) if kept else self.low.constant(new, aval)
            return Pair(low, self.reference.constant(x, aval), np.bool_(False))
        key = (value, aval.dtype) if x.ndim == 0 and value == value else None
        if key is None or key not in self.literals:
            from_table = isinstance(self.low, TableEmulation)
            low, reference = self.low.constant(x, aval), self.reference.constant(x, aval)
            if key is None or isinstance(low, Tracer):
                return Pair(low, reference, np.bool_(False))
            result = np.asarray(low if from_table else self.low.lower(low, aval))
            tainted = np.isfinite(x) & ~np.isfinite(result.astype(np.float64))
            if from_table:  # laid out like any other array
                low, reference = flat(low, padded_size(1)), flat(reference, padded_size(1))
            self.literals[key] = Pair(low, reference, np.bool_(tainted))
        return self.literals[key]

    def lower(self, value: Pair, aval: Any) -> jax.Array:
        return self.low.lower(shaped(value, aval).low, aval)

    def canonical(self, value: Pair, aval: Any, boundary: Boundary, equation: Equation) -> Pair:
        value = shaped(value, aval)
        return Pair(
            self.low.canonical(value.low, aval, boundary, equation),
            self.reference.canonical(value.reference, aval, boundary, equation),
            jnp.asarray(value.tainted),
        )

    def select(self, predicate: jax.Array, on_true: Pair, on_false: Pair) -> Pair:
        return Pair(
            self.low.select(predicate, on_true.low, on_false.low),
            self.reference.select(predicate, on_true.reference, on_false.reference),
            on_true.tainted | on_false.tainted,
        )

    def unstack(self, value: Pair, aval: Any) -> Pair:
        value = shaped(value, aval)
        spread = jnp.broadcast_to if isinstance(value.tainted, Tracer) else np.broadcast_to
        return Pair(
            self.low.unstack(value.low, aval),
            self.reference.unstack(value.reference, aval),
            spread(value.tainted, aval.shape[:1]),
        )

    def stack(self, value: Pair, aval: Any) -> Pair:
        return Pair(
            self.low.stack(value.low, aval),
            self.reference.stack(value.reference, aval),
            value.tainted.any(),
        )

    def eager_iterations(self, state: Any, equation: Equation) -> int:
        """Returns how many iterations of a loop run one by one: those up to MAX_EAGER results."""
        return MAX_EAGER // equation.inner if isinstance(state, Accumulator) else 0

    def control(self, equation: Equation, run: Callable) -> Callable:
        def with_shapes(state, inputs):
            pairs = zip(inputs, equation.in_avals, strict=True)
            return run(state, [shaped(x, a) for x, a in pairs])

        loop = self.loops.setdefault(equation.path, jax.jit(with_shapes))

        def run_loop(state, inputs):
            if not isinstance(state, Accumulator):
                return with_shapes(state, inputs)
            statistics, outs = loop(state.flush(), inputs)
            state.replace(statistics)
            return state, outs

        return run_loop

    def apply(
        self, state: Any, equation: Equation, inputs: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        if self.is_reshape(equation, inputs):
            return state, inputs[:1]
        if not isinstance(state, Accumulator):
            return self._apply_traced(state, make_plan(self.low, equation, inputs), inputs)
        plan, step = self.planned(equation, inputs)
        index = self._index(plan, equation)
        op_params = state.op_params(index, plan.op_params)
        outs, counted = self.evaluate((plan, step), inputs, op_params)
        if counted:
            tally, samples = counted
            state.add(index, Record(tally, samples, op_params), plan.length)
        return state, outs

    def unlifted(
        self, state: Any, equation: Equation, inputs: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        outs = self.precomputed.pop(equation.path, None)
        return state, equation.bind(*inputs) if outs is None else outs

    def interpret(
        self, program: Program, state: Any, values: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        """Runs the program on pairs; precomputes float-independent values in one jitted call."""
        with self.context():
            self.precomputed = program.integers.known(values, self.call)
        return run(program, self, state, values=values)

    def is_reshape(self, equation: Equation, inputs: Sequence[Any]) -> bool:
        """Returns True if the result is the first input, flat: nothing has to be computed."""
        if not inputs or not isinstance(inputs[0], Pair):
            return False
        shape = equation.in_avals[0].shape
        return only_reshapes(equation) and is_flat(inputs[0].low, shape)

    def planned(self, equation: Equation, inputs: Sequence[Any]) -> tuple[Plan, Callable]:
        """Returns the cached plan and compiled code of an equation outside of loops."""
        if equation.path not in self.plans:
            plan = make_plan(self.low, equation, inputs)
            apart = self._rounds_apart(plan)
            low = self.low if apart else specialize(self.low, equation)[0]
            runs = Runs(low, self.reference)
            step = compiled(unrounded if apart else run_both, runs, plan)
            self.plans[equation.path] = plan, step
        return self.plans[equation.path]

    def evaluate(self, planned: tuple[Plan, Callable], inputs: Sequence[Any], op_params: Any):
        """Returns an equation's results in both runs; if it is recorded, its tally and samples."""
        plan, step = planned
        if not self._rounds_apart(plan):
            outs, uncounted = self.call(step, op_params, list(inputs))
            if not uncounted:
                return outs, uncounted
            tainted, *counted = self.call(_count_result, op_params, *uncounted)
            outs = [dataclasses.replace(x, tainted=tainted) if isinstance(x, Pair) else x
                    for x in outs]  # fmt: skip
            return outs, counted
        if plan.operation == OTHER:
            arrays, scalars = self._as_operands(self.call(step, op_params, list(inputs)), inputs)
        else:
            arrays, scalars = self._operands(plan, inputs)
        combine = quotient if plan.operation in (DIV, SQRT) else product
        out, counted = self.call(elementary, combine, op_params, arrays, scalars)
        return [out], counted

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

    def _as_operands(self, result: tuple[Any, Any], inputs: Sequence[Any]):
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

    def _apply_traced(self, state: Statistics, plan: Plan, inputs: Sequence[Any]):
        """Applies one equation of a loop that is compiled as a whole."""
        index = self._index(plan, plan.equation)
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
            outs, counted = run_and_count(self.runs, plan, op_params, inputs)
        if not counted:
            return state, outs
        tally, samples = counted
        return add_record(state, index, Record(tally, samples, op_params)), outs

    def _rounds_apart(self, plan: Plan) -> bool:
        """Returns True if the rounding is a program of its own: for one result, under emulation."""
        one_result = len(plan.equation.out_avals) == 1
        return plan.recorded and isinstance(self.low, TableEmulation) and one_result

    def _index(self, plan: Plan, equation: Equation) -> int:
        """Returns the equation's index, a new one at its first visit; 0 if it isn't recorded."""
        if not plan.recorded:
            return 0
        index = self.indices.setdefault(equation.path, len(self.indices))
        if index == len(self.recorded):
            self.recorded.append(equation)
        return index


_count_result = jax.jit(count_result)
_any_tainted = jax.jit(any_tainted)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _broadcast_flat(shape: Sequence[int], target: Sequence[int], length: int, x: Pair) -> Pair:
    return broadcast_flat(x, shape, target, length)
