"""The interpretation behind an audit: the low-precision run and the reference run in lockstep."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from ..._jax import ShapedArray, Tracer, avals_of, jex
from ...autoscaling import RULES, Family
from ...interpret import (
    CALLBACKS,
    Applied,
    Equation,
    Program,
    State,
    Value,
    all_equations,
    is_float,
    literal_number,
    run,
)
from ...rounding import FORMAT_PARAMS, FP32_PARAMS, is_wide
from ._accumulator import Accumulator, Visits
from ._equation import EquationPlan, only_reshapes
from ._evaluate import Evaluator
from ._interpretations import FP32_MAX, TableEmulation
from ._movement import moved, only_moves
from ._pair import (
    SMALL,
    Decision,
    Draw,
    Pair,
    flat,
    is_flat,
    low_of,
    padded_size,
    reference_of,
    shaped,
    uncommitted,
    with_constancy,
)
from ._specialize import history_of, kind_of_run

OPERANDS = 2  # of a contraction


@dataclasses.dataclass(eq=False)
class Magnitudes:
    """The largest magnitudes of contractions' operands in the steps of one run.

    As :class:`scalewise.autoscaling.AmaxHistory` keeps them, whose ``init`` records the first step
    once more.
    """

    length: int
    # by an equation's path, for each step float64[2], the newest first
    past: dict[tuple[int, ...], collections.deque[np.ndarray]] = dataclasses.field(
        default_factory=dict
    )
    # the same of this step, over all visits of the equation
    newest: dict[tuple[int, ...], np.ndarray] = dataclasses.field(default_factory=dict)

    def restart(self) -> None:
        self.past, self.newest = {}, {}

    def of(self, path: tuple[int, ...]) -> np.ndarray:
        return np.max(self.past[path], axis=0) if path in self.past else np.zeros(OPERANDS)

    def add(self, path: tuple[int, ...], found: Iterable[float]) -> None:
        sizes = np.nan_to_num(np.asarray(found, np.float64), nan=0.0, posinf=0.0)
        self.newest[path] = np.maximum(self.newest.get(path, 0.0), sizes)

    def next_step(self) -> None:
        for path, found in self.newest.items():
            if path not in self.past:
                self.past[path] = collections.deque([found], maxlen=self.length)
            self.past[path].appendleft(found)
        self.newest = {}


MAX_EAGER = 600  # results of a loop up to which its iterations run one by one, without compiling
# A result takes 40 ms to compile in a loop, and 0.2 ms to compute outside of compiled code. Most
# audits make few runs, of loops with few iterations. So a large loop is compiled, with what is
# inside of it, as soon as a visit takes many iterations, or earlier runs half as long as compiling.
LARGE_LOOP = 100  # operations of one iteration
MAX_VISIT = 40  # iterations
MAX_UNCOMPILED = 100  # times that each result of all large loops is computed


@dataclasses.dataclass(eq=False)
class Lockstep(Evaluator):
    """Interprets a program in two ways at once and records statistics of each equation.

    The low-precision run computes exactly what ``low`` alone would, the reference run what
    ``reference`` alone would. The program runs equation by equation, short loops and branches too,
    with an :class:`Accumulator` as the state. A long loop is compiled as a whole, once for all
    runs: formats and literals are data. In it the state is :class:`Visits`, and equations call
    the same functions, which XLA compiles once for all that have the same types.

    Attributes:
        constants: literals replaced in the low-precision run: number to number. One that is mapped
            to itself is left unrounded.
        limits: literals that are the largest number of the program's own narrow dtype, or 1000 less
            (to which transformers clamps), or the negative of one. In the reference run they are
            float32's largest number, as if the program ran in float32.
        precomputed: by path, results that depend on no float and that weren't needed yet.
        rows: the program's literals, so that compiled loops take them as data.
        table: of each of them the numbers in both runs, while a loop is being compiled.
    """

    indices: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)  # by path
    recorded: list[Equation] = dataclasses.field(default_factory=list)
    loops: dict[tuple[int, ...], jax.stages.Wrapped] = dataclasses.field(default_factory=dict)
    # paths of large loops that weren't compiled, and how often each result in them was computed
    large: set[tuple[int, ...]] = dataclasses.field(default_factory=set)
    uncompiled: collections.Counter[tuple[int, ...]] = dataclasses.field(
        default_factory=collections.Counter
    )
    compiles_large: bool = False
    constants: dict[float, float] = dataclasses.field(default_factory=dict)
    limits: set[float] = dataclasses.field(default_factory=set)
    # by number, what replaces it, dtype and mesh
    literals: dict[tuple[float, float | None, np.dtype, AbstractMesh], Pair] = dataclasses.field(
        default_factory=dict
    )
    precomputed: dict[tuple[int, ...], list[jax.Array | None]] = dataclasses.field(
        default_factory=dict
    )
    formats: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, FORMAT_PARAMS)))
    rows: dict[tuple[float, np.dtype], int] = dataclasses.field(default_factory=dict)
    table: jax.Array | np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 4)))

    magnitudes: Magnitudes = dataclasses.field(init=False)

    inline = True

    def __post_init__(self):
        self.magnitudes = Magnitudes(history_of(self.low))

    def interpret(
        self, program: Program, state: State, values: Sequence[Value]
    ) -> tuple[State, list[Value]]:
        self.formats = state.formats
        computed = sum(self.uncompiled.values())
        self.compiles_large = computed > MAX_UNCOMPILED * len(self.uncompiled) > 0
        if not self.rows and isinstance(self.low, TableEmulation):
            self.rows = {key: row for row, key in enumerate(_scalars(program))}
        with self.context():
            self.precomputed = program.integers.known(
                values, lambda f, *arrays: self.call(f, *jax.tree.map(uncommitted, arrays))
            )
        state, outs = run(program, self, state, values=values)
        with self.context():
            return state, [self.rounded(y) for y in outs]

    def constant(self, x: np.ndarray, aval: ShapedArray) -> Value:
        if not is_float(aval):
            return self.unrounded(x, aval)
        value = float(x) if x.size == 1 else math.nan
        is_number = x.ndim == 0 and value == value
        if self.compiling and is_number and (value, aval.dtype) in self.rows:
            low, reference, tainted, own = self.table[self.rows[value, aval.dtype]]
            low, reference = low.astype(self.carrier), reference.astype(self.reference.dtype)
            return Pair(low, reference, tainted != 0, constant=True, literal=own != 0)
        key = value, self.constants.get(value), aval.dtype, jax.sharding.get_abstract_mesh()
        if not is_number or key not in self.literals:
            pair = self._literal(value, x, aval)
            if not is_number or self.compiling or isinstance(pair.tainted, Tracer):
                return pair
            self.literals[key] = pair
        found = self.literals[key]  # a copy, since a value remembers what a trace makes of it
        return dataclasses.replace(found, low=jax.tree.map(lambda leaf: leaf, found.low))

    def _literal(self, value: float, x: np.ndarray, aval: ShapedArray) -> Pair:
        """Returns a literal in both runs; ``value`` is NaN if it isn't a number."""
        if not isinstance(self.low, TableEmulation):
            low, reference = self.low.constant(x, aval), self.reference.constant(x, aval)
            tainted = _overflows(x, self.low.lower(low, aval))
            return Pair(low, reference, tainted, constant=True, literal=True)
        low, wide, tainted, own = self._numbers(value, x, aval)
        reference = self.reference.constant(wide, aval)
        if x.ndim == 0:  # laid out like any other array
            low, reference = (flat(y, padded_size(1)) for y in (low, reference))
        return Pair(low, reference, tainted, constant=True, literal=own)

    def _numbers(self, value: float, x: np.ndarray, aval: ShapedArray):
        """Returns a literal in both runs; whether it is tainted; whether it is the program's own,
        so that an operation in float32 has it unrounded."""
        assert isinstance(self.low, TableEmulation)
        wide = self.low.in_float32(x)
        if value in self.constants:
            number = self.constants[value]
            new, kept = np.full(x.shape, number), number == value or abs(number) == FP32_MAX
            low = jnp.asarray(new, self.carrier) if kept else self.low.constant(new, aval)
            return low, wide, np.bool_(False), kept
        low = self.low.constant(x, aval)
        if wide is x:
            return low, wide, _overflows(x, low), True
        if x.size == 1:
            self.limits.add(value)
        return low, wide, np.bool_(False), True

    def _literals_table(self) -> np.ndarray:
        """Returns what :meth:`_numbers` does for each of ``rows``."""
        found = [
            self._numbers(value, np.asarray(value), ShapedArray((), dtype))
            for value, dtype in self.rows
        ]
        return np.array(found, np.float64).reshape(-1, 4)

    def fork(self, state: State) -> State:
        keeps = isinstance(state, Accumulator) and state.keeps
        return state.muted() if keeps else state

    def eager_iterations(self, state: State, equation: Equation) -> int:
        if not isinstance(state, Accumulator):
            return 0
        if self.magnitudes.length:  # each contraction's are read between iterations
            return sys.maxsize
        small = MAX_EAGER // equation.inner
        compiled = self.compiles_large or equation.path in self.loops
        if compiled or equation.inner < LARGE_LOOP:
            return small
        self.large.add(equation.path)
        return max(small, MAX_VISIT)

    def at_boundary(self, state: State) -> State:
        return state.settled() if isinstance(state, Visits) else state

    def control(self, equation: Equation, run: Callable) -> Callable:
        def with_shapes(state, inputs):
            pairs = zip(inputs, equation.in_avals, strict=True)
            return run(state, [shaped(x, a) for x, a in pairs])

        def compiled(statistics, table, inputs):
            before = self.compiling, self.table
            self.compiling, self.table = True, table
            try:
                state, outs = with_shapes(Visits(statistics), inputs)
                return state.settled().statistics, outs
            finally:
                self.compiling, self.table = before

        is_new = equation.path not in self.loops
        loop = self.loops.setdefault(equation.path, jax.jit(compiled))

        def run_loop(state, inputs):
            if not isinstance(state, Accumulator):
                return with_shapes(state, inputs)
            table = self._literals_table()
            inputs = [self._laid_out(x, a) for x, a in zip(inputs, equation.in_avals, strict=True)]
            if is_new:
                loop.trace(state.flush(), table, inputs)  # finds its equations, and their formats
            statistics, outs = loop(state.flush(), table, inputs)
            state.replace(statistics)
            return state, outs

        return run_loop

    def _laid_out(self, x: Value, aval: ShapedArray) -> Value:
        """Returns a small pair flat, whatever computed it, so that a loop isn't compiled twice."""
        length = padded_size(math.prod(aval.shape))
        if not isinstance(x, Pair) or length > SMALL[-1] or not kind_of_run(self.low).elementwise:
            return x
        low = jax.tree.map(lambda leaf: flat(leaf, length), x.low)
        return Pair(low, flat(x.reference, length), x.tainted)

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        if self.is_reshape(equation, inputs):
            return state, inputs[:1]
        if self.is_movement(equation, inputs):
            return state, [moved(equation, inputs[0])]
        if self.draws(equation, inputs):
            return state, self.drawn(equation, inputs)
        return self.computed(state, equation, self.operands_of(equation, inputs))

    def computed(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        path = equation.path
        if self.large and any(path[:n] in self.large for n in range(1, len(path))):
            self.uncompiled[path] += not self.compiling
        plan, step = self.planned(equation, inputs)
        index = self._index(plan, equation)
        if plan.recorded:
            inputs = self.literals_of(equation, inputs, state.formats[index])
        op_params = state.op_params(index, plan.op_params)
        past = self.past(equation)
        outs, record, events = self.evaluate((plan, step), inputs, op_params, *past)
        if past and events is not None:
            newest, events = np.asarray(events[-OPERANDS:]), events[:-OPERANDS]
            if state.keeps:
                self.magnitudes.add(equation.path, newest)
        if record is not None:
            state = state.add(index, record, plan.length)
        if events is not None:
            state = state.add_events(index, events, record is None)
        return state, self.with_constancy(plan, inputs, outs)

    def past(self, equation: Equation) -> tuple[np.ndarray, ...]:
        contracts = RULES[equation.name].family is Family.CONTRACTION
        if not self.magnitudes.length or self.compiling or not contracts:
            return ()
        return (self.magnitudes.of(equation.path),)

    def literals_of(
        self, equation: Equation, inputs: Sequence[Value], fmt: jax.Array | np.ndarray
    ) -> list[Value]:
        """Returns inputs in which literals aren't rounded, if the operation is in float32.

        That is what a user gets who computes the line in float32. One that is in float32 without a
        fix keeps the program's own limits.
        """
        wide = is_wide(fmt)
        if self.limits and self.stays_wide(equation):
            return list(inputs)
        if not isinstance(self.low, TableEmulation) or (isinstance(fmt, np.ndarray) and not wide):
            return list(inputs)

        def unrounded(x: Value) -> Value:
            if not isinstance(x, Pair) or x.literal is False:
                return x
            low = x.reference.astype(self.carrier)
            if not isinstance(fmt, np.ndarray):
                low = jnp.where(wide & x.literal, low, x.low)
            return dataclasses.replace(x, low=low)

        return [unrounded(x) for x in inputs]

    def with_constancy(self, plan: EquationPlan, inputs: Sequence[Value], outs: Sequence[Value]):
        pairs = [x for x in inputs if isinstance(x, Pair)]
        decided = any(isinstance(x, Decision) for x in inputs)
        constant = not decided and all(x.constant for x in pairs)
        literals = [x.literal for x in pairs]
        literal = constant and not plan.counts and not any(x is False for x in literals)
        if literal:
            literal = functools.reduce(operator.and_, literals, True)
        return [with_constancy(y, constant, literal) for y in outs]

    def draws(self, equation: Equation, inputs: Sequence[Value]) -> bool:
        if not isinstance(self.low, TableEmulation) or equation.name in CALLBACKS:
            return False
        if not any(isinstance(x, Draw) for x in inputs):
            bits = equation.name == "bitcast_convert_type" and is_float(equation.out_avals[0])
            return bits and not any(map(is_float, equation.in_avals))
        floats = (x for x, a in zip(inputs, equation.in_avals, strict=True) if is_float(a))
        return all(isinstance(x, Draw) or x.constant for x in floats)

    def operands_of(self, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
        """Returns inputs with random draws rounded, unless the equation only compares them."""
        if not any(isinstance(x, Draw) for x in inputs):
            return list(inputs)
        if not any(map(is_float, equation.out_avals)):
            exact = np.bool_(False)
            return [Pair(x.exact, x.reference, exact) if isinstance(x, Draw) else x for x in inputs]
        return [self.rounded(x) for x in inputs]

    def unlifted(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        if any(isinstance(x, Decision) for x in inputs):
            lows, references = ([of(x) for x in inputs] for of in (low_of, reference_of))
            wide = self.reference.apply((), equation, references)[1]
            return state, [Decision(*x) for x in zip(equation.bind(*lows), wide, strict=True)]
        outs = self.precomputed.pop(equation.path, None)
        return state, equation.bind(*inputs) if outs is None else outs

    def is_reshape(self, equation: Equation, inputs: Sequence[Value]) -> bool:
        """Returns True if the result is the first input, flat: nothing has to be computed."""
        if not inputs or not isinstance(inputs[0], Pair) or not only_reshapes(equation):
            return False
        return self._keeps(equation) and is_flat(inputs[0].reference, equation.in_avals[0].shape)

    def is_movement(self, equation: Equation, inputs: Sequence[Value]) -> bool:
        movable = not self.compiling and self._keeps(equation)
        return movable and only_moves(equation, inputs)

    def _keeps(self, equation: Equation) -> bool:
        return kind_of_run(self.low).keeps(self.low, equation)

    def _index(self, plan: EquationPlan, equation: Equation) -> int:
        """Returns the equation's index, a new one at its first visit; 0 if it has no statistics."""
        if not plan.counts:
            return 0
        index = self.indices.setdefault(equation.path, len(self.indices))
        if index == len(self.recorded):
            self.recorded.append(equation)
            own = self.own_params(equation)
            if own is not None:
                self.formats[index] = own
        return index

    def own_params(self, equation: Equation) -> np.ndarray | None:
        """Returns the format that the program itself asks for in an equation, if ``low`` keeps it
        (see :meth:`TableEmulation.own_params`)."""
        return self.low.own_params(equation) if isinstance(self.low, TableEmulation) else None

    def stays_wide(self, equation: Equation) -> bool:
        """Returns whether the program computes an equation in float32, and ``low`` keeps that."""
        return self.own_params(equation) is FP32_PARAMS


def _scalars(program: Program) -> list[tuple[float, np.dtype]]:
    atoms = (atom for e in all_equations(program.jaxpr) for atom in e.invars)
    scalars = [x for x in atoms if isinstance(x, jex.Literal) and np.ndim(x.val) == 0]
    types = avals_of(scalars)
    pairs = zip(scalars, types, strict=True)
    keys = [(float(literal_number(x)), a.dtype) for x, a in pairs if is_float(a)]
    return list(dict.fromkeys(key for key in keys if not math.isnan(key[0])))


def _overflows(x: np.ndarray, low: jax.Array) -> jax.Array | np.bool_:
    if isinstance(low, Tracer):
        return (np.isfinite(x) & ~jnp.isfinite(low)).any()
    return np.bool_((np.isfinite(x) & ~np.isfinite(np.asarray(low).astype(np.float64))).any())
