"""Arrays of both runs, and the entries of the tape that the balance sheet reads backwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import out_of_meshes
from ...interpret import Equation

MANY = 256  # numbers of an array that tell most different arrays apart
LARGEST = 1e300  # of the finite numbers that stand for infinities and NaN
LARGE = 1 << 15  # the numbers of an array from which on a run keeps it in fewer bytes
RECENT = 8  # how many arrays of large cells stay in memory as they were read
DEEP = 8  # how many arrays are computed at most to read one of the reference run


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What made an array that no operation computes: its rounding has no line of its own."""

    cause: str  # "argument" or "constant"
    name: str = (
        ""  # an argument's path; "" of a literal, which is charged to the line that reads it
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """One array in both runs.

    Attributes:
        low, exact, reference: the low-precision run's array; the exact result, on that run's own
            operands, that rounding made it of; the reference run's. Floats are float64.
        end, start, middle: the numbers of `low`, `reference` and `exact` for differences, with
            finite ones in place of infinities and NaN; None for random keys.
        value: the array as the low-precision interpretation has it, unless it is `low`.
        leaf: None for the result of an operation.
        shared: see :class:`LargeCell`; None if the reference run's array itself tells.
    """

    low: Any
    exact: Any
    reference: Any
    end: Any
    middle: Any
    start: Any
    value: Any = None
    leaf: Leaf | None = None
    shared: Any = None
    depth: ClassVar[int] = 0

    @property
    def token(self) -> Any:
        return self.reference if self.shared is None else self.shared

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self.low)

    @property
    def differs(self) -> bool:
        """Whether the runs have different numbers."""
        return self.end is not self.start

    @property
    def rounds(self) -> bool:
        """Whether rounding made other numbers of the exact ones."""
        return self.middle is not self.end

    @property
    def is_float(self) -> bool:
        return self.end is not None and np.asarray(self.low).dtype.kind in "fc"


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """Computes an operation's result again; it holds no run, which would be freed later.

    Attributes:
        passes: how many passes over arrays that takes: 0 of a view, 1 of an elementwise operation;
            None of others, whose results are kept.
    """

    compute: Callable[[Sequence[Any]], Sequence[Any]]
    ins: Sequence[Cell]
    index: int = 0
    passes: int | None = None

    def of(self, run: Literal["low", "reference"]) -> Any:
        with jax.enable_x64(True), out_of_meshes(), np.errstate(all="ignore"):
            return np.asarray(self.compute([getattr(x, run) for x in self.ins])[self.index])

    @property
    def depth(self) -> int:
        """How many arrays are computed to read the reference run's."""
        return DEEP + 1 if self.passes is None else self.passes + sum(x.depth for x in self.ins)


@dataclasses.dataclass(frozen=True, eq=False)
class LargeCell:
    """An array of floats that differ between the runs, in a sixth to a half of the bytes: the
    low-precision run's numbers are kept in float32, and the others, of the reference run too where
    that takes few operations, are computed again when they are read.

    Attributes:
        narrow: the low-precision run's numbers, which float32 holds.
        origin: what computes the others.
        kept: the reference run's array; None to compute it.
        rounds, top, value: see :class:`Arrays` and :func:`cell`.
        token: what another run's cell has, too, that has the same reference array.
    """

    narrow: np.ndarray
    origin: Origin
    kept: np.ndarray | None
    rounds: bool
    top: float
    value: Any
    token: Any
    leaf: ClassVar[None] = None
    differs: ClassVar[bool] = True
    is_float: ClassVar[bool] = True
    # what was read last: the low-precision run's numbers, the reference run's, and all arrays
    recent: ClassVar[dict[tuple[LargeCell, str], Any]] = {}

    @property
    def depth(self) -> int:
        return self.origin.depth if self.kept is None else 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.narrow.shape

    def _read(self, what: str, make: Callable[[], Any]) -> Any:
        found = self.recent.pop((self, what), None)
        self.recent[self, what] = found = make() if found is None else found
        while len(self.recent) > RECENT:
            del self.recent[next(iter(self.recent))]
        return found

    @property
    def low(self) -> np.ndarray:
        return self._read("low", lambda: self.narrow.astype(np.float64))

    @property
    def reference(self) -> np.ndarray:
        if self.kept is not None:
            return self.kept
        return self._read("reference", partial(self.origin.of, "reference"))

    @property
    def arrays(self) -> Arrays:
        def make() -> Arrays:
            exact = low = self.low
            if self.rounds:
                same = not any(x.differs for x in self.origin.ins)
                exact = self.reference if same else self.origin.of("low")
            return _with_stand_ins(low, exact, self.reference, self.top)

        return self._read("arrays", make)

    exact = property(lambda self: self.arrays.exact)
    end = property(lambda self: self.arrays.end)
    middle = property(lambda self: self.arrays.middle)
    start = property(lambda self: self.arrays.start)


Cell: TypeAlias = Arrays | LargeCell


def kept(
    x: Arrays, origin: Origin, top: float, narrow: np.ndarray | None = None,
    *, fits: bool = False, token: Any = None,
) -> Cell:  # fmt: skip
    """Returns a cell that a tape keeps: a large one if it has many numbers, and float32 holds them.

    Args:
        x: the cell.
        origin: what computes it again.
        narrow: the low-precision run's numbers in float32, if a large cell has them.
        fits: whether float32 is known to hold them.
        token: of a cell of another run, with the same reference array.
    """
    x = x if token is None else dataclasses.replace(x, shared=token)
    if not x.differs or not x.is_float or np.asarray(x.low).dtype != np.float64:
        return x
    computed = 0 < origin.depth <= DEEP  # a view of an array that is kept takes no memory
    if np.size(x.low) < LARGE:  # no view keeps all numbers of a large cell in memory
        low, reference = _own(x.low), _own(x.reference) if computed else x.reference
        if x.rounds or (low is x.low and reference is x.reference):
            return x
        return dataclasses.replace(cell(low, reference, top=top, value=x.value), shared=x.token)
    own: np.ndarray = (x.low if narrow is None else narrow).astype(np.float32, copy=False)
    if not (fits or (own == x.low).all() or np.array_equal(own, x.low, equal_nan=True)):
        return x
    new = object() if computed and x.shared is None else x.token
    reference = None if computed else x.reference
    found = LargeCell(own, origin, reference, x.rounds, top, x.value, new)
    found.recent[found, "low"] = x.low
    if computed:
        found.recent[found, "reference"] = x.reference
    return found


