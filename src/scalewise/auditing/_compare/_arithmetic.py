"""The arithmetic of a function under a recipe, a policy or an emulation: its formats by operation,
and runs of it with that of another one, or without rounding, in some operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...autoscaling import Boundaries, interpretation
from ...emulating import Emulation
from ...formats import BlockFormat
from ...formats import format as format_
from ...interpret import Equation, Interpretation, Program, Value, is_float, map_floats, run
from ...scalifying import EveryOp
from .._tape._arithmetic import Arithmetic, Run
from .._tape._cells import Cell

Path = tuple[int, ...]
Instead = Mapping[Path, tuple[Equation, Arithmetic] | None]


def formats_of(program: Program, low: Interpretation | None) -> Mapping[Path, str]:
    """Returns by an operation's path the formats of its operands, or of its result, that an
    interpretation rounds to; the operations that compute in the program's own dtypes have none."""
    found: dict[Path, str] = {}
    every = isinstance(low, EveryOp)

    def note(
        kind: str, where: Equation | str, shape: Any, formats: Sequence[Any], scale: Any = None
    ) -> None:
        if isinstance(where, Equation) and kind in ("contraction", "result"):
            plain = [getattr(x, "format", x) for x in formats]
            names = [x.name if isinstance(x, BlockFormat) else format_(x).name for x in plain]
            # every operation: of the result, whose operands have been rounded
            found.setdefault(where.path, " x ".join(names[:1] if every else names))

    if isinstance(low, Boundaries | EveryOp):
        noted = interpretation(low.recipe, record=note)
        jax.eval_shape(lambda: _lowered(program, noted))
    elif isinstance(low, Emulation):
        noted = Rounded(low.fmt.name, found)
        jax.eval_shape(lambda: _lowered(program, noted))
    return found


def _lowered(program: Program, low: Interpretation) -> list[Any]:
    lifted = map_floats(low.lift, program.arrays, program.in_avals)
    return map_floats(low.lower, run(program, low, (), values=lifted)[1], program.out_avals)


@dataclasses.dataclass(eq=False)
class Rounded(Interpretation):
    """Notes the operations whose results an emulation rounds."""

    name: str
    found: dict[Path, str]

    def apply(self, state: Any, equation: Equation, inputs: Sequence[Value]) -> Any:
        if any(map(is_float, equation.out_avals)):
            self.found[equation.path] = self.name
        return super().apply(state, equation, inputs)


@dataclasses.dataclass(eq=False)
class Altered:
    """An arithmetic with another one, or with none, in some operations.

    Attributes:
        own: of the others.
        instead: by path; None where nothing is rounded.
    """

    own: Arithmetic
    instead: Instead

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def run(self, equation: Equation, cells: Sequence[Cell]) -> Run:
        if equation.path not in self.instead:
            return self.own.run(equation, cells)
        other = self.instead[equation.path]
        if other is None:
            return Run()
        theirs, arithmetic = other
        return arithmetic.run(theirs, self._theirs(equation, cells, arithmetic))

    def results(
        self, equation: Equation, cells: Sequence[Cell], exact: Sequence[Any], run: Run
    ) -> list[tuple[Any, Any]]:
        if equation.path not in self.instead:
            return self.own.results(equation, cells, exact, run)
        other = self.instead[equation.path]
        if other is not None:
            theirs, arithmetic = other
            cells = self._theirs(equation, cells, arithmetic)
            exact = [y for y, _ in arithmetic.results(theirs, cells, exact, run)]
        pairs = zip(exact, equation.out_avals, strict=True)
        return [(y, _value(self.own, y, aval)) for y, aval in pairs]

    def _theirs(
        self, equation: Equation, cells: Sequence[Cell], arithmetic: Arithmetic
    ) -> list[Cell]:
        """Returns cells whose values are another arithmetic's."""
        pairs = zip(cells, equation.in_avals, strict=True)
        return [dataclasses.replace(x, value=_value(arithmetic, x.low, a)) for x, a in pairs]


def _value(arithmetic: Arithmetic, x: Any, aval: Any) -> Any:
    if not is_float(aval):
        return None
    return arithmetic.low.lift(jnp.asarray(x, aval.dtype), aval)
