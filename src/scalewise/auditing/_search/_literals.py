"""A check that needs no data: which constants of a program a format changes."""

from __future__ import annotations

import dataclasses
import linecache
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._check import checked
from ..._jax import ShapedArray
from ..._output import place, place_of
from ..._resolve import as_format
from ..._types import PyTree
from ...emulating import EXACT
from ...formats import Format, FormatLike, Saturation
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
    run,
    trace,
)
from ...primitives import having
from ...rounding import saturation
from .._run._equation_statistics import direction_of

TORCHS = {"where", "masked_fill", "clamp", "clamp_min", "clamp_max", "clip"}
SELECTS = having("selects") | TORCHS
MOVES = EXACT - SELECTS  # move or negate elements of one operand

CALLERS_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Literal:
    """A constant that a format changes by more than its last bits.

    Attributes:
        number: as written.
        rounded: its value in the format.
        what: "flushed to zero", "becomes 1", "becomes -1", "becomes infinite", "becomes NaN",
            "saturates" or, if it is subnormal, "is off by 19.2%".
        file, line, source: where it is first used.
        primitive: the operation that uses it.
        masks: whether it is a mask: an operand of select, max, min or clamp.
        direction, scope: of that operation.
        kind: the kind of a finding about it.
        slight: whether it only loses bits, because it is subnormal in the format.
        callers: ``path:line`` of each of the user's lines that call a library's ``file``.
        function: the one that uses it.
    """

    number: float
    rounded: float
    what: str
    file: str | None
    line: int
    source: str
    primitive: str
    masks: bool
    direction: str
    scope: str
    kind: str = "precision"
    slight: bool = False
    callers: tuple[str, ...] = ()
    function: str = ""

    @property
    def error(self) -> float:
        """The relative error of the rounding."""
        if math.isinf(self.number):
            return math.inf
        return abs(self.rounded - self.number) / abs(self.number)

    @property
    def called(self) -> str:
        """``called at model.py:3``; "" for a line of the user's own."""
        return called_at(self.callers)

    @property
    def where(self) -> str:
        return place(self.file, self.line)

    def __str__(self) -> str:
        return f"{self.written} {self.what} ({self.rounded:.6g}) in {self.primitive}"

    @property
    def written(self) -> str:
        """The number in as few digits as identify it."""
        return written(self.number)


def called_at(callers: Sequence[str]) -> str:
    """``called at model.py:3, model.py:9 and 2 more``; "" without callers."""
    shown = ", ".join(map(place_of, callers[:CALLERS_SHOWN]))
    more = len(callers) - CALLERS_SHOWN
    return f"called at {shown}" + (f" and {more} more" if more > 0 else "") if shown else ""


def source_line(file: str | None, line: int) -> str:
    return linecache.getline(file, line).strip() if file else ""


def written(number: float) -> str:
    """``1e-08`` also of a float32, whose float64 would be 9.99999993922529e-09."""
    short = f"{number:.6g}"
    single = np.float32(number)
    if float(single) != number:
        return repr(number)
    return short if np.float32(short) == single else str(single)


Use = tuple[str | None, int, str, float]  # file, line, primitive, number


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class _Value:
    """An array, and what it is made of.

    Attributes:
        constant_value: the literal of the program that every element is.
        fixed: the uses of literals in it, if it is made of literals alone; else None.
        drawn: whether it is a random draw, which isn't rounded before it meets an argument.
    """

    data: Any
    constant_value: float | None = dataclasses.field(default=None, metadata={"static": True})
    fixed: frozenset[Use] | None = dataclasses.field(default=None, metadata={"static": True})
    drawn: bool = dataclasses.field(default=False, metadata={"static": True})


