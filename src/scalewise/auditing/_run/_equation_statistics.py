"""The statistics of one equation by name, and where the user wrote it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from ..._jax import entry, jex
from ..._output import place
from ...interpret import Equation, is_float
from ...primitives import Family, having, names
from .._tape._both import Counted
from .._thresholds import ACCUMULATED, EPSILON
from ._dataflow import Dataflow

TOTALS = {  # of what it is a share
    "swamped": "added", "cancelled": "added", "differ": "decided",
    "operands_saturated": "operands", "operands_flushed": "operands",
    "operands_latent": "operands",
}  # fmt: skip
CASTS = {"astype", "array", "asarray", "convert_element_type"}  # functions that users call
ADDITIONS = having("adds") | having("accumulates")


@dataclasses.dataclass(frozen=True)
class EquationStatistics:
    """Statistics of one equation over all iterations of the loops around it.

    Attributes:
        index: its place among the equations, in the order in which they first ran.
        primitive, shape, dtype: of its first float result, or else of its first result.
        operation: the primitive; of a conversion to fewer bits that JAX itself makes of a result in
            float32, the primitive that computes the result.
        file, line, function: where the user wrote it; None, 0, "" where JAX doesn't know.
        caller: ``path:line`` of the user's own line that called the library's ``file``; "" if
            ``file`` is the user's.
        scope: the name stack.
        direction: "forward", "backward" or "optimizer".
        looped: whether it ran more than once.
        counted: the statistics; :attr:`numbers` has them by name, see ``_statistics``.
        adds_constant: whether it adds a small constant, such as an epsilon.
        gradient: of a product in the backward pass, "weight" or "input"; else "".
        call_site: ``path:line`` of the user's line that called ``function``, if the function's name
            is ambiguous (a lambda, ``__call__``); else "".
        exact_sum: of a product that a device's matrix units add up, the error made here if they
            added exactly; NaN where that wasn't measured.
        is_output: whether an output is its result, or nothing that is known reads it.
    """

    index: int
    primitive: str
    shape: tuple[int, ...]
    dtype: str
    file: str | None
    line: int
    function: str
    caller: str
    scope: str
    direction: str
    looped: bool
    counted: Counted = dataclasses.field(repr=False)
    call_site: str = ""
    adds_constant: bool = False
    gradient: str = ""
    exact_sum: float = math.nan
    is_output: bool = True
    operation: str = ""

    @property
    def numbers(self) -> dict[str, float]:
        return self.counted.found[0]

    @property
    def histogram(self) -> tuple[int, ...]:
        """How many of the reference run's numbers have each exponent from ``LOWEST`` up."""
        return self.counted.found[1]

    def __getitem__(self, name: str) -> float:
        return self.numbers[name]

    def as_dict(self) -> dict[str, Any]:
        own = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        del own["counted"]
        return own | {"numbers": self.numbers, "histogram": self.histogram}

    @property
    def quantizes(self) -> bool:
        """Whether it is the program's own cast to a dtype of 8 bits or fewer."""
        cast = self.primitive == "convert_element_type" and self.dtype.startswith("float")
        return cast and np.dtype(self.dtype).itemsize == 1

    @property
    def short(self) -> str:
        """``file.py:12``."""
        return place(self.file, self.line)

    @property
    def part(self) -> str:
        """The direction; of a product in the backward pass, the gradient that it computes."""
        return f"{self.direction}, {self.gradient} gradient" if self.gradient else self.direction

    @property
    def name(self) -> str:
        """The function's name, qualified where the bare one is ambiguous."""
        return display_name(self.function)

    @cached_property
    def introduced(self) -> float:
        """Relative RMS error made here, against the exact result of the same low inputs."""
        return _ratio(self["introduced2"], self["exact2"])

    @property
    def accumulated(self) -> float:
        """The error made here, if a device's accumulator makes most of it, else 0."""
        return self.introduced if self.introduced > ACCUMULATED * self.exact_sum else 0.0

    @cached_property
    def inherited(self) -> float:
        """Relative RMS error against the reference run: made here and carried in."""
        return _ratio(self["inherited2"], self["reference2"])

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise ratio in dB; -inf if no number is finite in both runs."""
        if self["sampled"] and not self["compared"]:
            return -math.inf
        return -20 * math.log10(self.inherited) if self.inherited else math.inf

    @property
    def drift(self) -> float:
        """Bias of the rounding errors made here: 1 or -1 if all have one sign, 0 if they cancel."""
        return self["drift"] / self["drift_size"] if self["drift_size"] else 0.0

    def share(self, name: str) -> float:
        """Returns a count as a share of all numbers (swamped, cancelled: of all additions; differ:
        of all decisions; of operands: of all operands' numbers)."""
        total = self[TOTALS.get(name, "elements")]
        return self[name] / total if total else 0.0


Equations = Sequence[EquationStatistics]


def display_name(qualified: str) -> str:
    """Returns a method's name with its class, a lambda's with the function that has it.

    Example:
        >>> display_name("make.<locals>.step"), display_name("Attention.__call__")
        ('step', 'Attention.__call__')
    """
    parts = qualified.split(".")
    nested = parts[-2:-1] == ["<locals>"] and not is_ambiguous(qualified)
    return parts[-1] if nested else ".".join(x for x in parts if x != "<locals>")


def is_ambiguous(qualified: str) -> bool:
    """Returns True for ``<lambda>``, ``<listcomp>``, ``__call__``."""
    return qualified.rpartition(".")[2].startswith(("<", "__"))


def _ratio(noise: float, signal: float) -> float:
    if noise == 0:
        return 0.0
    return math.sqrt(noise / signal) if signal else math.inf


def equation_statistics(
    equations: Sequence[Equation],
    statistics: Mapping[tuple[int, ...], Counted],
    dataflow: Dataflow,
    exact_sums: Mapping[int, float] = MappingProxyType({}),
) -> list[EquationStatistics]:
    trained = any(e.direction == "backward" for e in equations)
    gradient_of = gradients(equations, dataflow.operands)
    prepared = _before_gradients(equations, dataflow.operands) if trained else set()
    produced = {i for origins in dataflow.outputs for i in origins}
    read = {i for own in dataflow.flow.values() for operand in own for i in operand}
    found = []
    for i, equation in enumerate(equations):
        if equation.path not in statistics:
            continue
        row = _of_equation(i, equation, trained, statistics[equation.path])
        is_output = i in produced or i not in read
        sums_of = exact_sums.get(i, math.nan)
        gradient = gradient_of.get(i, "")
        if i in prepared:
            row = dataclasses.replace(row, direction="forward")
        if row.adds_constant and any(i in x for x in dataflow.flow.get(i, ())):
            row = dataclasses.replace(row, adds_constant=False)  # to its own result: ``t = t + dt``
        row = dataclasses.replace(
            row, gradient=gradient, exact_sum=sums_of, is_output=is_output,
            operation=_operation(equations, i, dataflow.operands),
        )  # fmt: skip
        found.append(row)
    return found


def _operation(equations: Sequence[Equation], i: int, operands: Operands) -> str:
    equation = equations[i]
    if equation.name != "convert_element_type" or entry(equation.eqn) in CASTS:
        return equation.name
    (before,), (after,) = equation.in_avals, equation.out_avals
    narrows = is_float(before) and is_float(after) and after.dtype.itemsize < before.dtype.itemsize
    origins = [j for operand in operands.get(i, ()) for j in operand] if narrows else []
    return equations[origins[0]].name if len(origins) == 1 else equation.name


def _before_gradients(equations: Sequence[Equation], operands: Operands) -> set[int]:
    """Returns what is computed for a differentiated function outside of it: of arguments, or what
    JAX moves out of its loops; nothing that reads a gradient."""
    before, after = set(), set()
    for i, equation in enumerate(equations):
        origins = {j for operand in operands.get(i, ()) for j in operand}
        if equation.direction == "backward" or not after.isdisjoint(origins):
            after.add(i)
    for i in reversed(range(len(equations))):
        if equations[i].direction != "update" or i in before:
            before |= {j for operand in operands.get(i, ()) for j in operand}
    return {i for i in before - after if equations[i].direction == "update"}


def _of_equation(i: int, equation: Equation, trained: bool, counted: Counted) -> EquationStatistics:
    place = written_at(equation, trained)
    floats = [a for a in equation.out_avals if is_float(a)]
    aval = (floats or list(equation.out_avals))[0]
    site = equation.call_site if is_ambiguous(place["function"]) else None
    return EquationStatistics(
        index=i,
        primitive=equation.name,
        shape=tuple(aval.shape),
        dtype=str(aval.dtype),
        **place,
        looped=counted.visits > 1,
        counted=counted,
        call_site="{}:{}".format(*site) if site else "",
        adds_constant=equation.name in ADDITIONS and any(map(_is_small, equation.eqn.invars)),
    )


def _is_small(atom: object) -> bool:
    return isinstance(atom, jex.Literal) and np.size(atom.val) == 1 and abs(atom.val) <= EPSILON


def written_at(equation: Equation, trained: bool) -> dict[str, Any]:
    file, line, function = equation.source or (None, 0, "")
    return {
        "file": file,
        "line": line,
        "function": function,
        "caller": "{}:{}".format(*equation.caller) if equation.caller else "",
        "scope": equation.scope,
        "direction": direction_of(equation, trained),
    }


def direction_of(equation: Equation, trained: bool) -> str:
    """Returns "forward", "backward" or "optimizer": what is outside of the differentiated function
    is the optimizer, if the program has a backward pass."""
    if equation.direction == "update":
        return "optimizer" if trained else "forward"
    return equation.direction


Operands = Mapping[int, Sequence[Sequence[int]]]  # by equation and operand: where it comes from

PRODUCTS = names(lambda row: row.family is Family.CONTRACTION)


def gradients(equations: Sequence[Equation], operands: Operands) -> dict[int, str]:
    """A backward product multiplies a gradient by one operand of a forward product of the same
    source line, and gives the gradient of the other one. That is a weight if it is an argument of
    the program or a part of one, and an input if an equation has computed it. Products for which
    this doesn't tell are left out: those of loops that are compiled as a whole, for example."""
    forward: dict[tuple[str, int, str] | None, list[int]] = {}
    backward = []
    for i, equation in enumerate(equations):
        if equation.name in PRODUCTS and equation.source is not None:
            if equation.direction == "backward":
                backward.append(i)
            else:
                forward.setdefault(equation.source, []).append(i)
    found = {}
    for i in backward:
        equation = equations[i]
        own = [_operand(equation, operands.get(i, ()), at) for at in range(2)]
        result = sorted(equation.out_avals[0].shape)
        kinds = {
            "input" if other[0] else "weight"
            for j in forward.get(equation.source, ())
            for ends in [[_operand(equations[j], operands.get(j, ()), at) for at in range(2)]]
            for residual, other in (ends, ends[::-1])
            if residual in own and other[1] == result
        }
        if len(kinds) == 1:
            found[i] = kinds.pop()
    return found


Operand: TypeAlias = tuple[tuple[int, ...], list[int]]  # its origin, its axes' lengths


def _operand(equation: Equation, operands: Sequence[Sequence[int]], at: int) -> Operand:
    """Returns where an operand comes from, and its axes' lengths: transposes don't matter."""
    origin = tuple(operands[at]) if at < len(operands) else ()
    return origin, sorted(equation.in_avals[at].shape)
