"""What a program's first run will need, compiled several at a time before it begins."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...interpret import Equation, Program, is_float, lifted
from ._ledger import Ledger
from ._lockstep import Lockstep
from ._pair import Pair
from ._statistics import ABOUT


@dataclasses.dataclass(eq=False)
class Scout(Lockstep):
    """A lockstep that is traced, not run: what it would call is handed to a pool to compile.

    A loop or a branch is passed by: only the types of its results matter here.
    """

    pool: ThreadPoolExecutor = dataclasses.field(default_factory=ThreadPoolExecutor)
    found: dict[Any, Future] = dataclasses.field(default_factory=dict)

    def constant(self, x: np.ndarray, aval: Any) -> Pair:
        with jax.ensure_compile_time_eval():  # a number, as it will be in the run
            return super().constant(x, aval)

    def stepwise(self, state: Any, equation: Equation) -> int:
        return 0

    def control(self, equation: Equation, run: Callable) -> Callable:
        def passed_by(state, inputs):
            pairs = zip(inputs, equation.in_avals, strict=True)
            plain = [jnp.zeros(a.shape, a.dtype) if is_float(a) else x for x, a in pairs]
            outs = zip(equation.bind(*plain), equation.out_avals, strict=True)
            return state, [
                self.canonical(self.lift(y, a), a, "carry", equation) if is_float(a) else y
                for y, a in outs
            ]

        return passed_by

    def apply(
        self, state: Any, equation: Equation, inputs: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        if self.passes(equation, inputs):
            return state, inputs[:1]
        about = jnp.zeros(ABOUT, jnp.float64)
        outs, found = self.both(self.planned(equation, inputs), inputs, about)
        if found and Ledger not in self.found:
            integers = found[0].flushed.dtype
            self.found[Ledger] = self.pool.submit(state.prepare, integers)
        return state, outs

    def call(self, f: Any, *arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        types = [jax.typeof(x) if hasattr(x, "shape") else x for x in leaves]
        key = (f, tree, tuple(map(str, types)))
        if key not in self.found:
            blanks = [
                jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type)
                if hasattr(t, "weak_type") else t
                for t in types
            ]  # fmt: skip
            lowered = f.lower(*jax.tree.unflatten(tree, blanks))
            self.found[key] = self.pool.submit(lowered.compile)
        return f(*arguments)


def compile_ahead(program: Program, lockstep: Lockstep, ledger: Ledger) -> None:
    """Compiles what ``program`` needs outside of its loops, on all cores.

    JAX keeps what was compiled beside what it lowered, so that the run finds it.

    Args:
        program: traced.
        lockstep: the program's own.
        ledger: what takes the notes of the run.
    """

    def walked(arrays):
        return scout.walked(program, ledger, lifted(program, scout, arrays))[1]

    arrays = [
        jax.ShapeDtypeStruct(a.shape, x.dtype) if is_float(a)
        else jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type)
        for x, a in zip(program.arrays, program.in_avals, strict=True)
    ]  # fmt: skip
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        kept = {"plans": lockstep.plans, "literals": lockstep.literals}
        scout = Scout(lockstep.low, lockstep.shadow, **kept, pool=pool)
        with lockstep.context():
            jax.eval_shape(walked, arrays)
        for future in scout.found.values():
            future.result()