def _own(x: np.ndarray) -> np.ndarray:
    """Returns a copy of a view of a large array."""
    return x if x.base is None or np.size(x.base) < LARGE else np.array(x)


def is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended)


def cell(
    low: Any, reference: Any, exact: Any = None, *,
    top: float = 0.0, value: Any = None, leaf: Leaf | None = None,
) -> Arrays:  # fmt: skip
    """Returns a cell; infinities and NaN get stand-ins beyond ``top`` and all numbers there.

    Arrays that are equal are one array, so that whether they differ is a question of identity.
    """
    exact = low if exact is None else exact
    if is_key(low):
        return Arrays(low, low, reference, None, None, None, value, leaf)
    inexact = np.asarray(low).dtype.kind in "fc"
    if low is not reference and _equal(low, reference, inexact):
        if exact is low or _equal(low, exact, inexact):
            low = exact = reference
    elif exact is not low and _equal(low, exact, inexact):
        exact = low
    if low is reference and exact is low:
        return Arrays(low, low, low, low, low, low, value, leaf)
    return _with_stand_ins(low, exact, reference, top, value, leaf)


def _with_stand_ins(
    low: Any, exact: Any, reference: Any, top: float, value: Any = None, leaf: Leaf | None = None
) -> Arrays:
    to = np.complex128 if np.iscomplexobj(low) else np.float64
    end, middle, start = (np.asarray(x, to) for x in (low, exact, reference))
    if np.asarray(low).dtype.kind in "fc" and not np.isfinite(end + middle + start).all():
        end, middle, start = _finite([end, middle, start], top)
        middle = np.where(np.isfinite(exact), middle, end)  # the operation rounds no number
    return Arrays(low, exact, reference, end, end if exact is low else middle, start, value, leaf)


def _equal(x: Any, y: Any, inexact: bool) -> bool:
    x, y = np.asarray(x), np.asarray(y)
    if x.size <= MANY and x.dtype == y.dtype:  # a comparison of bytes takes a third of the time
        return x.tobytes() == y.tobytes()
    if x.size > MANY and not _equal(x.flat[:MANY], y.flat[:MANY], inexact):
        return False
    same = x == y
    if same.all() or not inexact:
        return bool(same.all())
    nan = x != x
    return bool(nan.any() and (same | (nan & (y != y))).all())


def _finite(arrays: Sequence[np.ndarray], top: float) -> list[np.ndarray]:
    size = np.full(arrays[0].shape, 2.0 * top)
    for x in arrays:
        size = np.maximum(size, 2.0 * np.where(np.isfinite(x), np.abs(x), 0.0))
    size = np.minimum(size, LARGEST)

    def stand_in(x: np.ndarray) -> np.ndarray:
        inside = x if np.iscomplexobj(x) else np.clip(x, -LARGEST, LARGEST)
        beyond = np.where(np.isnan(x), size, np.sign(np.real(x)) * size)
        return np.where(np.isfinite(x), inside, beyond)

    return [stand_in(x) for x in arrays]


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """The value of an interpretation that runs both: a cell, and what the audit knows of it.

    JAX sees a pytree without arrays, so that whatever re-issues a call passes it on unchanged.

    Attributes:
        constant: whether it depends on no float argument and no random bits.
        literal: whether it is a constant of the program that no operation has rounded.
        draw: whether it is computed without rounding from random bits and constants alone.
    """

    cell: Cell
    constant: bool = False
    literal: bool = False
    draw: bool = False


jax.tree_util.register_pytree_node(Node, lambda node: ((), node), lambda node, _: node)

Multipliers = Sequence[Any]  # of each operand an array, an ``At``, or None for zeros


@dataclasses.dataclass(frozen=True, eq=False)
class At:
    """A multiplier of one element along the first axis; the others are zero."""

    index: int
    bar: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """An equation of the program, or a step of its loops and roundings.

    Attributes:
        equation: the program's, whose line is charged.
        compute: returns the exact results, in float64.
        pull: returns the operands' multipliers from those of the results.
        floats: for each result whether it is of floats.
        rounds: whether float results are rounded.
        rounds_each: whether it adds numbers to one element and rounds each sum.
        counts: whether it rounds or decides, so that an audit has statistics of it.
        moves: whether it computes views of its operands, in whatever dtype they are.
    """

    equation: Equation
    compute: Callable[[Sequence[Any]], Sequence[Any]]
    pull: Callable[[Entry, Sequence[Any], float], Multipliers]
    floats: Sequence[bool] = ()
    rounds: bool = False
    rounds_each: bool = False
    counts: bool = False
    moves: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """One visit of an operation."""

    operation: Operation
    ins: Sequence[Cell]
    outs: Sequence[Cell]
    iteration: tuple[str, int] | None = None  # the outermost loop (or the steps), and which of it


def inner(bar: Any, difference: Any) -> float:
    return float((bar * difference).sum().real)


def size(x: Any) -> float:
    """Returns the root mean square."""
    return float(np.sqrt(np.mean(np.square(np.abs(x))))) if np.size(x) else 0.0
