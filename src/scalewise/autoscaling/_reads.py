"""What a program does with its parameters: multiplies them, or looks up their rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import jax
from jax import lax

from .._jax import ShapedArray
from .._types import PyTree
from ..interpret import (
    CONTRACTIONS,
    Applied,
    Argument,
    Boundary,
    Equation,
    Interpretation,
    State,
    is_float,
    run,
    trace,
)
from ..primitives import Family, names, params

MOVES = names(lambda row: row.family is Family.STRUCTURAL)
Use = Literal["product", "lookup", "other"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class _Parameter:
    """An array; ``path`` is that of the parameter whose elements it has, None for others."""

    data: jax.Array
    path: str | None = dataclasses.field(default=None, metadata={"static": True})


@dataclasses.dataclass(frozen=True, eq=False)
class _Reads(Interpretation):
    uses: dict[str, set[Use]]

    def lift(self, x: Argument, aval: ShapedArray) -> _Parameter:
        return _Parameter(x)

    def lower(self, value: _Parameter, aval: ShapedArray) -> jax.Array:
        return value.data

    def canonical(
        self, value: _Parameter, aval: ShapedArray, boundary: Boundary, equation: Equation
    ) -> _Parameter:
        return _Parameter(value.data)

    def select(self, predicate: jax.Array, on_true: _Parameter, on_false: _Parameter) -> _Parameter:
        return _Parameter(lax.select(predicate, on_true.data, on_false.data))

    def apply(self, state: State, equation: Equation, inputs: Sequence[PyTree]) -> Applied:
        values = [x for x in inputs if isinstance(x, _Parameter)]
        use = _use(equation)
        for x in values:
            if x.path is not None and use is not None:
                self.uses.setdefault(x.path, set()).add(use)
        kept = values[0].path if use is None and len(values) == 1 else None
        outs = equation.bind(*[x.data if isinstance(x, _Parameter) else x for x in inputs])
        pairs = zip(outs, equation.out_avals, strict=True)
        return state, [_Parameter(y, kept) if self.lifts(a) else y for y, a in pairs]


def _use(equation: Equation) -> Use | None:
    """Returns what an equation does with an operand; None if it moves the elements of one.

    A gather of vectors looks them up, as in an embedding; one of matrices selects weights, as of a
    layer or an expert.
    """
    if equation.name in CONTRACTIONS:
        return "product"
    if equation.name == "gather":
        return "lookup" if sum(n != 1 for n in params.slice_sizes(equation)) < 2 else None
    return None if equation.name in MOVES else "other"


def parameter_uses(f: Callable, tree: PyTree, name: str) -> dict[str, set[Use]]:
    """Returns what a function of a pytree does with each array, by ``keystr``; it isn't run."""
    reads = _Reads({})
    traced = trace(f, reads, (tree,), {}, name=name)

    def arrays(given: Sequence[jax.Array]) -> list[PyTree]:
        values = [
            _Parameter(x, path.removeprefix("[0]")) if is_float(aval) else x
            for x, path, aval in zip(given, traced.arguments, traced.in_avals, strict=True)
        ]
        return run(traced, reads, 0, values=values)[1]

    jax.eval_shape(arrays, list(traced.arrays))
    return reads.uses
