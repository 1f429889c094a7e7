"""Carried state, an output that is an argument of the next call, and changes of it that are lost.

One call's error hardly shows that a weight or an average stays what it is: its change is smaller
than one rounding. Over many calls it is all that counts.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import numpy as np

from ..._jax import jex
from ...formats import Format
from ...interpret import Equation, Program, is_float
from .._run._causes import Causes
from .._run._equation_statistics import ADDITIONS
from .._run._floors import norm
from .._run._session import Outcome, Session, output_name
from .._thresholds import (
    BACK,
    CHANGE_LOST,
    CONTRIBUTION_LOST,
    NEAR_ITS_END,
    ROUNDED_AWAY,
    SMALL_FACTOR,
)
from ._literals import Literal


class Carried(NamedTuple):
    """An output and the argument that it replaces in the next call, by position among the floats.

    ``whole`` is True for an argument that is one array, not part of a tree: a layer's result may
    have that array's shape too.
    """

    output: int
    argument: int
    whole: bool


@dataclasses.dataclass(frozen=True)
class Update:
    """One output that is the next call's argument."""

    path: str  # of the output
    indices: tuple[int, ...]  # the equations that round it
    size: float  # of the reference run's change, relative to the array
    error: float  # of the change in the low-precision run, relative to the reference run's
    made: float  # the part of it that the rounding of those equations makes
    whole: bool  # see :class:`Carried`
    # whether the output is the argument itself plus something, and there are others: a function of
    # one argument may be a layer
    adds: bool

    @property
    def lost(self) -> bool:
        return self.error >= CHANGE_LOST and self.made >= ROUNDED_AWAY

    def __str__(self) -> str:
        error = f"{self.error:.0%}" if self.error < 10 else f"{self.error:.2g} times its size"
        name = output_name(self.path)
        return f"{name} changes by {self.size:.1g} of its size, with error {error}"


def carried(program: Program) -> list[Carried]:
    """Returns the outputs that are arguments of the next call: of the same shape and dtype, with
    the path that an argument has below its first key. An argument that the function updates in
    place (a mutable array, a Flax NNX object) is an output of the same name.

    An argument that is one array has no such path: it is replaced by the result, or by the first
    part of it, if it is the first argument.
    """
    outs, arguments = (
        [(path, (a.shape, a.dtype)) for path, a in zip(paths, avals, strict=True) if is_float(a)]
        for paths, avals in (
            (program.paths, program.out_avals), (program.arguments, program.in_avals)
        )
    )  # fmt: skip
    found: list[Carried] = []
    for i, (path, kind) in enumerate(outs):
        for j, (argument, other) in enumerate(arguments):
            in_place = path == f"argument{argument}"
            below = re.sub(r"^\[[^]]*\]", "", argument)
            before = path.removesuffix(below)
            fits = path.endswith(below) and re.fullmatch(r"(\[\d+\])?", before)
            whole = not below and not in_place
            if whole and not (argument == "[0]" and before in ("", "[0]")):
                continue
            if (fits or in_place) and kind == other and j not in {x.argument for x in found}:
                found.append(Carried(i, j, whole))
                break
    return found


def updates(session: Session, outcome: Outcome) -> list[Update]:
    pairs = carried(session.program)
    if not pairs:
        return []
    lows, references = session.state_arrays()
    eps = float(np.finfo(session.reference.dtype).eps)
    causes = outcome.causes
    found = []
    for output, argument, whole in pairs:
        new, old = _wide(outcome.reference[output]), _wide(references[argument])
        low = _wide(outcome.low[output]) - _wide(lows[argument])
        with np.errstate(all="ignore"):
            size, change, error = map(norm, (new, new - old, new - old - low))
        if 0 < 4 * eps * size < change < math.inf:
            indices = _rounds(outcome.origins[output], causes)
            made = max((causes.equations[i].introduced for i in indices), default=0.0)
            path = outcome.outputs[output][0]
            adds = len(references) > 1 and any(_adds_to_argument(outcome, i) for i in indices)
            made *= size / change
            found.append(Update(path, indices, change / size, error / change, made, whole, adds))
    return found


