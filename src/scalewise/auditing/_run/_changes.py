"""Carried state, an output that is an argument of the next call, and how each run changes it.

One call's error hardly shows that a weight or an average stays what it is: its change is smaller
than one rounding. Over many calls it is all that counts.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike

from ...interpret import Program, is_float, is_inexact
from .._thresholds import (
    BACK,
    CHANGE_KEPT,
    CHANGE_LOST,
    CHANGE_REGAINED,
    CHANGE_WRONG,
    ROUNDED_AWAY,
)
from ._causes import Causes
from ._dataflow import gradients
from ._equation_statistics import ADDITIONS, EquationStatistics
from ._outcome import Floors, Outcome, norm, output_name

FIRST_KEY = re.compile(r"\[[^]]*\]|\.\w+")


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
    state: str  # the argument that it is of: weights, moments, ...
    output: int  # its position among those of floats and complex numbers
    indices: tuple[int, ...]  # the equations that round it
    change: float  # the norm of the reference run's change
    size: float  # the same, relative to the array's
    error: float  # of the change in the low-precision run, relative to the reference run's
    made: float  # the part of it that the roundings of those equations make, if all have one sign
    kept: float  # the size of the low-precision run's change, relative to the reference run's
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
    """Returns the outputs that are arguments of the next call: of the same shape, with the path
    that an argument has below its first key, and no gradients. An argument that the function
    updates in place (a mutable array, a Flax NNX object) is an output of the same name.

    An argument that is one array has no such path: it is replaced by the part of the result in its
    place, if the arguments before it are replaced so too. A counter is such an argument.
    """
    outs, arguments = (
        [(path, a) for path, a in zip(paths, avals, strict=True) if is_inexact(a)]
        for paths, avals in (
            (program.paths, program.out_avals), (program.arguments, program.in_avals)
        )
    )  # fmt: skip
    returned = zip(gradients(program), program.out_avals, strict=True)
    is_gradient = [own for own, a in returned if is_inexact(a)]
    found: list[Carried] = []
    for i, (path, aval) in enumerate(outs):
        for j, (argument, other) in enumerate(arguments):
            in_place = path == f"argument{argument}"
            below = re.sub(r"^\[[^]]*\]", "", argument)
            before = path.removesuffix(below)
            fits = path.endswith(below) and re.fullmatch(r"(\[\d+\])?", before)
            whole = not below and not in_place
            if whole and not _takes_place(path, argument, [outs[x.output][0] for x in found]):
                continue
            same = aval.shape == other.shape and is_float(aval) == is_float(other)
            same = same and not is_gradient[i]
            if (fits or in_place) and same and j not in {x.argument for x in found}:
                found.append(Carried(i, j, whole))
                break
    return found


def _takes_place(path: str, argument: str, carried: Sequence[str]) -> bool:
    """Returns whether a part of the result has an argument's place, behind others that have."""
    place = int(argument[1:-1]) if re.fullmatch(r"\[\d+\]", argument) else -1
    behind = place == 0 or any(x.startswith(f"[{place - 1}]") for x in carried)
    return behind and path in ("" if place == 0 else argument, argument)


def updates(
    program: Program,
    outcome: Outcome,
    lows: Sequence[ArrayLike],
    references: Sequence[ArrayLike],
    eps: float,
    floors: Floors,
) -> list[Update]:
    """Returns how a run changes its state.

    Args:
        program: the program.
        outcome: of its run.
        lows, references: the float arguments in both arithmetics.
        eps: of the reference run's dtype; changes of a few of it are roundings.
        floors: which numbers aren't compared.
    """
    causes, found = outcome.causes, []
    floats = zip(program.arguments, program.in_avals, strict=True)
    arguments = [path for path, aval in floats if is_inexact(aval)]
    for output, argument, whole in carried(program):
        arrays = (
            outcome.reference[output], references[argument], outcome.low[output], lows[argument]
        )  # fmt: skip
        size, change, error, kept = _sizes(*(floors.compared(output, x) for x in arrays))
        if 0 < 4 * eps * size < change < math.inf:
            indices = rounds_of(outcome.origins[output], causes)
            here = (causes.equations[i] for i in indices)
            own = (e for e in here if _norm_of(e) >= size / 2)  # a float32 sum isn't among them
            made = max((e.introduced * e["visits"] for e in own), default=0.0)
            path, key = outcome.outputs[output][0], FIRST_KEY.match(arguments[argument])
            state = key.group() if key else ""
            adds = len(references) > 1 and any(_adds_to_argument(outcome, i) for i in indices)
            found.append(
                Update(
                    path, state, output, indices, change, change / size, error / change,
                    made * size / change, kept / change, whole, adds,
                )
            )  # fmt: skip
    return found


