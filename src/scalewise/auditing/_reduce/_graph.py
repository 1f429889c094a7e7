"""The dataflow of one run of a program in the reference dtype, with some of its arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import ShapedArray, Tracer
from ...interpret import (
    Applied,
    Argument,
    Boundary,
    Equation,
    Interpretation,
    Program,
    State,
    Value,
    is_float,
    rebind,
    run,
)

EAGER = 20_000  # results of a loop up to which its iterations run, and are known, one by one


@dataclasses.dataclass(eq=False)
class Origin:
    """Where an array comes from."""

    serial: int  # its number, the same in each run
    aval: ShapedArray  # its type
    # whose result it is; None for an argument, and for what a scan slices or stacks
    equation: Equation | None = None
    position: int = 0  # of it among the equation's results
    operands: tuple[Origin, ...] = ()  # of the equation
    constant: np.ndarray | None = None  # the number, of a literal


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=[], drop_fields=["origin"]
)
@dataclasses.dataclass(eq=False)
class Traced:
    """An array whose origin is known, except after a scan has sliced or stacked it."""

    array: Any
    origin: Any = None


class Done(Exception):
    """Raised when all arrays that are wanted are known."""


@dataclasses.dataclass(eq=False)
class LinkedRun(Interpretation):
    """Runs a program in ``dtype``, eagerly, and links each array to those it is computed from."""

    dtype: Any
    keep: frozenset[int] = frozenset()  # the serial numbers of arrays to keep
    # called with each equation, its operands, results and their origins
    visit: Callable[..., None] | None = None
    origins: list[Origin] = dataclasses.field(default_factory=list)
    kept: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # by serial number

    inline = True

    def trace(self, program: Program) -> None:
        with self.context():
            values = [
                self._traced(jnp.asarray(x).astype(self.dtype) if is_float(a) else x, a)
                for x, a in zip(program.arrays, program.in_avals, strict=True)
            ]
        with contextlib.suppress(Done):
            run(program, self, jnp.zeros(()), values=values)

    def context(self) -> contextlib.AbstractContextManager[object]:
        return jax.enable_x64(True)

    def lifts(self, aval: ShapedArray) -> bool:
        return True

    def lift(self, x: Argument, aval: ShapedArray) -> Traced:
        return self._traced(jnp.asarray(x, self.dtype) if is_float(aval) else x, aval)

    def constant(self, x: np.ndarray, aval: ShapedArray) -> Traced:
        array = jnp.asarray(x, self.dtype) if is_float(aval) else x
        return self._traced(array, aval, constant=np.asarray(x))

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        origins = tuple(map(self._origin, inputs, equation.in_avals))
        arrays = [x.array for x in inputs]
        outs = rebind(equation, arrays, self.dtype)
        values = [
            self._traced(y, a, equation=equation, position=i, operands=origins)
            for i, (y, a) in enumerate(zip(outs, equation.out_avals, strict=True))
        ]
        if self.visit is not None and not any(isinstance(y, Tracer) for y in outs):
            self.visit(equation, arrays, outs, [v.origin for v in values])
        return state, values

    unlifted = apply

    def decisions(self, chosen: Value) -> Sequence[jax.Array]:
        return (chosen.array,)

    def eager_iterations(self, state: State, equation: Equation) -> int:
        return 0 if isinstance(state, Tracer) else EAGER // equation.inner

    def canonical(
        self, value: Value, aval: ShapedArray, boundary: Boundary, equation: Equation
    ) -> Traced:
        return value if not isinstance(value.array, Tracer) else Traced(value.array)

    def inside(self, value: Any) -> Any:
        return value

    def unstack(self, value: Traced, aval: ShapedArray) -> Traced:
        return Traced(value.array)

    stack = unstack

    def control(self, equation: Equation, run: Callable) -> Callable:
        def forgetting(state: Any, inputs: Sequence[Value]) -> Any:
            state, outs = run(state, [Traced(x.array) for x in inputs])
            return state, [Traced(y.array) for y in outs]

        return forgetting

    def select(self, predicate: Value, on_true: Traced, on_false: Traced) -> Traced:
        return Traced(jnp.where(predicate.array, on_true.array, on_false.array))

    def _origin(self, value: Traced, aval: ShapedArray) -> Origin:
        if value.origin is None:
            value.origin = self._traced(value.array, aval).origin
        return value.origin

    def _traced(self, array: Any, aval: ShapedArray, **fields: Any) -> Traced:
        origin = Origin(len(self.origins), aval, **fields)
        self.origins.append(origin)
        if origin.serial in self.keep and not isinstance(array, Tracer):
            self.kept[origin.serial] = np.asarray(array)
            if len(self.kept) == len(self.keep):
                raise Done
        return Traced(array, origin)


def before(end: Origin, depth: int) -> list[Origin]:
    found, level = {end.serial: end}, [end]
    for _ in range(depth):
        level = [o for x in level for o in x.operands if o.serial not in found]
        found.update((o.serial, o) for o in level)
    return [found[serial] for serial in sorted(found)]


def after(start: Origin, origins: Sequence[Origin], depth: int) -> list[Origin]:
    distance = {start.serial: 0}
    found = []
    for origin in origins[start.serial + 1 :]:
        near = min((distance.get(o.serial, depth) for o in origin.operands), default=depth)
        if near < depth:
            distance[origin.serial] = near + 1
            found.append(origin)
    return found
