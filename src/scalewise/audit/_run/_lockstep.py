"""The interpretation behind an audit: a low lane and its shadow, equation by equation."""

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
from ._elementary import DIV, GIVEN, SQRT, elementary, finished, product, quotient
from ._flat import flat, is_flat, room
from ._lane import alike, number_by_number
from ._lanes import Rounded, Wide
from ._ledger import Ledger
from ._pair import Pair, shaped
from ._rounding import as_row
from ._statistics import Note, Statistics, take
from ._steps import (
    Plan,
    anyhow,
    compiled,
    either,
    exactly,
    joined,
    laid_out,
    lanes,
    lifted,
    lifted_anyhow,
    marks_of,
    noted,
    plan,
    reshapes,
    sampled,
    unrounded,
)

EAGER = 2000  # results up to which a loop is walked turn by turn: nothing of it is compiled


@dataclasses.dataclass(eq=False)
class Lockstep(Interpretation):
    """Two interpretations side by side, and statistics of each equation as the state.

    The low lane is just what ``low`` alone would compute, the shadow what ``shadow`` alone would.
    The state is a :class:`Ledger`: the program runs equation by equation, each compiled once for
    its primitive, parameters and types, branches and short loops too. In a long loop, which is
    compiled as a whole, it is :class:`Statistics`.

    Attributes:
        low: any interpretation; :class:`Rounded` takes each equation's format from the state.
        shadow: of float32 or float64.
        rows: the row of each equation met so far, by its path.
        seen: the equations, in the order of their rows.
        kept: compiled loops, by path.
        plans: how each equation outside of loops is computed, and the compiled code, by path.
        constants: literals that the low lane has otherwise, by number; one that is its own
            replacement is kept as it is, not rounded.
        literals: scalars lifted so far.
        known: the results of equations that depend on no float, by path, until they are met.
    """

    low: Interpretation
    shadow: Wide
    rows: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)
    seen: list[Equation] = dataclasses.field(default_factory=list)
    kept: dict[tuple[int, ...], Callable] = dataclasses.field(default_factory=dict)
    plans: dict[tuple[int, ...], tuple[Plan, Callable]] = dataclasses.field(default_factory=dict)
    constants: dict[float, float] = dataclasses.field(default_factory=dict)
    literals: dict[tuple[float, Any], Pair] = dataclasses.field(default_factory=dict)
    known: dict[tuple[int, ...], list[Any]] = dataclasses.field(default_factory=dict)

    inline = True

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return jax.enable_x64(True)

    @property
    def stored(self) -> Any:
        """The dtype in which the numbers of a low lane of one format wait."""
        assert isinstance(self.low, Rounded)
        return self.low.stored

    def is_argument(self, leaf: Any) -> bool:
        return self.low.is_argument(leaf)

    def abstract(self, leaf: Any) -> Any:
        return self.low.abstract(leaf)

    def lift(self, x: Any, aval: Any) -> Pair:
        if isinstance(self.low, Rounded):
            whole = flat(x, room(math.prod(aval.shape)))
            row = as_row(self.low.fmt, self.low.saturate)
            return Pair(*self.call(lifted, self.low, self.shadow, whole, row))
        shape = aval.shape
        if number_by_number(self.low):
            x = flat(x, room(math.prod(shape)))
            shape = x.shape
        aval = jax.ShapeDtypeStruct(shape, aval.dtype)
        return Pair(*self.call(lifted_anyhow, self.low, self.shadow, aval, x))

    def constant(self, x: np.ndarray, aval: Any) -> Pair:
        value = float(x) if x.size == 1 else math.nan
        if value in self.constants:
            new = np.full(x.shape, self.constants[value])
            kept = new == value
            low = jnp.asarray(new, self.stored) if kept else self.low.constant(new, aval)
            return Pair(low, self.shadow.constant(x, aval), np.bool_(False))
        key = (value, aval.dtype) if x.ndim == 0 and value == value else None
        if key is None or key not in self.literals:
            low, shadow = self.low.constant(x, aval), self.shadow.constant(x, aval)
            if key is None or isinstance(low, Tracer):
                return Pair(low, shadow, np.bool_(False))
            result = np.asarray(low if isinstance(self.low, Rounded) else self.low.lower(low, aval))
            marred = np.isfinite(x) & ~np.isfinite(result.astype(np.float64))
            if isinstance(self.low, Rounded):  # as any other number
                low, shadow = flat(low, room(1)), flat(shadow, room(1))
            self.literals[key] = Pair(low, shadow, np.bool_(marred))
        return self.literals[key]

    def lower(self, value: Pair, aval: Any) -> jax.Array:
        return self.low.lower(shaped(value, aval).low, aval)

    def canonical(self, value: Pair, aval: Any, boundary: Boundary, equation: Equation) -> Pair:
        value = shaped(value, aval)
        return Pair(
            self.low.canonical(value.low, aval, boundary, equation),
            self.shadow.canonical(value.shadow, aval, boundary, equation),
            jnp.asarray(value.marred),
        )

    def select(self, predicate: jax.Array, on_true: Pair, on_false: Pair) -> Pair:
        return Pair(
            self.low.select(predicate, on_true.low, on_false.low),
            self.shadow.select(predicate, on_true.shadow, on_false.shadow),
            on_true.marred | on_false.marred,
        )

    def spread(self, value: Pair, aval: Any) -> Pair:
        value = shaped(value, aval)
        spread = jnp.broadcast_to if isinstance(value.marred, Tracer) else np.broadcast_to
        return Pair(
            self.low.spread(value.low, aval),
            self.shadow.spread(value.shadow, aval),
            spread(value.marred, aval.shape[:1]),
        )

    def gather(self, value: Pair, aval: Any) -> Pair:
        return Pair(
            self.low.gather(value.low, aval),
            self.shadow.gather(value.shadow, aval),
            value.marred.any(),
        )

    def stepwise(self, state: Any, equation: Equation) -> int:
        """Turns that are walked one by one: as many as make EAGER results."""
        return EAGER // equation.inner if isinstance(state, Ledger) else 0

    def control(self, equation: Equation, run: Callable) -> Callable:
        def with_shapes(state, inputs):
            pairs = zip(inputs, equation.in_avals, strict=True)
            return run(state, [shaped(x, a) for x, a in pairs])

        whole = self.kept.setdefault(equation.path, jax.jit(with_shapes))

        def called(state, inputs):
            if not isinstance(state, Ledger):
                return with_shapes(state, inputs)
            statistics, outs = whole(state.settle(), inputs)
            state.replace(statistics)
            return state, outs

        return called

    def apply(
        self, state: Any, equation: Equation, inputs: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        if self.passes(equation, inputs):
            return state, inputs[:1]
        if not isinstance(state, Ledger):
            how = plan(self.low, equation, inputs)
            return self._traced(state, how, inputs)
        how, step = self.planned(equation, inputs)
        row = self._row(how, equation)
        about = state.about(row, how.about)
        outs, found = self.both((how, step), inputs, about)
        if found:
            tally, samples = found
            state.add(row, Note(tally, samples, about), how.length)
        return state, outs

    def unlifted(
        self, state: Any, equation: Equation, inputs: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        outs = self.known.pop(equation.path, None)
        return state, equation.bind(*inputs) if outs is None else outs

    def walked(self, program: Program, state: Any, values: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The program on pairs (see :func:`run`); what depends on no float is computed at once."""
        with self.context():
            self.known = program.integers.known(values, self.call)
        return run(program, self, state, values=values)

    def passes(self, equation: Equation, inputs: Sequence[Any]) -> bool:
        """Whether an equation only gives flat values another shape: nothing is to be done."""
        if not inputs or not isinstance(inputs[0], Pair):
            return False
        shape = equation.in_avals[0].shape
        return reshapes(equation) and is_flat(inputs[0].low, shape)

    def planned(self, equation: Equation, inputs: Sequence[Any]) -> tuple[Plan, Callable]:
        """How an equation outside of loops is computed, found out once."""
        if equation.path not in self.plans:
            how = plan(self.low, equation, inputs)
            alone = self._alone(how)
            low = self.low if alone else alike(self.low, equation)[0]
            step = compiled(exactly if alone else either, (low, self.shadow), how)
            self.plans[equation.path] = how, step
        return self.plans[equation.path]

    def both(self, planned: tuple[Plan, Callable], inputs: Sequence[Any], about: Any):
        """An equation's results, and tally and samples if it is noted."""
        how, step = planned
        if not self._alone(how):
            outs, found = self.call(step, about, list(inputs))
            if not found:
                return outs, found
            marred, *found = self.call(_noted, about, *found)
            outs = [dataclasses.replace(x, marred=marred) if isinstance(x, Pair) else x
                    for x in outs]  # fmt: skip
            return outs, found
        if how.operation == GIVEN:
            arrays, scalars = self._given(self.call(step, about, list(inputs)), inputs)
        else:
            arrays, scalars = self._operands(how, inputs)
        combine = quotient if how.operation in (DIV, SQRT) else product
        out, found = self.call(elementary, combine, about, arrays, scalars)
        return [out], found

    def _operands(self, how: Plan, inputs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
        """Two flat arrays and two numbers, of which two are an equation's operands."""
        own, whole = how.equation.out_avals[0].shape, how.whole
        pairs = []
        for x, aval, w in zip(inputs, how.equation.in_avals, whole, strict=False):
            shape, length = (own, how.length) if w else ((), room(1))
            if x.low.shape != (length,) or aval.shape not in (own, ()):
                x = self.call(_laid_out, aval.shape if w else (), shape, length, x)
            pairs.append(x)
        pairs = (pairs * 2)[:2]
        some = pairs[0 if whole[0] else 1]
        arrays = [x if w else some for x, w in zip(pairs, whole, strict=True)]
        return arrays, [self._nothing if w else x for x, w in zip(pairs, whole, strict=True)]

    def _given(self, result: tuple[Any, Any], inputs: Sequence[Any]):
        """The same of an exact result that only has to be rounded, with the inputs' marks."""
        marks = marks_of(inputs)
        marks = marks if len(marks) <= 4 else [self.call(_joined, marks)]
        marks = (marks + [self._nothing.marred] * 4)[:4]
        blank = self._nothing
        return (
            [Pair(*result, marred) for marred in marks[:2]],
            [Pair(blank.low, blank.shadow, marred) for marred in marks[2:]],
        )

    @functools.cached_property
    def _nothing(self) -> Pair:
        """What stands for a number where there is none."""
        low, shadow = (np.zeros(room(1), t) for t in (self.stored, self.shadow.dtype))
        return jax.device_put(Pair(low, shadow, np.False_))

    def call(self, f: Callable, *arguments: Any) -> Any:
        """One of the compiled functions, run."""
        return f(*arguments)

    def _traced(self, state: Statistics, how: Plan, inputs: Sequence[Any]):
        """The same in a loop that is compiled as a whole."""
        row = self._row(how, how.equation)
        about = jnp.concatenate([state.formats[row], jnp.asarray(how.about)])
        if self._alone(how):
            assert isinstance(self.low, Rounded)
            lows, shadows = lanes(how, inputs)
            exact, shadow = unrounded(self.low, self.shadow, how, about, lows, shadows)
            marks, samples = [joined(marks_of(inputs))], sampled(how, exact, lows, about)
            out, found = finished(about, exact.astype, exact.dtype, shadow, marks, samples)
            outs = [out]
        else:
            outs, found = anyhow(self.low, self.shadow, how, about, inputs)
        if not found:
            return state, outs
        tally, samples = found
        return take(state, row, Note(tally, samples, about)), outs

    def _alone(self, how: Plan) -> bool:
        """Whether the rounding is a program of its own: one result, in a lane of one format."""
        return how.noted and isinstance(self.low, Rounded) and len(how.equation.out_avals) == 1

    def _row(self, how: Plan, equation: Equation) -> int:
        """The equation's row, a new one if it is met for the first time; 0 if nothing is noted."""
        if not how.noted:
            return 0
        row = self.rows.setdefault(equation.path, len(self.rows))
        if row == len(self.seen):
            self.seen.append(equation)
        return row


_noted = jax.jit(noted)
_joined = jax.jit(joined)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _laid_out(shape: Sequence[int], own: Sequence[int], length: int, x: Pair) -> Pair:
    return laid_out(x, shape, own, length)
