"""The parts of a :class:`Plan`: lines, front, upgrade, and where first order fails."""

from __future__ import annotations

import numpy as np

from ._budget import Option, bits_of
from ._knapsack import Front
from ._result import FrontPoint, PlanLine, Upgrade
from ._sites import Site
from ._space import Space, Tried

SHOWN = 24  # points of the Pareto front that a result has
MEASURED = 8  # how many of them are run
OFF = 1.5  # a factor between the adjoint pass and a run, from which on first order has failed
CUT = 0.05  # of an operand's numbers; the scales of MX formats cut off a few in each operand
SMALL = 0.01  # of the objective: roundings that do less aren't worth a note


def lines(space: Space, best: Tried, saturated: np.ndarray) -> tuple[PlanLine, ...]:
    """Returns a line for each site, with the objective of its roundings alone."""
    columns = [space.columns[i][choice] for i, choice in enumerate(best.choice)]
    measured = [space.with_columns(own) if own else 0.0 for own in columns]
    total = sum(map(abs, measured)) or 1.0
    found = []
    for i, (site, own, result) in enumerate(zip(space.sites, columns, measured, strict=True)):
        operands, cut, share = space.options[i][best.choice[i]], saturated[i], abs(result) / total
        second = space.slopes.hessian[np.ix_(own, own)].sum() / 2
        predicted = float(space.slopes.bias[own].sum() + second)
        line = PlanLine(
            name=site.name,
            function=site.function,
            primitives=site.primitives,
            weights=site.weights,
            operands=operands,
            bits=bits_of(operands.get("weight"), site.bits),
            elements=site.elements,
            predicted=space.aim.shown(predicted),
            measured=space.aim.shown(result),
            share=share,
            saturated=float(cut),
            note=_note(site, predicted, result, share, float(cut)),
        )
        found.append(line)
    return tuple(found)


def _note(site: Site, predicted: float, measured: float, share: float, cut: float) -> str:
    said = []
    ratio = abs(measured) / max(abs(predicted), 1e-300)
    if share >= SMALL and not 1 / OFF <= ratio <= OFF:
        said.append(f"{ratio:.2g} times what the adjoint pass says")
        if site.discrete and ratio > OFF:
            said.append(f"decisions change at {', '.join(site.discrete[:3])}")
    if cut >= CUT:
        said.append(f"{cut:.2%} of numbers cut off")
    return "; ".join(said)


def front(space: Space, found: Front) -> tuple[FrontPoint, ...]:
    """Returns some points of the front, evenly spaced in their order, a few of them run."""
    count = len(found.costs)
    shown = np.unique(np.linspace(0, count - 1, min(SHOWN, count)).round().astype(int))
    run = set(shown[np.linspace(0, len(shown) - 1, min(MEASURED, len(shown))).astype(int)])
    points = []
    for i in shown:
        choice = tuple(int(x) for x in found.choices[i])
        (predicted,) = space.predicted([choice])
        tried = space.run(choice) if i in run else space.tried.get(choice)
        measured = None if tried is None else space.aim.shown(tried.measured)
        points.append(
            FrontPoint(float(found.costs[i]), space.aim.shown(float(predicted)), measured)
        )
    return tuple(points)


def upgrade(space: Space, best: Tried) -> Upgrade | None:
    """Returns the change of one line that lowers the predicted objective most for its cost."""
    found: list[tuple[float, Upgrade]] = []
    for i, own in enumerate(space.columns):
        for j in range(len(own)):
            choice = (*best.choice[:i], j, *best.choice[i + 1 :])
            more = space.cost(choice) - best.cost
            (after,) = space.predicted([choice])
            gain = abs(best.predicted) - abs(float(after))
            if more > 0 and gain > 0:
                change = Upgrade(
                    line=space.sites[i].name,
                    before=_names(space.options[i][best.choice[i]]),
                    after=_names(space.options[i][j]),
                    cost=more,
                    predicted=space.aim.shown(abs(float(after))),
                )
                found.append((gain / more, change))
    return max(found, key=lambda x: x[0])[1] if found else None


def _names(option: Option) -> str:
    named = ["unrounded" if x is None else x.format.name for x in option.values()]
    return " x ".join(named) or "as written"