def _wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _rounds(origins: Sequence[int], causes: Causes) -> tuple[int, ...]:
    """Returns the equations that round an output's numbers, without conversions behind them that
    change none; those that made the output if none did."""
    indices = [i for i in origins if i in causes.equations]
    made = tuple(indices)
    for _ in range(BACK):
        here = [causes.equations[i] for i in indices if i in causes.equations]
        if any(e.introduced or e["added"] for e in here):
            return tuple(e.index for e in here)
        indices = [e.index for i in here for e in causes.producers(i.index)]
    return made


def decays(
    session: Session, outcome: Outcome, literals: Sequence[Literal]
) -> list[tuple[Literal, tuple[int, ...]]]:
    """An average with such a decay forgets nothing, whatever its change in one call."""
    ones = [x for x in literals if abs(x.rounded) == 1 and x.primitive == "mul"]
    causes = outcome.causes
    found = []
    for output in (x.output for x in carried(session.program)) if ones else ():
        indices = _rounds(outcome.origins[output], causes)
        scaled = [
            causes.equations[i] for i in {*indices, *causes.back(indices, BACK)}
            if i in causes.equations and _scales_argument(outcome, i)
        ]  # fmt: skip
        places = {(e.file, e.line) for e in scaled if e.primitive == "mul"}
        found += [(x, indices) for x in ones if (x.file, x.line) in places]
    return found


def lost_contributions(outcome: Outcome) -> list[int]:
    causes = outcome.causes
    found = []
    for e in outcome.equations:
        lost = e["added"] and e.share("swamped") >= CONTRIBUTION_LOST and not e.adds_constant
        if not lost or e.direction != "optimizer":
            continue
        for before in causes.producers(e.index):
            factor = _factor(outcome.recorded[before.index])
            if _scales_argument(outcome, before.index) and 0 < abs(factor) < SMALL_FACTOR:
                found.append(e.index)
    return found


def counters(session: Session, outcome: Outcome, fmt: Format) -> list[tuple[int, str]]:
    causes, arguments = outcome.causes, session.state_arrays()[1]
    found = []
    for output, argument, _ in carried(session.program):
        old, new = _wide(arguments[argument]), _wide(outcome.reference[output])
        for e in (causes.equations[i] for i in _rounds(outcome.origins[output], causes)):
            literals = [x for x in outcome.recorded[e.index].eqn.invars if _is_number(x)]
            step = abs(float(literals[0].val)) if literals else 0.0
            end = step * 2.0**fmt.precision
            near = e["limit"] <= float(fmt.max) and NEAR_ITS_END * end <= e["reference_max"] < end
            if near and (np.abs(new - old) == step).all() and (old % step == 0).all():
                top = e["reference_max"]
                found.append((e.index, f"a counter, now {top:g}, stays at {end:g} from then on"))
    return found


def _is_number(atom: object) -> TypeGuard[jex.Literal]:
    return isinstance(atom, jex.Literal) and np.size(atom.val) == 1


def _operands(outcome: Outcome, index: int) -> Sequence[Sequence[int]]:
    """Returns the equations that operands come from in the first call, whose state is argument."""
    flow = outcome.dataflow
    return (flow.flow if flow.loops.get(index) else flow.operands).get(index, ())


def _scales_argument(outcome: Outcome, index: int) -> bool:
    """Returns True if no operand of an equation comes from another: they are arguments."""
    return not any(_operands(outcome, index))


def _adds_to_argument(outcome: Outcome, index: int) -> bool:
    if outcome.recorded[index].name not in ADDITIONS:
        return False
    return any(
        all(
            outcome.recorded[i].name == "convert_element_type" and _scales_argument(outcome, i)
            for i in operand
        )
        for operand in _operands(outcome, index)
    )


def _factor(equation: Equation) -> float:
    found = [x.val for x in equation.eqn.invars if _is_number(x)]
    return float(found[0]) if equation.name == "mul" and found else 0.0
