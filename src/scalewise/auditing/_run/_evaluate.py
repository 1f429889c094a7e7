"""Computes one equation in both runs: its cached plan, compiled code, results and statistics."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np

from ..._types import PyTree
from ...emulating import in_arithmetic, rounds_each
from ...interpret import Equation, Value, outlined
from ._compiled import Compiled
from ._elementary import DIV, OTHER, SQRT, TINY, elementary, elementary_uncounted, product, quotient
from ._equation import (
    EquationPlan,
    any_tainted,
    broadcast_flat,
    compiled,
    count_result,
    leave_result,
    lift_any,
    lift_from_table,
    make_plan,
    round_draw,
    run_both,
    run_draw,
    taints_of,
    unrounded,
    with_taint,
)
from ._interpretations import Runs, TableEmulation, computes_in_float32
from ._pair import SMALL, Pair, padded_size
from ._paired import Paired
from ._specialize import kind_of_run

ARRAYS = jax.Array | np.ndarray | np.generic


@dataclasses.dataclass(eq=False)
class Evaluator(Paired):
    """Computes equations on pairs, with code for each primitive, its parameters and types."""

    # by path, how each equation outside of loops is computed, and its compiled code
    plans: dict[tuple[int, ...], tuple[EquationPlan, Callable]] = dataclasses.field(
        default_factory=dict
    )
    # compiled code of equations, released with the audit
    code: dict[tuple[Callable, Runs, EquationPlan], Callable] = dataclasses.field(
        default_factory=dict
    )

    def call(self, f: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
        """Calls a jitted function; in a loop that is compiled as a whole, as a function of its own
        there, which all equations that call it with the same types share."""
        if not self.compiling:
            return f(*arguments)
        is_static = [_is_static(x) for x in arguments]
        static = tuple(x for x, w in zip(arguments, is_static, strict=True) if w)
        arrays = [x for x, w in zip(arguments, is_static, strict=True) if not w]
        return outlined(_call, (f, tuple(is_static), static), *arrays)

    def planned(self, equation: Equation, inputs: Sequence[Value]) -> tuple[EquationPlan, Callable]:
        if equation.path not in self.plans:
            plan = make_plan(self.low, equation, inputs)
            apart = self._rounds_apart(plan)
            low = self.low if apart else kind_of_run(self.low).specialize(self.low, equation)[0]
            runs = Runs(low, self.reference)
            step = self.compiled(unrounded if apart else run_both, runs, plan)
            self.plans[equation.path] = plan, step
        return self.plans[equation.path]

    def compiled(self, step: Callable, runs: Runs, plan: EquationPlan) -> Callable:
        key = step, runs, plan
        if key not in self.code:
            self.code[key] = compiled(step, runs, plan)
        return self.code[key]

    def evaluate(
        self,
        planned: tuple[EquationPlan, Callable],
        inputs: Sequence[Value],
        op_params: jax.Array,
        *past: np.ndarray,
    ):
        """Returns an equation's results in both runs; its record or None; its events or None.

        With ``past`` the operands' magnitudes follow the events (see :func:`run_both`).
        """
        plan, step = planned
        effects = plan.equation.eqn.effects  # they would be lost in an outlined call
        call = Paired.call.__get__(self) if effects else self.call
        if not self._rounds_apart(plan):
            outs, uncounted, events = call(step, op_params, list(inputs), *past)
            if not uncounted:
                return outs, None, events
            left = self._left(plan)
            count, how = (_leave_result, (left,)) if left else (_count_result, ())
            tainted, record = self.call(count, *how, op_params, *uncounted)
            return with_taint(outs, tainted), record, events
        left = self._left(plan)
        if plan.operation == OTHER:
            result = call(step, op_params, list(inputs))
            operands, is_array = self._as_operands(result, inputs), (True, True)
        else:
            operands, is_array = self._operands(plan, inputs), plan.is_array
        if left:
            options = left, plan.operation, is_array
            out, later = self.call(elementary_uncounted, *options, op_params, operands)
            return [out], later, None
        combine = quotient if plan.operation in (DIV, SQRT) else product
        some = operands[0 if is_array[0] else 1]
        arrays = [x if w else some for x, w in zip(operands, is_array, strict=True)]
        scalars = [self._zeros if w else x for x, w in zip(operands, is_array, strict=True)]
        out, record = self.call(elementary, combine, op_params, arrays, scalars)
        return [out], record, None

    def drawn(self, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
        key = (*equation.path, -1)  # the same equation may be called with other operands
        if key not in self.plans:
            plan = make_plan(self.low, equation, inputs)
            self.plans[key] = plan, self.compiled(run_draw, self.runs, plan)
        return self.call(self.plans[key][1], list(inputs))

    def _operands(self, plan: EquationPlan, inputs: Sequence[Pair]) -> list[Pair]:
        """Returns two flat operands, each an array of the result's size or a scalar."""
        out_shape, pairs = plan.equation.out_avals[0].shape, []
        for x, aval, w in zip(inputs, plan.equation.in_avals, plan.is_array, strict=False):
            shape, length = (out_shape, plan.length) if w else ((), padded_size(1))
            if x.low.shape != (length,) or aval.shape not in (out_shape, ()):
                x = self.call(_broadcast_flat, aval.shape if w else (), shape, length, x)
            pairs.append(x)
        return (pairs * 2)[:2]

    def _as_operands(self, result: Sequence[jax.Array], inputs: Sequence[Value]) -> list[Pair]:
        """Returns an exact result in this form, to be rounded. The numbers that it was added to, if
        there are any, take the place of the second operand."""
        taints = taints_of(inputs)
        taints = taints if len(taints) <= 2 else [self.call(_any_tainted, taints)]
        taints = (taints + [self._zeros.tainted] * 2)[:2]
        low, wide, *before = result
        pairs = zip((low, *before, low), taints, strict=False)
        return [Pair(x, wide, tainted) for x, tainted in pairs]

    @functools.cached_property
    def _zeros(self) -> Pair:
        low, reference = (np.zeros(padded_size(1), t) for t in (self.carrier, self.reference.dtype))
        with jax.ensure_compile_time_eval():  # a loop may be the first to ask
            return Pair(*jax.device_put((low, reference, np.False_)))

    def _left(self, plan: EquationPlan) -> int:
        """Returns how many numbers are counted later: those of a loop's small results, together,
        since each piece of a compiled program costs time to compile."""
        if not self.compiling or plan.length > SMALL[-1]:
            return 0
        return TINY if plan.size <= TINY else plan.length

    def _rounds_apart(self, plan: EquationPlan) -> bool:
        """Returns True if the rounding is a program of its own: for one result, under emulation."""
        if not plan.recorded or not isinstance(self.low, TableEmulation):
            return False
        inside = computes_in_float32(plan.equation) or rounds_each(plan.equation)
        inside = inside or in_arithmetic(plan.equation, self.low.fmt) is not None
        return len(plan.equation.out_avals) == 1 and not inside


def _is_static(argument: PyTree) -> bool:
    leaves = jax.tree.leaves(argument)
    if isinstance(argument, tuple) and not argument:  # a shape
        return True
    return bool(leaves) and not isinstance(leaves[0], ARRAYS)


def _call(options: tuple[Callable, Sequence[bool], Sequence[PyTree]], *arrays: PyTree) -> PyTree:
    f, is_static, static = options
    fixed, given = iter(static), iter(arrays)
    return f(*[next(fixed if w else given) for w in is_static])


def release() -> None:
    """Programs that were compiled for padded sizes alone stay, for later audits."""
    for function in (_broadcast_flat, lift_any, lift_from_table, round_draw, _any_tainted):
        function.clear_cache()


_count_result = Compiled(count_result, lambda op_params, low, *rest: low.size, often=True)
_leave_result = Compiled(leave_result, math.inf, static_argnums=(0,))  # only in compiled loops
_any_tainted = Compiled(any_tainted, 0)


@functools.partial(Compiled, size=lambda shape, target, length, x: length, static_argnums=(0, 1, 2))
def _broadcast_flat(shape: Sequence[int], target: Sequence[int], length: int, x: Pair) -> Pair:
    return broadcast_flat(x, shape, target, length)