class _Constants(Interpretation):
    """Interprets a program on plain arrays and records which operations use which constants."""

    inline = True

    def __init__(self, is_low: Callable[[ShapedArray], bool] = lambda aval: True):
        self.is_low = is_low  # whether arrays of a type are in the format
        self.uses: dict[Use, list[Equation]] = {}
        self.counted: set[Use] = set()  # uses of which an argument's numbers depend
        self.read: dict[tuple[int, ...], list[float]] = {}  # by an equation's path, its operands
        self.wide: set[tuple] = set()  # uses by a narrow operation that has them in a wider type
        self.selected: list[float] = []  # operands of select, max, min or clamp, of any type

    def is_argument(self, leaf: object) -> bool:
        return isinstance(leaf, jax.ShapeDtypeStruct)

    def lift(self, x: Argument, aval: ShapedArray) -> _Value:
        return _Value(jnp.asarray(x, aval.dtype))

    def constant(self, x: np.ndarray, aval: ShapedArray) -> _Value:
        number = float(x) if x.size == 1 else None
        with np.errstate(over="ignore"):  # 16 bits may not hold it
            return _Value(jnp.asarray(x, aval.dtype), number, frozenset())

    def lower(self, value: _Value, aval: ShapedArray) -> jax.Array:
        return value.data

    def canonical(self, value: _Value, aval: ShapedArray, boundary: Boundary, equation: Equation):
        self.counted |= value.fixed or set()
        return _Value(value.data)

    def select(self, predicate: jax.Array, on_true: _Value, on_false: _Value) -> _Value:
        return _Value(jnp.where(predicate, on_true.data, on_false.data))

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        outs = equation.bind(*[x.data if isinstance(x, _Value) else x for x in inputs])
        constants = [
            (x.constant_value, self.is_low(a))
            for x, a in zip(inputs, equation.in_avals, strict=True)
            if isinstance(x, _Value)
        ]
        self.read[equation.path] = read = [x for x, _ in constants if x is not None]
        self.selected += read if equation.name in SELECTS else []
        floats = [x for x in inputs if isinstance(x, _Value)]
        drawn = any(x.drawn for x in floats) or equation.name == "bitcast_convert_type"
        if drawn and all(x.drawn or x.fixed is not None for x in floats):
            made = zip(outs, equation.out_avals, strict=True)
            return state, [_Value(y, drawn=True) if is_float(a) else y for y, a in made]
        numbers = [number if low else None for number, low in constants]
        moves = equation.name in MOVES
        kept, own = None, {use for x in floats for use in x.fixed or ()}
        if (moves or equation.name == "convert_element_type") and len(constants) == 1:
            kept = constants[0][0]
        else:
            if any(is_float(a) and self.is_low(a) for a in equation.out_avals):
                numbers = [number for number, _ in constants]
            file, line, _ = equation.source or (None, 0, "")
            for number, (_, low) in zip(numbers, constants, strict=True):
                if number is not None:
                    use = (file, line, equation.name, number)
                    self.uses.setdefault(use, []).append(equation)
                    self.wide |= set() if low else {use}
                    own.add(use)
        fixed = frozenset(own) if floats and all(x.fixed is not None for x in floats) else None
        self.counted |= own if fixed is None else set()
        return state, [
            _Value(y, kept, fixed) if is_float(a) else y
            for y, a in zip(outs, equation.out_avals, strict=True)
        ]


@checked
def literals(f: Callable, fmt: FormatLike, *, saturate: Saturation = False) -> Callable:
    """Finds the constants of ``f`` that a format turns into 0, 1, infinity, NaN, its largest number
    or an inexact subnormal number.

    Nothing is computed: arguments may be shapes (``jax.ShapeDtypeStruct``). A decay rate of 0.999
    is 1 in bfloat16, an epsilon of 1e-8 is 0 in float16, ``finfo(float32).min`` is -inf in both.

    Args:
        f: any function of pytrees.
        fmt: a format, or a name or dtype of one.
        saturate: as for :func:`scalewise.round_to`.

    Returns:
        A function of ``f``'s arguments that returns a tuple of :class:`Literal`, in program order.

    Example:
        >>> import jax.numpy as jnp
        >>> def f(x):
        ...     return x * 0.999 / (jnp.sqrt(x) + 1e-8)
        >>> [str(c) for c in literals(f, "fp16")(jnp.ones(3))]
        ['1e-08 flushed to zero (0) in add']
        >>> [str(c) for c in literals(f, "bf16")(jnp.ones(3))]
        ['0.999 becomes 1 (1) in mul']
    """
    fmt = as_format(fmt, "literals")
    mode = saturation(saturate, fmt)

    def check(*args: PyTree, **kwargs: PyTree) -> tuple[Literal, ...]:
        program = trace(f, _Constants(), args, kwargs, name="literals")
        return constants_of(program, fmt, mode).changed

    return check


