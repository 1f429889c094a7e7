"""Puts the result of :func:`plan` together: lines, front, upgrade, and where first order fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..autoscaling import Boundaries
from ..interpret import Applied, Equation, State, Value
from ._budget import UNITS, Budget, Option, bits_of
from ._confirm import Space, Tried
from ._knapsack import Front
from ._objective import Objective
from ._result import FrontPoint, PlanLine, Upgrade
from ._sensitivity import Sensitivity
from ._sites import Site

SHOWN = 24  # points of the Pareto front that a result has
MEASURED = 8  # how many of them are run
OFF = 1.5  # a factor between the adjoint pass and a run, from which on first order has failed
CUT = 0.05  # of an operand's numbers; the scales of MX formats cut off a few in each operand
SMALL = 0.01  # of the objective: roundings that do less aren't worth a note


@dataclasses.dataclass(frozen=True)
class Counting(Boundaries):
    """The program under a plan's recipe; the state counts the numbers that are cut off.

    Attributes:
        index: the site of each contraction by its path; the state has a row for each site: the
            numbers that were cut off, and all that were rounded.
    """

    index: Mapping[tuple[int, ...], int] = dataclasses.field(default_factory=dict)

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        if equation.path in self.index:
            for x in self.rounded_operands(equation, inputs):
                counts = jnp.stack([jnp.sum(x.saturated, dtype=jnp.float32), x.exact.size])
                state = state.at[self.index[equation.path]].add(counts)
        return state, self._applied(equation, inputs)


@dataclasses.dataclass(frozen=True)
class Report:
    """The plans of a program that were run, from which a result is made.

    Attributes:
        sites, options: all of them.
        space: the plans that were run.
        slopes: what the adjoint pass says of each rounding.
        aim: the objective.
        budget: the budget.
    """

    sites: Sequence[Site]
    options: Sequence[Sequence[Option]]
    space: Space
    slopes: Sensitivity
    aim: Objective
    budget: Budget

    @property
    def unit(self) -> str:
        return UNITS[self.budget.kind]

    def lines(self, best: Tried, saturated: np.ndarray) -> tuple[PlanLine, ...]:
        """Returns a line for each site, with the objective of its roundings alone."""
        measured, predicted = [], []
        for i, choice in enumerate(best.choice):
            columns = list(self.space.options[i][choice])
            theta = self.space.vector(columns)
            measured.append(self.space.emulate(theta) if columns else 0.0)
            second = self.slopes.hessian[np.ix_(columns, columns)].sum() / 2
            predicted.append(float(self.slopes.bias[columns].sum() + second))
        total = sum(map(abs, measured)) or 1.0
        rows = zip(
            self.sites, self.options, best.choice, predicted, measured, saturated, strict=True
        )
        return tuple(
            PlanLine(
                name=site.name,
                function=site.function,
                primitives=site.primitives,
                weights=site.weights,
                operands=options[i],
                bits=bits_of(options[i].get("weight"), site.bits),
                elements=site.elements,
                predicted=self.aim.shown(p),
                measured=self.aim.shown(m),
                share=abs(m) / total,
                saturated=float(cut),
                note=self._note(site, p, m, abs(m) / total, float(cut)),
            )
            for site, options, i, p, m, cut in rows
        )

    def _note(self, site: Site, predicted: float, measured: float, share: float, cut: float) -> str:
        said = []
        ratio = abs(measured) / max(abs(predicted), 1e-300)
        if share >= SMALL and not 1 / OFF <= ratio <= OFF:
            said.append(f"{ratio:.2g} times what the adjoint pass says")
            if site.discrete and ratio > OFF:
                said.append(f"decisions change at {', '.join(site.discrete[:3])}")
        if cut >= CUT:
            said.append(f"{cut:.2%} of numbers cut off")
        return "; ".join(said)

    def front(self, found: Front) -> tuple[FrontPoint, ...]:
        """Returns some points of the front, evenly spaced in their order, a few of them run."""
        count = len(found.costs)
        shown = np.unique(np.linspace(0, count - 1, min(SHOWN, count)).round().astype(int))
        run = set(shown[np.linspace(0, len(shown) - 1, min(MEASURED, len(shown))).astype(int)])
        points = []
        for i in shown:
            choice = tuple(int(x) for x in found.choices[i])
            (predicted,) = self.space.predicted([choice])
            tried = self.space.run(choice) if i in run else self.space.tried.get(choice)
            measured = None if tried is None else self.aim.shown(tried.measured)
            points.append(
                FrontPoint(float(found.costs[i]), self.aim.shown(float(predicted)), measured)
            )
        return tuple(points)

    def upgrade(self, best: Tried) -> Upgrade | None:
        """Returns the change of one line that lowers the predicted objective most for its cost."""
        found: list[tuple[float, Upgrade]] = []
        for i, own in enumerate(self.space.options):
            for j in range(len(own)):
                choice = (*best.choice[:i], j, *best.choice[i + 1 :])
                more = self.space.cost(choice) - best.cost
                (after,) = self.space.predicted([choice])
                gain = abs(best.predicted) - abs(float(after))
                if more > 0 and gain > 0:
                    change = Upgrade(
                        line=self.sites[i].name,
                        before=_names(self.options[i][best.choice[i]]),
                        after=_names(self.options[i][j]),
                        cost=more,
                        predicted=self.aim.shown(abs(float(after))),
                    )
                    found.append((gain / more, change))
        return max(found, key=lambda x: x[0])[1] if found else None


def _names(option: Option) -> str:
    named = ["unrounded" if x is None else x.format.name for x in option.values()]
    return " x ".join(named) or "as written"


def saturated_shares(state: jax.Array) -> np.ndarray:
    """Returns the share of numbers that were cut off at each site."""
    counts = np.asarray(state, np.float64)
    return counts[:, 0] / np.maximum(counts[:, 1], 1.0)
