"""Runs a program in low precision and as a reference at once, and records a tape."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from ..._jax import Jaxpr, ShapedArray, out_of_meshes
from ..._output import counted
from ...emulating import rounds_each
from ...interpret import (
    CALLBACKS,
    Applied,
    Boundary,
    Equation,
    Interpretation,
    State,
    interpret_jaxpr,
    is_float,
)
from ...primitives import params
from ...rounding import FP32_PARAMS, RANGE
from ._arithmetic import CONSTANT, Arithmetic
from ._cells import (
    Arrays,
    At,
    Cell,
    Entry,
    LargeCell,
    Leaf,
    Node,
    Operation,
    Origin,
    cell,
    is_key,
    kept,
)
from ._kernels import MOVED, kernel_of
from ._meshes import on_one_device
from ._secants import copied, rule_of, secants
from ._statistics import Visit, decides, records

LONGEST = 400_000  # visits of equations, whose results all stay in memory
CHECKED_EVERY = 1 << 22  # numbers; three arrays of them take 100 MB
LEAST_FREE = 0.1  # of the machine's memory, for the pass backwards and other processes
# A loop that has ended for one run, and has made this many more iterations for the other, and this
# many times as many, is taken not to end there.
MIN_APART, TIMES_APART = 2_000, 10
ON_ONE_DEVICE = -1  # of paths, in place of the body of a ``shard_map``


class Step(NamedTuple):
    """A step of a run: what it depends on besides arrays, the cells or arrays read, the results."""

    key: Hashable = None
    ins: Sequence[Any] = ()
    made: Any = None


@dataclasses.dataclass(eq=False)
class Replay:
    """The steps of a run, in order, for a later run of the program with a fix.

    A step that reads the very cells that the earlier run's has read makes the same; its reference
    values are the same already if its operands' are.

    Attributes:
        before: the steps of the earlier run, () without one; None to keep no steps.
    """

    before: Sequence[Step] | None = None
    steps: list[Step] = dataclasses.field(default_factory=list)

    def made(self, key: Hashable, ins: Sequence[Any], make: Callable[[Step], Any]) -> Any:
        """Returns what a step makes, from the earlier run or by a function of its step."""
        if self.before is None:
            return make(Step())
        n = len(self.steps)
        step = self.before[n] if n < len(self.before) else Step()
        if step.key != key or any(x is not y for x, y in zip(step.ins, ins, strict=True)):
            step = Step(key, ins, make(step))
        self.steps.append(step)
        return step.made


class Evaluated(NamedTuple):
    """An equation's operands, as the low-precision run rounds them, and its results."""

    cells: Sequence[Cell]
    outs: Sequence[Cell]
    visit: Visit