class Constants(NamedTuple):
    """The constants of a program.

    Attributes:
        changed: those that a format changes by more than their last bits.
        masks: operands of select, max, min or clamp of more than half the format's maximum,
            ``finfo(float16).min`` for example: the format doesn't hold the sum of two.
        read: by an equation's path, the constants among its operands, whatever the format.
    """

    changed: tuple[Literal, ...] = ()
    masks: tuple[float, ...] = ()
    read: Mapping[tuple[int, ...], Sequence[float]] = MappingProxyType({})


def constants_of(
    program: Program,
    fmt: Format,
    saturate: Saturation,
    is_low: Callable[[ShapedArray], bool] = lambda aval: True,
) -> Constants:
    """Returns the constants of a program. Those of types for which ``is_low`` is False stay in
    float32, and don't count as changed."""
    constants = _Constants(is_low)

    def interpret(arrays):
        values = run(program, constants, (), arrays)[1]
        for v in values:
            constants.counted |= (isinstance(v, _Value) and v.fixed) or set()
        return [v.data if isinstance(v, _Value) else v for v in values]

    jax.eval_shape(interpret, list(program.arrays))
    trained = any(use[0].direction == "backward" for use in constants.uses.values())
    found = [
        _literal(k, uses, fmt, saturate, trained, wide=k in constants.wide)
        for k, uses in constants.uses.items()
        if k in constants.counted
    ]
    masks = [x for x in constants.selected if float(fmt.max) / 2 < abs(x) < math.inf]
    changed = tuple(x for x in found if x is not None)
    return Constants(changed, tuple(dict.fromkeys(masks)), constants.read)


def _literal(
    key, uses: Sequence[Equation], fmt: Format, saturate: Saturation, trained: bool, wide: bool
) -> Literal | None:
    file, line, primitive, number = key
    if math.isnan(number) or number == 0:
        return None
    rounded = float(fmt.decode(fmt.encode(number, saturate=saturate)))
    change = _change(number, rounded, fmt)
    if change is None:
        return None
    what, kind, slight = change
    if wide and kind == "precision":  # it's not rounded itself, but may be all of a result
        return None
    masks = primitive in SELECTS
    source = source_line(file, line)
    direction = direction_of(uses[0], trained)
    place = (file, line, source, primitive, masks, direction, uses[0].scope)
    callers = dict.fromkeys("{}:{}".format(*use.caller) for use in uses if use.caller)
    function = uses[0].source[2] if uses[0].source else ""
    return Literal(number, rounded, what, *place, kind, slight, tuple(callers), function)


def _change(number: float, rounded: float, fmt: Format) -> tuple[str, str, bool] | None:
    if math.isnan(rounded):
        return "becomes NaN", "overflow", False
    if math.isinf(number):
        return None
    if math.isinf(rounded):
        return "becomes infinite", "overflow", False
    if rounded == 0:
        return "flushed to zero", "underflow", False
    if abs(rounded) == 1 and abs(number) != 1:
        return f"becomes {rounded:.0f}", "precision", False
    if abs(number) > float(fmt.max):
        return "saturates", "saturation", False
    error = abs(rounded / number - 1)
    if abs(rounded) < float(fmt.smallest_normal) and error > float(fmt.eps):
        return f"is off by {error:.1%}", "precision", True
    return None
