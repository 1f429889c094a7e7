"""Compiles what a program's first run needs, on all cores, before it begins."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import ShapedArray
from ..._types import PyTree
from ...interpret import Applied, Equation, Program, State, Value, is_float, lifted
from ._accumulator import Accumulator
from ._lockstep import Lockstep
from ._pair import Pair, low_of
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
            pairs = zip(inputs, equation.in_avals, strict=True)
            plain = [jnp.zeros(a.shape, a.dtype) if is_float(a) else low_of(x) for x, a in pairs]
            outs = zip(equation.bind(*plain), equation.out_avals, strict=True)
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
            lowered = cast(jax.stages.Wrapped, f).lower(*jax.tree.unflatten(tree, shapes))
            self.submitted[key] = self.pool.submit(lowered.compile)
        return f(*arguments)


def compile_ahead(program: Program, lockstep: Lockstep, accumulator: Accumulator) -> None:
    """Compiles, on all cores, what ``program`` needs outside of its loops.

    JAX caches compiled code by what was lowered, so that the run finds it.
    """

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
