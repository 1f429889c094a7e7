"""The interpretation behind an audit: a low lane and its shadow, equation by equation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from ..emulate import EXACT
from ..interpret import Boundary, Equation, Interpretation, is_float, rebind
from ..rounding import to_float64
from ._lanes import Rounded, Wide
from ._rounding import round_by
from ._statistics import Statistics, fold, note, thin

ADDITIONS = {"add": 1, "add_any": 1, "sub": -1}
CHOOSES = frozenset({"select_n", "max", "min", "clamp", "gather", "slice", "dynamic_slice"})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """One float array twice.

    Attributes:
        low: the low lane's value.
        shadow: the shadow's.
        marred: bool scalar, whether ``low`` isn't finite somewhere where ``shadow`` is.
    """

    low: Any
    shadow: Any
    marred: Any


@dataclasses.dataclass(eq=False)
class Lockstep(Interpretation):
    """Two interpretations side by side, and statistics of each equation as the state.

    The low lane is just what ``low`` alone would compute, the shadow what ``shadow`` alone would.
    Called with arrays rather than under ``jit`` it runs equation by equation, each compiled once
    for its primitive, parameters and types, loops and branches as a whole.

    Attributes:
        low: any interpretation; :class:`Rounded` takes each equation's format from the state.
        shadow: of float32 or float64.
        rows: the row of each equation met so far, by its path.
        seen: the equations, in the order of their rows.
        kept: compiled loops and branches, by path.
        constants: literals that the low lane has otherwise, by number; one that is its own
            replacement is kept as it is, not rounded.
        literals: scalars lifted so far.
    """

    low: Interpretation
    shadow: Wide
    rows: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)
    seen: list[Equation] = dataclasses.field(default_factory=list)
    kept: dict[tuple[int, ...], Callable] = dataclasses.field(default_factory=dict)
    constants: dict[float, float] = dataclasses.field(default_factory=dict)
    literals: dict[tuple[float, str], Pair] = dataclasses.field(default_factory=dict)

    inline = True

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return jax.enable_x64(True)

    def is_argument(self, leaf: Any) -> bool:
        return self.low.is_argument(leaf)

    def abstract(self, leaf: Any) -> Any:
        return self.low.abstract(leaf)

    def lift(self, x: Any, aval: Any) -> Pair:
        plain = x.value() if self.low.is_argument(x) else x
        low, shadow = self.low.lift(x, aval), self.shadow.lift(plain, aval)
        result = _plain(self.low, low, aval)
        return Pair(low, shadow, _breaks(result, shadow))

    def constant(self, x: np.ndarray, aval: Any) -> Pair:
        number = float(x) if x.size == 1 else math.nan
        if number in self.constants:
            new = np.full(x.shape, self.constants[number])
            low = jnp.asarray(new, jnp.float64) if new == number else self.low.constant(new, aval)
            return Pair(low, self.shadow.constant(x, aval), np.bool_(False))
        key = (number, str(aval.dtype)) if x.ndim == 0 and number == number else None
        if key is None or key not in self.literals:
            low, shadow = self.low.constant(x, aval), self.shadow.constant(x, aval)
            if key is None or isinstance(low, Tracer):
                return Pair(low, shadow, np.bool_(False))
            marred = np.isfinite(x) & ~np.isfinite(np.asarray(_plain(self.low, low, aval)))
            self.literals[key] = Pair(low, shadow, np.bool_(marred))
        return self.literals[key]

    def lower(self, value: Pair, aval: Any) -> jax.Array:
        return self.low.lower(value.low, aval)

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
        return Pair(
            self.low.spread(value.low, aval),
            self.shadow.spread(value.shadow, aval),
            jnp.broadcast_to(value.marred, aval.shape[:1]),
        )

    def gather(self, value: Pair, aval: Any) -> Pair:
        return Pair(
            self.low.gather(value.low, aval),
            self.shadow.gather(value.shadow, aval),
            jnp.any(value.marred),
        )

    def control(self, equation: Equation, run: Callable) -> Callable:
        def with_shapes(state, inputs):
            pairs = zip(inputs, equation.in_avals, strict=True)
            return run(state, [shaped(x, a) for x, a in pairs])

        return self.kept.setdefault(equation.path, jax.jit(with_shapes))

    def turn(self, state: Statistics, equation: Equation) -> Statistics:
        n = len(equation.path)
        rows = [r for path, r in self.rows.items() if path[:n] == equation.path]
        return fold(state, min(rows), max(rows) + 1) if rows else state

    def apply(
        self, state: Statistics, equation: Equation, inputs: Sequence[Any]
    ) -> tuple[Statistics, Sequence[Any]]:
        noted = equation.name not in EXACT and any(map(is_float, equation.out_avals))
        row = 0
        if noted:
            row = self.rows.setdefault(equation.path, len(self.rows))
            if row == len(self.seen):
                self.seen.append(equation)
        eager = not any(isinstance(x, Tracer) for x in jax.tree.leaves((inputs, state.counts)))
        sign = ADDITIONS.get(equation.name, 0)
        if noted and isinstance(self.low, Rounded) and len(equation.out_avals) == 1:
            step = functools.partial(_wide_step, self.shadow, equation)
            if eager:
                step = _compiled(_wide_step, (self.shadow,), _Signature.of(self.low, equation))
            wide, marred = step(list(inputs))
            ending = _finish if eager else finish
            state, out = ending(state, row, wide, marred, sign)
            return state, [out]
        step = functools.partial(_step, self.low, self.shadow, equation, noted)
        if eager:
            fixed = (self.low, self.shadow)
            step = _compiled(_step_of(noted), fixed, _Signature.of(self.low, equation))
        outs, marred, lanes = step(state.formats, row, list(inputs))
        if noted:
            record = _note if eager else note
            state, marred = record(state, row, lanes[:3], lanes[3:], sign, ~marred)
            outs = [
                dataclasses.replace(y, marred=marred) if isinstance(y, Pair) else y for y in outs
            ]
        return state, outs


_note = jax.jit(note, donate_argnums=0, static_argnums=4)


@dataclasses.dataclass(frozen=True)
class _Signature:
    """An equation but for its place: what decides the code that it compiles to."""

    key: Hashable
    equation: Equation = dataclasses.field(compare=False)

    @classmethod
    def of(cls, low: Interpretation, equation: Equation) -> _Signature:
        types = tuple((a.shape, a.dtype) for a in equation.in_avals + equation.out_avals)
        params = tuple(sorted(equation.params.items()))
        key = (equation.name, params, types)
        try:
            hash(key)
        except TypeError:
            key = id(equation.eqn)
        if isinstance(low, Rounded):
            return cls(key, equation)
        return cls((key, equation.scope, equation.source), equation)


@functools.lru_cache(maxsize=8192)
def _compiled(step: Callable, fixed: tuple[Any, ...], signature: _Signature) -> Callable:
    def run(*arguments):
        return step(*fixed, signature.equation, *arguments)

    run.__name__ = signature.equation.name.replace("-", "_")
    return jax.jit(run)


def _lanes_of(equation: Equation, inputs):
    """The low inputs, the shadow's, and whether one of them is marred."""
    marred = jnp.asarray(False)
    for x in inputs:
        marred = marred | x.marred if isinstance(x, Pair) else marred
    inputs = [shaped(x, a) for x, a in zip(inputs, equation.in_avals, strict=True)]
    lows = [x.low if isinstance(x, Pair) else x for x in inputs]
    return lows, [x.shadow if isinstance(x, Pair) else x for x in inputs], marred