def _norm_of(e: EquationStatistics) -> float:
    """The norm of the exact result, from the numbers sampled."""
    return math.sqrt(e["exact2"] / max(e["compared"], 1.0) * math.prod(e.shape))


def wrong(found: Iterable[Update], noisy: Container[str]) -> list[Update]:
    """Returns changes that are wrong for another reason than the state's own rounding: gradients
    that are flushed to zero, for example. ``noisy`` are outputs whose changes are roundings.

    They are judged together, those of all weights for one: a bias whose gradient nearly cancels,
    and which Adam moves as far as the others, hardly matters. One that isn't changed at all does.
    """
    parts: dict[str, list[Update]] = {}
    for x in found:
        if x.path not in noisy:
            parts.setdefault(x.state, []).append(x)
    are_wrong: list[Update] = []
    for part in parts.values():
        change = math.hypot(*(x.change for x in part))
        error, made = (
            math.hypot(*(x.change * share for x, share in zip(part, shares, strict=True))) / change
            for shares in ([x.error for x in part], [x.made for x in part])
        )
        together = CHANGE_WRONG <= error < math.inf and made < ROUNDED_AWAY
        are_wrong += [
            x for x in part
            if CHANGE_WRONG <= x.error < math.inf
            and (together or (x.kept <= CHANGE_KEPT and x.made < ROUNDED_AWAY))
        ]  # fmt: skip
    return are_wrong


def regained(before: Sequence[Update], after: Iterable[Update]) -> bool:
    """Returns whether the change with the largest error has at most half of it in another run."""
    worst = max(before, key=lambda x: x.error, default=None)
    now = {x.path: x.error for x in after}
    return worst is not None and now.get(worst.path, math.inf) <= CHANGE_REGAINED * worst.error


def started_at_zero(program: Program, arguments: Sequence[ArrayLike]) -> dict[int, float]:
    """Returns the outputs, by position, that replace an array of zeros beside others, and for each
    the norm that it would have if its numbers were as large as theirs.

    A bias that starts at 0 is after one step what Adam makes of the signs of its gradients.
    """
    pairs = zip(program.arguments, program.in_avals, strict=True)
    paths = [path for path, aval in pairs if is_inexact(aval)]
    parents = [path[: max(path.rfind("["), path.rfind("."), 0)] for path in paths]
    sizes: dict[str, list[float]] = {}
    for parent, x in zip(parents, map(np.asarray, arguments), strict=True):
        if x.ndim and x.any():
            sizes.setdefault(parent, []).append(float(np.mean(np.square(wide(x)))))
    found = {}
    for output, argument, _ in carried(program):
        x, near = np.asarray(arguments[argument]), sizes.get(parents[argument])
        if parents[argument] and near and x.ndim and not x.any():
            found[output] = math.sqrt(sum(near) / len(near) * x.size)
    return found


def wide(x: ArrayLike) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _sizes(*arrays: np.ndarray) -> list[float]:
    """Returns the norms of an array in the reference run, of its change there, of the error of its
    change in the low-precision run, and of that change."""
    new, old, after, before = (np.asarray(x, np.float64) for x in arrays)
    with np.errstate(all="ignore"):
        change, low = new - old, after - before
        return [norm(x) for x in (new, change, change - low, low)]


def rounds_of(origins: Sequence[int], causes: Causes) -> tuple[int, ...]:
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


def _operands(outcome: Outcome, index: int) -> Sequence[Sequence[int]]:
    """Returns the equations that operands come from in the first call, whose state is argument."""
    flow = outcome.dataflow
    return (flow.flow if flow.loops.get(index) else flow.operands).get(index, ())


def scales_argument(outcome: Outcome, index: int) -> bool:
    """Returns True if no operand of an equation comes from another: they are arguments."""
    return not any(_operands(outcome, index))


def _adds_to_argument(outcome: Outcome, index: int) -> bool:
    if outcome.recorded[index].name not in ADDITIONS:
        return False
    return any(
        all(
            outcome.recorded[i].name == "convert_element_type" and scales_argument(outcome, i)
            for i in operand
        )
        for operand in _operands(outcome, index)
    )