@dataclasses.dataclass(eq=False)
class Forward(Interpretation):
    """Computes each equation exactly on both runs' operands, and as the low-precision run does.

    Loops are unrolled. Where the runs decide differently, both ways are run, and a select on the
    decision joins them: its secant charges the errors that changed the decision.
    """

    arithmetic: Arithmetic
    replay: Replay = dataclasses.field(default_factory=Replay)
    tape: list[Entry] = dataclasses.field(default_factory=list)
    operations: dict[tuple[int, ...], Operation] = dataclasses.field(default_factory=dict)
    # by path, each visit of the equations that round or decide, without those of the reference run
    # alone
    visited: dict[tuple[int, ...], tuple[Equation, list[Visit]]] = dataclasses.field(
        default_factory=dict
    )
    # whether the low-precision run has ended the loop, or takes another branch
    alone: bool = False
    mapped: dict[tuple[int, ...], Jaxpr] = dataclasses.field(default_factory=dict)
    visits: int = 0
    unchecked: int = 0  # numbers that are kept since memory was checked
    iteration: tuple[str, int] | None = None
    directions: set[str] = dataclasses.field(default_factory=set)

    inline: ClassVar[bool] = True
    traces: ClassVar[bool] = False

    @contextmanager
    def context(self) -> Iterator[None]:
        with jax.enable_x64(True), out_of_meshes():  # no mesh splits arrays of the host
            yield

    def opens(self, equation: Equation) -> bool:
        return self.arithmetic.low.opens(equation)

    def lifts(self, aval: ShapedArray) -> bool:
        return True

    def lift(self, x: Any, aval: ShapedArray) -> Node:
        return self.leaf(x, aval, Leaf("constant", "closed over"))

    def leaf(self, x: Any, aval: ShapedArray, leaf: Leaf) -> Node:
        def make(earlier: Step) -> Node:
            if is_float(aval):
                return Node(self.arithmetic.lift(x, aval, leaf))
            return self.unrounded(x if is_key(x) else np.asarray(x).astype(aval.dtype))

        return self.replay.made((leaf, aval), [x], make)

    def unrounded(self, x: Any, leaf: Leaf | None = None) -> Node:
        x = x if is_key(x) else np.asarray(x)
        inexact = not is_key(x) and x.dtype.kind == "c"
        return Node(cell(x, x, leaf=leaf), constant=not inexact, literal=not inexact)

    def number(self, value: Node) -> np.ndarray | None:
        own = value.cell
        return own.low if own.leaf is CONSTANT and not own.is_float and not own.low.ndim else None

    def constant(self, x: np.ndarray, aval: ShapedArray) -> Node:
        if not is_float(aval):
            own = np.asarray(x)
            return self.replay.made(
                (own.tobytes(), aval), (), lambda _: self.unrounded(own, CONSTANT)
            )
        found, literal = self.arithmetic.constant(np.asarray(x), aval)
        key = found.low.tobytes(), found.reference.tobytes(), aval, literal
        return self.replay.made(key, (), lambda _: Node(found, constant=True, literal=literal))

    def unlifted(self, state: State, equation: Equation, inputs: Sequence[Node]) -> Applied:
        return self.apply(state, equation, inputs)

    def apply(self, state: State, equation: Equation, inputs: Sequence[Node]) -> Applied:
        self.visits += 1
        if self.visits > LONGEST:
            raise ValueError(
                f"audit: the program computes more than {LONGEST:,} operations, loops unrolled, "
                "and the results of all are kept; audit fewer iterations or steps"
            )
        if not equation.out_avals:
            return state, []
        self.directions.add(equation.direction)
        if self._draws(equation, inputs):
            return state, self._drawn(equation, inputs)
        operation = self._operation(equation)
        if any(operation.floats):  # others compare
            inputs = [self.rounded(x, equation) for x in inputs]
        return state, self._evaluated(operation, inputs)

    def _draws(self, equation: Equation, inputs: Sequence[Node]) -> bool:
        """Returns whether floats are made of random bits and constants alone, which aren't
        rounded."""
        if not self.arithmetic.rounds_draws or equation.name in CALLBACKS:
            return False
        if not any(x.draw for x in inputs):
            bits = equation.name == "bitcast_convert_type" and is_float(equation.out_avals[0])
            return bits and not any(map(is_float, equation.in_avals))
        return all(x.draw or x.constant or not x.cell.is_float for x in inputs)

    def _drawn(self, equation: Equation, inputs: Sequence[Node]) -> list[Node]:
        """Bits that the runs differ in are no draw of either: they stay on the tape."""

        def unrounded(x: Node) -> Cell:
            own = x.cell
            exact = x.draw or not own.is_float
            return own if exact else cell(own.reference, own.reference)

        operation = self._operation(equation)

        def make(earlier: Step) -> tuple[Sequence[Cell], Sequence[Cell]]:
            cells = [unrounded(x) for x in inputs]
            refs = operation.compute([x.reference for x in cells])
            lows = refs if not _differ(cells) else operation.compute([x.low for x in cells])
            pairs = zip(lows, refs, strict=True)
            return cells, [cell(y, r, top=self.arithmetic.top) for y, r in pairs]

        key = equation.path, tuple(x.draw for x in inputs)
        cells, outs = self.replay.made(key, [x.cell for x in inputs], make)
        self.record(operation, cells, outs)
        return [Node(y, draw=is_float(a)) for y, a in zip(outs, equation.out_avals, strict=True)]

    def _operation(self, equation: Equation) -> Operation:
        if equation.path not in self.operations:
            floats, rounds = tuple(map(is_float, equation.out_avals)), records(equation)
            self.operations[equation.path] = Operation(
                equation, kernel_of(equation), rule_of(equation), floats, rounds,
                rounds_each(equation), rounds or decides(equation),
                moves=not rounds and equation.name in MOVED,
            )  # fmt: skip
        return self.operations[equation.path]

    def _evaluated(self, operation: Operation, inputs: Sequence[Node]) -> list[Node]:
        equation = operation.equation
        key = equation.path, self.arithmetic.key_of(equation), tuple(x.literal for x in inputs)
        found: Evaluated = self.replay.made(
            key, [x.cell for x in inputs], lambda step: self._computed(operation, inputs, step)
        )
        self.record(operation, found.cells, found.outs)
        if operation.counts and not self.alone:
            self.visited.setdefault(equation.path, (equation, []))[1].append(found.visit)
        return self._with_flags(operation, inputs, found.outs)

    def _computed(self, operation: Operation, inputs: Sequence[Node], earlier: Step) -> Evaluated:
        equation = operation.equation
        cells = given = self.arithmetic.operands(equation, inputs)
        run = self.arithmetic.run(equation, cells)
        if run.rounded:
            pairs = zip(cells, run.rounded, strict=True)
            cells = [self.changed(x, (y, x.value), equation) for x, y in pairs]
        same = earlier.made.outs if _same_references(equation, cells, earlier) else ()
        refs = [y.reference for y in same] or operation.compute([x.reference for x in cells])
        exact = operation.compute([x.low for x in cells]) if _differ(cells) else refs
        results = self.arithmetic.results(equation, cells, exact, run)
        made = [
            cell(y, r, e, top=self.arithmetic.top, value=value)
            for (y, value), r, e in zip(results, refs, exact, strict=True)
        ]
        real = zip(made, operation.floats, strict=True)
        value = next((y.value for y, is_float in real if is_float), None)
        fmt = self.arithmetic.params_of(equation, value)
        fits = operation.rounds and _fits_float32(fmt)
        outs = self._kept(operation, cells, made, [y.token for y in same], fits=fits)
        visit = Visit(given, outs, fmt, given is not cells, run.events)
        return Evaluated(cells, outs, visit)

    def _kept(
        self, operation: Operation, ins: Sequence[Cell], outs: Sequence[Arrays],
        tokens: Sequence[Any], *, fits: bool,
    ) -> list[Cell]:  # fmt: skip
        """Returns an operation's results as the tape keeps them."""
        large = {i: x.narrow for i, x in enumerate(ins) if isinstance(x, LargeCell)}
        narrow: Sequence[Any] = [None] * len(outs)
        if operation.moves and large:
            arrays = [large.get(i, x.low) for i, x in enumerate(ins)]
            converts = operation.equation.name == "convert_element_type"
            narrow = arrays if converts else operation.compute(arrays)

        passes = 0 if operation.moves else 1 if operation.pull is secants else None
        found: list[Cell] = []
        for i, (y, own) in enumerate(zip(outs, narrow, strict=True)):
            origin = Origin(operation.compute, ins, i, passes)
            whole = own is not None and len(large) == len(ins)
            token = tokens[i] if tokens else None
            found.append(kept(y, origin, self.arithmetic.top, own, fits=fits or whole, token=token))
        return found

    def _with_flags(
        self, operation: Operation, inputs: Sequence[Node], outs: Sequence[Cell]
    ) -> list[Node]:
        """Returns results with what is known of them: of integers ``constant`` means that no float
        is behind them."""
        constant = all(x.constant for x in inputs)
        literal = constant and not operation.rounds and all(x.literal for x in inputs)
        own = constant and not any(x.cell.is_float for x in inputs)
        return [
            Node(y, constant, literal) if is_float else Node(y, own, own)
            for y, is_float in zip(outs, operation.floats, strict=True)
        ]

    def record(self, operation: Operation, ins: Sequence[Cell], outs: Sequence[Cell]) -> None:
        if any(y.differs or y.rounds for y in outs):
            self.tape.append(Entry(operation, ins, outs, self.iteration))
            self.unchecked += sum(math.prod(y.shape) for y in outs)
            if self.unchecked > CHECKED_EVERY:
                self.unchecked = 0
                self._check_memory()

    def _check_memory(self) -> None:
        """Raises before the results take all memory, and the system ends the process."""
        memory = psutil.virtual_memory()
        if memory.available < LEAST_FREE * memory.total:
            raise ValueError(
                f"audit: after {counted(self.visits, 'operation')} {memory.available / 1e9:.2g} of "
                f"{memory.total / 1e9:.2g} GB of memory are free, since all results of both runs "
                "are kept; audit a smaller batch, or fewer layers, iterations or steps"
            )

    # -- steps between equations -------------------------------------------------------------------

    def changed(self, x: Cell, new: tuple[Any, Any], equation: Equation) -> Cell:
        """Returns a cell after a rounding that is no operation of the program's."""
        low, value = new
        if low is x.low:
            return x if value is x.value else dataclasses.replace(x, value=value)
        out = self.replay.made(
            (equation.path, "changed"), [x],
            lambda _: kept(
                cell(low, x.reference, x.low, top=self.arithmetic.top, value=value),
                Origin(list, [x], passes=0), self.arithmetic.top, token=x.token,
            ),
        )  # fmt: skip
        self.record(Operation(equation, list, copied), [x], [out])
        return out

    def rounded(self, x: Node, equation: Equation) -> Node:
        if not x.draw:
            return x
        return Node(self.changed(x.cell, (self.arithmetic.drawn(x.cell.low), None), equation))

    def settled(self, x: Node, aval: ShapedArray, boundary: Boundary, equation: Equation) -> Node:
        """Returns a value where control flow joins: rounded, and no constant any more."""
        own = self.rounded(x, equation).cell
        if not is_float(aval):
            return Node(own, x.constant, x.literal)
        new = self.arithmetic.canonical(own, aval, boundary, equation)
        return Node(self.changed(own, new, equation))

    def _step(
        self, what: Hashable, equation: Equation, ins: Sequence[Cell], new: tuple[Any, Any],
        compute: Any, pull: Any,
    ) -> Cell:  # fmt: skip
        def make(earlier: Step) -> Cell:
            reference = compute([x.reference for x in ins])[0]
            reference = reference if is_key(reference) else np.asarray(reference)
            same = not any(x.differs for x in ins) and not is_key(reference)
            low = reference if same else new[0]
            own = cell(low, reference, top=self.arithmetic.top, value=new[1])
            passes = 0 if isinstance(what, int) else 1  # an index takes a view
            return kept(own, Origin(compute, ins, passes=passes), self.arithmetic.top)

        out = self.replay.made((equation.path, what), ins, make)
        self.record(Operation(equation, compute, pull), ins, [out])
        return out

    def _index(self, x: Node, aval: ShapedArray, equation: Equation, i: int) -> Node:
        new = self.arithmetic.indexed(x.cell, aval, i)
        out = self._step(
            i, equation, [x.cell], new, lambda arrays: [arrays[0][i]],
            lambda entry, bars, top: [At(i, bars[0])],
        )  # fmt: skip
        return Node(out, x.constant and not is_float(aval), x.literal and not is_float(aval))

    def _stack(self, rows: Sequence[Node], aval: ShapedArray, equation: Equation) -> Node:
        cells = [x.cell for x in rows]
        new = self.arithmetic.stacked(cells, aval)
        out = self._step(
            "stack", equation, cells, new,
            lambda arrays: [jnp.stack(arrays) if is_key(arrays[0]) else np.stack(arrays)],
            lambda entry, bars, top: list(bars[0]),
        )  # fmt: skip
        own = not is_float(aval) and all(x.constant for x in rows)
        return Node(out, own, own)

    def _select(self, which: Cell, off: Node, on: Node, equation: Equation) -> Node:
        """Returns ``on`` where the predicate is true, by each run's own predicate."""

        def choose(arrays: Sequence[Any]) -> list[Any]:
            predicate, no, yes = arrays
            if is_key(no):
                return [yes if np.all(predicate) else no]
            predicate = np.asarray(predicate).astype(bool)
            predicate = predicate.reshape(predicate.shape + (1,) * (np.ndim(no) - predicate.ndim))
            return [np.where(predicate, yes, no)]

        ins = [which, off.cell, on.cell]
        low = choose([x.low for x in ins])[0]
        value = None
        if off.cell.value is not None:
            predicate = np.asarray(which.low).astype(bool)
            value = jax.tree.map(
                lambda no, yes: jnp.where(
                    predicate.reshape(predicate.shape + (1,) * (jnp.ndim(no) - predicate.ndim)),
                    yes, no,
                ),
                off.cell.value, on.cell.value,
            )  # fmt: skip
        return Node(self._step("select", equation, ins, (low, value), choose, secants))

    # -- control flow ------------------------------------------------------------------------------

    def control(self, equation: Equation, run: Callable) -> Callable:
        known = {
            "scan": self._scan, "while": self._while, "cond": self._cond, "shard_map": self._mapped
        }  # fmt: skip
        return lambda state, inputs: (state, known[equation.name](equation, list(inputs)))

    def _body(
        self, equation: Equation, jaxpr: Any, nodes: Sequence[Node], part: tuple[int, ...] = ()
    ) -> list[Node]:
        return interpret_jaxpr(self, jaxpr, (), nodes, equation, part)[1]

    def _within(self, equation: Equation, i: int, outer: tuple[str, int] | None) -> None:
        line = equation.caller or equation.source
        self.iteration = outer or ("{}:{}".format(*line[:2]) if line else equation.name, i)

    def _scan(self, equation: Equation, inputs: list[Node]) -> list[Node]:
        loop, outer = params.scan(equation), self.iteration
        m, n = loop.consts, loop.carries
        consts = [_without_flags(x) for x in inputs[:m]]
        carry_avals, ys_avals = equation.out_avals[:n], equation.out_avals[n:]
        xs_avals = equation.in_avals[m + n :]

        def settled(nodes: Sequence[Node], avals: Sequence[ShapedArray], boundary: Boundary):
            pairs = zip(nodes, avals, strict=True)
            return [self.settled(x, a, boundary, equation) for x, a in pairs]

        carry = settled(inputs[m : m + n], carry_avals, "carry")
        xs = [self.rounded(x, equation) for x in inputs[m + n :]]
        row_avals = [a.update(shape=a.shape[1:]) for a in ys_avals]
        ys: list[Any] = [None] * loop.length
        for i in reversed(range(loop.length)) if loop.reverse else range(loop.length):
            self._within(equation, i, outer)
            rows = [self._index(x, a, equation, i) for x, a in zip(xs, xs_avals, strict=True)]
            outs = self._body(equation, loop.body, [*consts, *carry, *rows])
            carry = settled(outs[:n], carry_avals, "carry")
            ys[i] = settled(outs[n:], row_avals, "stacked")
        self.iteration = outer
        if not loop.length:
            empty = [jnp.zeros(a.shape, a.dtype) for a in ys_avals]
            return [*carry, *map(self.lift, empty, ys_avals)]
        columns = zip(*ys, strict=True)
        return [
            *carry, *(self._stack(c, a, equation) for c, a in zip(columns, ys_avals, strict=True))
        ]  # fmt: skip

    def _while(self, equation: Equation, inputs: list[Node]) -> list[Node]:
        loop, avals, outer = params.while_loop(equation), equation.out_avals, self.iteration
        first = len(inputs) - len(avals)
        consts = [_without_flags(x) for x in inputs[:first]]
        before, inside = consts[: loop.condition_consts], consts[loop.condition_consts :]

        def settled(nodes: Sequence[Node]) -> list[Node]:
            pairs = zip(nodes, avals, strict=True)
            return [self.settled(x, a, "carry", equation) for x, a in pairs]

        carry, i, together, alone = settled(inputs[first:]), 0, 0, self.alone
        while True:
            self._within(equation, i, outer)
            self.alone = alone
            (going,) = self._body(equation, loop.condition, [*before, *carry], (0,))
            own, other = np.any(going.cell.low), np.any(going.cell.reference)
            if not (own or other):
                break
            together += bool(own and other)
            self.alone = alone or not own
            if i - together > max(MIN_APART, TIMES_APART * together):
                lost = settled(
                    [self._nan(a) if is_float(a) else x for x, a in zip(carry, avals, strict=True)]
                )
                pairs = zip(carry, lost, strict=True)
                carry = [self._select(going.cell, x, y, equation) for x, y in pairs]
                break
            new = settled(self._body(equation, loop.body, [*inside, *carry], (1,)))
            if going.cell.differs or np.ndim(going.cell.low):
                pairs = zip(carry, new, strict=True)
                new = [self._select(going.cell, x, y, equation) for x, y in pairs]
            carry, i = new, i + 1
        self.iteration, self.alone = outer, alone
        return carry

    def _mapped(self, equation: Equation, inputs: list[Node]) -> list[Node]:
        if equation.path not in self.mapped:
            self.mapped[equation.path] = on_one_device(equation)
        return self._body(equation, self.mapped[equation.path], inputs, (ON_ONE_DEVICE,))

    def _nan(self, aval: ShapedArray) -> Node:
        return self.lift(jnp.full(aval.shape, jnp.nan, aval.dtype), aval)

    def _cond(self, equation: Equation, inputs: list[Node]) -> list[Node]:
        index, *operands = inputs
        branches = params.branches(equation)
        low, reference = (
            min(max(int(x), 0), len(branches) - 1) for x in (index.cell.low, index.cell.reference)
        )

        def taken(way: int) -> list[Node]:
            outs = self._body(equation, branches[way], operands, (way,))
            pairs = zip(outs, equation.out_avals, strict=True)
            return [self.settled(x, a, "branch", equation) for x, a in pairs]

        outs = taken(low)
        if low == reference:
            return outs

        def elsewhere(arrays: Sequence[Any]) -> list[Any]:
            return [np.asarray(arrays[0]) != index.cell.reference]

        new = np.asarray(True), None
        which = self._step("elsewhere", equation, [index.cell], new, elsewhere, secants)
        before, self.alone = self.alone, True
        others = taken(reference)
        self.alone = before
        return [self._select(which, x, y, equation) for x, y in zip(others, outs, strict=True)]


def _fits_float32(fmt: np.ndarray) -> bool:
    mantissa, lowest, largest = fmt[:RANGE]
    return mantissa <= FP32_PARAMS[0] and lowest >= FP32_PARAMS[1] and largest <= FP32_PARAMS[2]


def _differ(cells: Sequence[Cell]) -> bool:
    return any(x.differs or (x.end is None and x.low is not x.reference) for x in cells)


def _same_references(equation: Equation, cells: Sequence[Cell], earlier: Step) -> bool:
    """Returns whether an earlier run has computed the equation on the same reference values."""
    made = earlier.made
    if not isinstance(made, Evaluated) or earlier.key[0] != equation.path:  # pyright: ignore
        return False
    return all(
        x.token is y.token or _same_number(x, y) for x, y in zip(made.cells, cells, strict=True)
    )


def _same_number(x: Cell, y: Cell) -> bool:
    """Returns whether arrays are one number: another run has arrays of its own for a constant."""
    numbers = not is_key(x.low) and math.prod(x.shape) == math.prod(y.shape) == 1
    return numbers and bool(x.reference == y.reference)


def _without_flags(x: Node) -> Node:
    """Returns a loop's constant as its body reads it."""
    return x if x.draw or not x.cell.is_float else Node(x.cell)
