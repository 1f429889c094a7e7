"""What keeps carried state from changing in later calls: decays, contributions, counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import numpy as np

from ..._jax import jex
from ...formats import Format
from ...interpret import Equation
from .._run._changes import carried, rounds_of, scales_argument, wide
from .._run._outcome import Outcome
from .._run._session import Session, state_of
from .._thresholds import BACK, CONTRIBUTION_LOST, NEAR_ITS_END, SMALL_FACTOR
from ._literals import Literal


def decays(
    session: Session, outcome: Outcome, literals: Sequence[Literal]
) -> list[tuple[Literal, tuple[int, ...]]]:
    """An average with such a decay forgets nothing, whatever its change in one call."""
    ones = [x for x in literals if abs(x.rounded) == 1 and x.primitive == "mul"]
    causes = outcome.causes
    found = []
    for output in (x.output for x in carried(session.program)) if ones else ():
        indices = rounds_of(outcome.origins[output], causes)
        scaled = [
            causes.equations[i] for i in {*indices, *causes.back(indices, BACK)}
            if i in causes.equations and scales_argument(outcome, i)
        ]  # fmt: skip
        places = {(e.file, e.line) for e in scaled if e.primitive == "mul"}
        found += [(x, indices) for x in ones if (x.file, x.line) in places]
    return found


def lost_contributions(session: Session, outcome: Outcome) -> list[int]:
    """Returns the additions of an optimizer, or of what makes a state's tree without a gradient, in
    which a small multiple of an argument is nearly always lost: a weight decay."""
    causes, trees = outcome.causes, (x for x in carried(session.program) if not x.whole)
    makes_state = {i for x in trees for i in rounds_of(outcome.origins[x.output], causes)}
    found = []
    for e in outcome.equations:
        lost = e["added"] and e.share("swamped") >= CONTRIBUTION_LOST and not e.adds_constant
        if not lost or (e.direction != "optimizer" and e.index not in makes_state):
            continue
        for before in causes.producers(e.index):
            factor = _factor(outcome.recorded[before.index])
            if scales_argument(outcome, before.index) and 0 < abs(factor) < SMALL_FACTOR:
                found.append(e.index)
    return found


def counters(session: Session, outcome: Outcome, fmt: Format) -> list[tuple[int, str]]:
    causes, arguments = outcome.causes, state_of(session.program, outcome)[1]
    found = []
    for output, argument, _ in carried(session.program):
        old, new = wide(arguments[argument]), wide(outcome.reference[output])
        for e in (causes.equations[i] for i in rounds_of(outcome.origins[output], causes)):
            literals = [x for x in outcome.recorded[e.index].eqn.invars if _is_number(x)]
            step = abs(float(literals[0].val)) if literals else 0.0
            end = step * 2.0**fmt.precision
            top, narrow = e["reference_max"], e["limit"] <= float(fmt.max)
            steps = bool(step) and (np.abs(new - old) == step).all() and (old % step == 0).all()
            if not narrow or not steps:
                continue
            if NEAR_ITS_END * end <= top < end:
                found.append((e.index, f"a counter, now {top:g}, stays at {end:g} from then on"))
            elif old.size and np.abs(old).min() >= end:
                found.append((e.index, f"a counter, now {top:g}, stays where it is"))
    return found


def _is_number(atom: object) -> TypeGuard[jex.Literal]:
    return isinstance(atom, jex.Literal) and np.size(atom.val) == 1


def _factor(equation: Equation) -> float:
    found = [x.val for x in equation.eqn.invars if _is_number(x)]
    return float(found[0]) if equation.name == "mul" and found else 0.0