def shaped(value: Any, aval: Any) -> Any:
    """A value whose arrays have their own shape again, if they were kept flat."""
    if not isinstance(value, Pair) or not isinstance(value.low, jax.Array):
        return value
    if value.low.shape == aval.shape == value.shadow.shape:
        return value
    low, shadow = value.low.reshape(aval.shape), value.shadow.reshape(aval.shape)
    return Pair(low, shadow, value.marred)


def _wide_step(shadow: Wide, equation: Equation, inputs):
    """One equation before its rounding: what alone depends on the primitive.

    Returns:
        The exact result of the low inputs in float64 and the shadow's, flat, so that what follows
        depends on their size alone; for an addition samples of the low inputs; whether the inputs
        are marred.
    """
    lows, shadows, marred = _lanes_of(equation, inputs)
    (exact,) = rebind(equation, lows, jnp.float64)
    (wide,) = shadow.apply((), equation, shadows)[1]
    return [exact.reshape(-1), wide.reshape(-1), *_addends(equation, lows)], marred


def finish(state: Statistics, row: Any, wide: Any, marred: Any, sign: int):
    """The rounding of an exact result and what is to be noted of it: one program for each size."""
    exact, shadow, *addends = wide
    low = round_by(exact, lax.dynamic_index_in_dim(state.formats, row, keepdims=False))
    lanes = [low, exact, shadow.astype(jnp.float64)]
    state, marred = note(state, row, lanes, addends, sign, ~marred)
    return state, Pair(low, shadow, marred)


_finish = jax.jit(finish, donate_argnums=0, static_argnums=4)


@functools.cache
def _step_of(noted: bool) -> Callable:
    def step(low, shadow, equation, formats, row, inputs):
        return _step(low, shadow, equation, noted, formats, row, inputs)

    return step


def _step(low, shadow, equation: Equation, noted: bool, formats, row, inputs):
    """One equation in both lanes, whatever the low lane is.

    Returns:
        Its outputs; whether its inputs are marred; the low result, the exact one and the shadow's
        in float64 and flat, then (for an addition) samples of the low inputs.
    """
    lows, shadows, marred = _lanes_of(equation, inputs)
    memory: Any = formats[row] if isinstance(low, Rounded) else ()
    low_outs = low.apply(memory, equation, lows)[1]
    shadow_outs = shadow.apply((), equation, shadows)[1]
    lanes = []
    if noted:
        at = next(i for i, a in enumerate(equation.out_avals) if is_float(a))
        plain = [_plain(low, x, a) for x, a in zip(lows, equation.in_avals, strict=True)]
        exact = rebind(equation, plain, jnp.float64)[at]
        result = _plain(low, low_outs[at], equation.out_avals[at])
        lanes = [result, exact, shadow_outs[at].astype(jnp.float64)]
        lanes = [x.reshape(-1) for x in lanes] + _addends(equation, plain)
    elif equation.name in CHOOSES and is_float(equation.out_avals[0]):
        result = _plain(low, low_outs[0], equation.out_avals[0])
        marred = marred & (~jnp.isfinite(result) & jnp.isfinite(shadow_outs[0])).any()
    outs = [
        Pair(y, s, marred) if is_float(a) else y
        for y, s, a in zip(low_outs, shadow_outs, equation.out_avals, strict=True)
    ]
    return outs, marred, lanes


def _plain(low, value, aval):
    """The low lane's number in float64; what isn't a float as it is."""
    if not is_float(aval) or isinstance(low, Rounded):
        return value
    return to_float64(low.lower(value, aval))


@jax.jit
def _breaks(low: jax.Array, shadow: jax.Array) -> jax.Array:
    return (~jnp.isfinite(low) & jnp.isfinite(shadow)).any()


def _addends(equation: Equation, lows):
    if equation.name not in ADDITIONS:
        return []
    return [thin(jnp.broadcast_to(x, equation.out_avals[0].shape)) for x in lows]
