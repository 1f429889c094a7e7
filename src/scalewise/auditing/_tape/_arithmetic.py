"""The low-precision run's arithmetic, with the bits that the audit's own run computes."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import ShapedArray
from ...autoscaling import RULES, Boundaries, Family, OperandAmaxes
from ...emulating import added_in_order, in_arithmetic, is_exact, rounds_each
from ...formats import FP32
from ...interpret import (
    Argument,
    Boundary,
    Equation,
    Interpretation,
    RoundedOperand,
    Value,
    is_float,
    rebind,
)
from ...rounding import FP32_PARAMS, FP64_PARAMS, RANGE, format_params, is_wide, is_wider, round_by
from .._thresholds import LATENT
from ._cells import Cell, Leaf, Node, cell, is_key
from ._compiled import compiled
from ._interpretations import FP32_MAX, TableEmulation, computes_in_float32
from ._kernels import computed, is_complex, through_jax
from ._meshes import unsplit
from ._specialize import history_of, kind_of_run, nominal_format

OPERANDS = 2  # of a contraction
CONSTANT = Leaf("constant")


DIGITS, BIAS = 52, 1023  # of float64
EXPONENT = np.int64(0x7FF << DIGITS)
HIGHEST = np.int64((BIAS + 900) << DIGITS)  # of numbers to which a power of two can be added
AT_ONCE = 1 << 15  # numbers whose intermediate arrays stay in a processor's cache


def nearest(x: Any, fmt: np.ndarray) -> np.ndarray:
    """Rounds float64 as :func:`round_by` does, on the host."""
    x = np.asarray(x, np.float64)
    if fmt[0] >= DIGITS:
        return x
    if x.size <= AT_ONCE:
        return _nearest(x, fmt.tolist())
    flat, y = x.reshape(-1), np.empty(x.size)
    for i in range(0, x.size, AT_ONCE):
        y[i : i + AT_ONCE] = _nearest(flat[i : i + AT_ONCE], fmt.tolist())
    return y.reshape(x.shape)


def _nearest(x: np.ndarray, fmt: Sequence[float]) -> np.ndarray:
    mantissa, lowest, largest, beyond, infinite, smallest, signed_zero, signed = fmt
    size = np.abs(x)
    least = np.int64((int(lowest) + BIAS) << DIGITS)
    exponents = np.minimum(np.maximum(size.view(np.int64) & EXPONENT, least), HIGHEST)
    power = (exponents + ((DIGITS - int(mantissa)) << DIGITS)).view(np.float64)
    y = (size + power) - power  # the sum has no bits behind the last one that the format keeps
    if not y.max(initial=0.0) <= largest:  # beyond the range, or NaN
        y = np.where(y > largest, np.where(size == np.inf, infinite, beyond), y)
    y = np.copysign(y, x)
    if smallest > 2.0 ** (lowest - mantissa):  # without subnormal numbers
        low = np.where(size > smallest / 2, smallest, 0.0)
        y = np.where(size < smallest, np.copysign(low, x), y)
    if not signed_zero:
        y = np.where(y == 0, 0.0, y)
    return y if signed else np.where(x < 0, np.nan, y)


def in_float64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Run:
    """The results of one equation under an interpretation; empty where the host rounds.

    Attributes:
        outs: its values of the results.
        rounded: the operands of a product as a recipe rounds them, if it rounds each in the form
            that the program has it in.
        events: of the operands that a recipe rounds, how many numbers they have, how many saturate,
            are flushed, and are close to saturating; () without any.
    """

    outs: Sequence[Any] = ()
    rounded: Sequence[np.ndarray] = ()
    events: Sequence[float] = ()


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


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """The formats and constants of a run with fixes.

    Attributes:
        formats: the parameters of each recorded equation's format, by index; NaN of one that had
            not run when they were chosen.
        indices: the indices, by an equation's path.
        constants: by a number of the program, the one that takes its place; itself if it isn't
            rounded.
    """

    formats: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0)))
    indices: Mapping[tuple[int, ...], int] = dataclasses.field(default_factory=dict)
    constants: Mapping[float, float] = dataclasses.field(default_factory=dict)


class _Plan(NamedTuple):
    """How an equation is computed in a format."""

    params: np.ndarray  # of the format
    key: bytes  # the same, hashable
    floats: Sequence[bool]  # for each result
    rounds: bool
    wide: bool  # whether it rounds to float32 or wider
    keeps_limits: bool  # whether the program has it in float32
    in_float32: bool
    own: Equation | None  # the equation in the format's own arithmetic
    each: bool  # whether it adds numbers to one element and rounds each sum
    complex: bool


@dataclasses.dataclass(eq=False)
class FormatArithmetic:
    """Rounds results on the host, as :class:`TableEmulation` does in the audit's run."""

    low: TableEmulation
    choice: Choice = dataclasses.field(default_factory=Choice)
    code: dict[Hashable, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    # literals that are the largest number of the program's own narrow dtype, or 1000 less (to which
    # transformers clamps), or the negative of one; in the reference run they are float32's
    limits: set[float] = dataclasses.field(default_factory=set)
    plans: dict[tuple[int, ...], _Plan] = dataclasses.field(default_factory=dict)
    constants: dict[Hashable, tuple[Cell, bool]] = dataclasses.field(default_factory=dict)
    # by a literal and the parameters of an operation's format
    literals: dict[tuple[Cell, bytes], Cell] = dataclasses.field(default_factory=dict)
    rounds_draws = True

    @functools.cached_property
    def top(self) -> float:
        return min(float(self.low.fmt.max), 1e290)

    def lift(self, x: Argument, aval: ShapedArray, leaf: Leaf) -> Cell:
        wide = in_float64(x)
        return cell(nearest(wide, self.low.params_of(aval)), wide, top=self.top, leaf=leaf)

    def constant(self, x: np.ndarray, aval: ShapedArray) -> tuple[Cell, bool]:
        """Returns a constant, and whether an operation in float32 has the program's own number."""
        key = x.tobytes(), x.dtype, aval
        if key not in self.constants:  # a loop reads it in each iteration
            self.constants[key] = self._constant(x, aval)
        return self.constants[key]

    def _constant(self, x: np.ndarray, aval: ShapedArray) -> tuple[Cell, bool]:
        wide, own = self.low.in_float32(x), in_float64(x)
        number = float(x) if x.size == 1 else None
        new = self.choice.constants.get(number) if number is not None else None
        replaced = new is not None and new != number and abs(new) != FP32_MAX
        if new is None:
            self.limits |= {number} if number is not None and wide is not x else set()
        else:
            own = np.full(own.shape, new)
        rounds = self.low.is_low(aval) and (new is None or replaced)
        low = nearest(own, self.low.params_of(aval) if rounds else FP32_PARAMS)
        return cell(low, in_float64(wide), top=self.top, leaf=CONSTANT), not replaced

    @functools.cached_property
    def _params(self) -> np.ndarray:
        return format_params(self.low.fmt, self.low.saturate)

    def params_of(self, equation: Equation, value: Value = None) -> np.ndarray:
        return self._plan(equation).params

    def _plan(self, equation: Equation) -> _Plan:
        if equation.path not in self.plans:
            index, params = self.choice.indices.get(equation.path), self.low.own_params(equation)
            keeps_limits = params is FP32_PARAMS
            params = self._params if params is None else params
            if index is not None and not np.isnan(self.choice.formats[index][0]):
                params = self.choice.formats[index]
            floats = tuple(map(is_float, equation.out_avals))
            rounds = any(floats) and not is_exact(equation)
            own = in_arithmetic(equation, self.low.fmt)
            if not np.array_equal(params[:RANGE], self._params[:RANGE]):
                own = None
            self.plans[equation.path] = _Plan(
                params, params.tobytes(), floats, rounds, rounds and is_wide(params), keeps_limits,
                computes_in_float32(equation) and not is_wider(params), own,
                rounds_each(equation), is_complex(equation),
            )  # fmt: skip
        return self.plans[equation.path]

    def key_of(self, equation: Equation) -> Hashable:
        """Returns what results depend on besides the operands' cells, for :class:`Replay`."""
        return self._plan(equation).key, bool(self.limits)

    def operands(self, equation: Equation, nodes: Sequence[Node]) -> list[Cell]:
        """Returns cells in which literals have the operation's width, if it is in float32 or wider:
        what a user gets who computes the line in float32. One that the program has in float32 keeps
        the program's own limits."""
        cells, plan = [node.cell for node in nodes], self._plan(equation)
        if not plan.wide or (self.limits and plan.keeps_limits):
            return cells

        def literal(c: Cell) -> Cell:
            if (c, plan.key) not in self.literals:
                low = nearest(c.reference, plan.params)
                self.literals[c, plan.key] = cell(low, c.reference, top=self.top, leaf=CONSTANT)
            return self.literals[c, plan.key]

        pairs = zip(nodes, cells, strict=True)
        return [literal(c) if node.literal and c.is_float else c for node, c in pairs]

    def run(self, equation: Equation, cells: Sequence[Cell]) -> Run:
        return Run()

    def results(
        self, equation: Equation, cells: Sequence[Cell], exact: Sequence[Any], run: Run
    ) -> list[tuple[Any, Any]]:
        """Returns each result of the low-precision run, and the interpretation's value or None."""
        plan = self._plan(equation)
        if plan.complex:
            exact = through_jax(equation, [c.low for c in cells], own=True)
        if not plan.rounds:
            return [(y, None) for y in exact]
        if plan.in_float32:
            exact = self._in_float32(equation, [c.low for c in cells])
        elif plan.own is not None:
            exact = computed(plan.own, [c.low for c in cells])
        elif plan.each:
            arrays = [jnp.asarray(c.low) for c in cells]
            exact = [np.asarray(self._one_by_one(equation)(arrays, jnp.asarray(plan.params)))]
        pairs = zip(exact, plan.floats, strict=True)
        return [(nearest(y, plan.params) if rounds else y, None) for y, rounds in pairs]

    def _in_float32(self, equation: Equation, lows: Sequence[Any]) -> list[np.ndarray]:
        pairs = zip(lows, equation.in_avals, strict=True)
        narrow = [jnp.asarray(x, np.float32) if is_float(a) else jnp.asarray(x) for x, a in pairs]
        outs = zip(rebind(equation, narrow, jnp.float32), equation.out_avals, strict=True)
        return [np.asarray(y, np.float64 if is_float(a) else None) for y, a in outs]

    def _one_by_one(self, equation: Equation) -> Callable[..., jax.Array]:
        def run(inputs: Sequence[jax.Array], fmt: jax.Array) -> jax.Array:
            def whole(some: Sequence[jax.Array]) -> Sequence[jax.Array]:
                return rebind(equation, some, jnp.float64)

            return added_in_order(equation, inputs, whole, lambda y: round_by(y, fmt))[0]

        return self.code.setdefault(equation, jax.jit(run))

    def drawn(self, x: Any) -> np.ndarray:
        return nearest(x, self._params)

    def canonical(
        self, x: Cell, aval: ShapedArray, boundary: Boundary, equation: Equation
    ) -> tuple[Any, Any]:
        return x.low, None

    def lowered(self, x: Cell, aval: ShapedArray) -> Any:
        return x.low

    def indexed(self, x: Cell, aval: ShapedArray, i: int) -> tuple[Any, Any]:
        return x.low[i], None

    def stacked(self, rows: Sequence[Cell], aval: ShapedArray) -> tuple[Any, Any]:
        return _stacked([x.low for x in rows]), None

    def next_step(self) -> None:
        pass


@dataclasses.dataclass(eq=False)
class OwnArithmetic:
    """Runs each equation as any interpretation does: a policy, a recipe, the program's dtypes.

    Equal equations share compiled code, as in the audit's run.
    """

    low: Interpretation
    code: dict[Hashable, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    magnitudes: Magnitudes = dataclasses.field(init=False)
    rounds_draws = False

    def __post_init__(self) -> None:
        self.magnitudes = Magnitudes(history_of(self.low))

    @functools.cached_property
    def top(self) -> float:
        return min(float(nominal_format(self.low).max), float(FP32.max))

    def plain(self, value: Any, aval: ShapedArray) -> Any:
        if not is_float(aval):
            return value if is_key(value) else np.asarray(value)
        narrow = aval.dtype.itemsize < 4
        wide = aval.update(dtype=np.dtype(np.float32)) if narrow else aval
        return np.asarray(self.low.lower(value, wide), np.float64)

    def _cell(self, value: Any, wide: Any, aval: ShapedArray, leaf: Leaf) -> Cell:
        wide = in_float64(wide)
        return cell(self.plain(value, aval), wide, top=self.top, value=value, leaf=leaf)

    def lift(self, x: Argument, aval: ShapedArray, leaf: Leaf) -> Cell:
        x = jax.tree.map(np.asarray, x)  # of no mesh
        wide = x.value() if self.low.is_argument(x) else x
        return self._cell(self.low.lift(x, aval), wide, aval, leaf)

    def constant(self, x: np.ndarray, aval: ShapedArray) -> tuple[Cell, bool]:
        return self._cell(self.low.constant(x, aval), in_float64(x), aval, CONSTANT), True

    def key_of(self, equation: Equation) -> Hashable:
        return None  # these runs aren't replayed

    def operands(self, equation: Equation, nodes: Sequence[Node]) -> list[Cell]:
        return [node.cell for node in nodes]

    def _values(self, cells: Sequence[Cell]) -> list[Any]:
        return [x.low if x.value is None else x.value for x in cells]

    def run(self, equation: Equation, cells: Sequence[Cell]) -> Run:
        contracts = RULES[equation.name].family is Family.CONTRACTION
        delayed = contracts and self.magnitudes.length
        past = (self.magnitudes.of(equation.path),) if delayed else ()

        equation = unsplit(equation)
        own, place = kind_of_run(self.low).specialize(self.low, equation)

        def call(values: Sequence[Any], *past: Any) -> tuple[Any, Any, Any, Any]:
            low = own
            if past:
                assert isinstance(low, Boundaries)
                low = low.with_amaxes(OperandAmaxes(past=past[0]))
            if not equation.lifted:
                return low.unlifted((), equation, values)[1], (), (), ()
            outs = low.apply((), equation, values)[1]
            rounded = low.rounded_operands(equation, values)
            pairs = [(x.exact, x.rounded) for x in rounded]
            sizes = low.magnitudes(values) if past and isinstance(low, Boundaries) else ()
            return outs, pairs, _events(rounded), sizes

        avals = equation.in_avals + equation.out_avals
        types = tuple((a.shape, a.dtype) for a in avals)
        key: Hashable = own, place, equation.name, tuple(sorted(equation.params.items())), types
        try:
            hash(key)
        except TypeError:
            key = equation
        if key not in self.code:
            largest = max(math.prod(a.shape) for a in avals)
            self.code[key] = call if equation.eqn.effects else compiled(call, largest)
        outs, pairs, events, sizes = self.code[key](self._values(cells), *past)
        if past:
            self.magnitudes.add(equation.path, np.asarray(sizes)[-OPERANDS:].tolist())
        found = [tuple(map(np.asarray, pair)) for pair in pairs]
        as_it_is = len(found) == len(cells) and all(
            np.array_equal(own, np.asarray(c.low, np.float32), equal_nan=True)
            for (own, _), c in zip(found, cells, strict=True)
        )
        rounded = [np.asarray(x, np.float64) for _, x in found] if as_it_is else ()
        return Run(outs, rounded, [float(x) for x in events])

    def params_of(self, equation: Equation, value: Value) -> np.ndarray:
        return FP64_PARAMS if value is None else format_params(kind_of_run(self.low).result(value))

    def results(
        self, equation: Equation, cells: Sequence[Cell], exact: Sequence[Any], run: Run
    ) -> list[tuple[Any, Any]]:
        outs = zip(run.outs, equation.out_avals, strict=True)
        return [(self.plain(y, a), y) for y, a in outs]

    def drawn(self, x: Any) -> Any:
        return x

    def canonical(
        self, x: Cell, aval: ShapedArray, boundary: Boundary, equation: Equation
    ) -> tuple[Any, Any]:
        if not is_float(aval):
            return x.low, x.value
        value = self.low.canonical(self._values([x])[0], aval, boundary, equation)
        return self.plain(value, aval), value

    def lowered(self, x: Cell, aval: ShapedArray) -> Any:
        return np.asarray(self.low.lower(x.value, aval), np.float64) if is_float(aval) else x.low

    def indexed(self, x: Cell, aval: ShapedArray, i: int) -> tuple[Any, Any]:
        if not is_float(aval):
            return x.low[i], None if x.value is None else x.value[i]
        value = jax.tree.map(lambda leaf: leaf[i], self.low.unstack(x.value, aval))
        return self.plain(value, aval.update(shape=aval.shape[1:])), value

    def stacked(self, rows: Sequence[Cell], aval: ShapedArray) -> tuple[Any, Any]:
        values = jax.tree.map(lambda *some: _stacked(some), *[self._values([x])[0] for x in rows])
        if not is_float(aval):
            return _stacked([x.low for x in rows]), values
        values = self.low.stack(values, aval)
        return self.plain(values, aval), values

    def next_step(self) -> None:
        self.magnitudes.next_step()


def _events(operands: Sequence[RoundedOperand]) -> list[Any]:
    """Returns what ``Run.events`` has."""
    if not operands:
        return []
    sizes = jnp.asarray(float(sum(x.exact.size for x in operands)))
    saturated = sum(jnp.sum(x.saturated) for x in operands)
    flushed = sum(jnp.sum((x.rounded == 0) & (x.exact != 0)) for x in operands)
    latent = sum(jnp.sum(jnp.abs(x.exact) * LATENT > x.limit) for x in operands)
    return [sizes, saturated, flushed, latent]


def _stacked(rows: Sequence[Any]) -> Any:
    return jnp.stack(rows) if isinstance(rows[0], jax.Array) else np.stack(rows)


Arithmetic: TypeAlias = FormatArithmetic | OwnArithmetic


def arithmetic_of(
    low: Interpretation, choice: Choice, code: dict[Hashable, Callable[..., Any]]
) -> Arithmetic:
    if isinstance(low, TableEmulation):
        return FormatArithmetic(low, choice, code)
    return OwnArithmetic(low, code)
