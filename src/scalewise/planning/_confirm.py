"""Emulated runs of plans, and the search among those that the prediction can't tell apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from ..interpret import Argument
from ._family import Family
from ._objective import Objective
from ._predict import Prediction

Choice = tuple[int, ...]  # by site, the index of its option
APART = 1.25  # plans whose predictions differ by less can't be told apart
TRIED = 12  # neighbours that are run in each round
ROUNDS = 3


class Emulation:
    """Runs a program under plans; formats are data to it, so that it is compiled once.

    Attributes:
        aim: the objective.
        runs: how many were made.
    """

    def __init__(self, family: Family, aim: Objective, arrays: Sequence[Argument]):
        self.aim, self.runs = aim, 1
        given = list(arrays)
        outputs = jax.jit(family.outputs)
        self.reference = outputs(family.zero, given)
        # the same compiled function for all plans: XLA fuses another one in another way
        self._measure = jax.jit(aim.measure)
        self._outputs: Callable[[np.ndarray], list[jax.Array]] = lambda t: outputs(t, given)

    def __call__(self, theta: np.ndarray) -> float:
        """Returns the objective of a plan."""
        self.runs += 1
        return float(self._measure(self.reference, self._outputs(theta)))


@dataclasses.dataclass(frozen=True)
class Tried:
    """A plan that was run: its choice, its cost, and its objective as predicted and measured."""

    choice: Choice
    cost: float
    predicted: float
    measured: float


@dataclasses.dataclass
class Space:
    """The plans of a program.

    Attributes:
        options: of each site, each a list of columns.
        costs: of the options.
        predict: the objective of vectors.
        emulate: the same, measured.
        vector: of a list of columns.
        tried: by choice, what was run.
    """

    options: Sequence[Sequence[Sequence[int]]]
    costs: Sequence[np.ndarray]
    predict: Prediction
    emulate: Callable[[np.ndarray], float]
    vector: Callable[[Sequence[int]], np.ndarray]
    tried: dict[Choice, Tried] = dataclasses.field(default_factory=dict)

    def theta(self, choice: Sequence[int]) -> np.ndarray:
        chosen = zip(self.options, choice, strict=True)
        return self.vector([c for options, i in chosen for c in options[i]])

    def cost(self, choice: Sequence[int]) -> float:
        return float(sum(own[i] for own, i in zip(self.costs, choice, strict=True)))

    def predicted(self, choices: Sequence[Choice]) -> np.ndarray:
        return np.asarray(self.predict(np.stack([self.theta(x) for x in choices])))

    def run(self, choice: Sequence[int]) -> Tried:
        """Returns a plan with its measured objective, from an earlier run if there was one."""
        choice = tuple(int(i) for i in choice)
        if choice not in self.tried:
            (predicted,) = self.predicted([choice])
            measured = self.emulate(self.theta(choice))
            self.tried[choice] = Tried(choice, self.cost(choice), float(predicted), measured)
        return self.tried[choice]

    def neighbours(self, choice: Choice, limit: float) -> list[Choice]:
        """Returns the plans within the limit with other options at one site or two."""
        found: set[Choice] = set()
        single = [
            (i, j) for i, own in enumerate(self.options) for j in range(len(own)) if j != choice[i]
        ]
        base = self.cost(choice)
        more = {(i, j): float(self.costs[i][j] - self.costs[i][choice[i]]) for i, j in single}
        for a in single:
            for b in single:
                apart = a == b or a[0] != b[0]
                extra = more[a] + (more[b] if a != b else 0.0)
                if apart and base + extra <= limit * (1 + 1e-9):
                    changed = list(choice)
                    changed[a[0]], changed[b[0]] = a[1], b[1]
                    found.add(tuple(changed))
        return sorted(found - {choice})

    def confirmed(self, choice: Sequence[int], limit: float) -> Tried:
        """Returns the best measured plan among a choice and those that look as good."""
        best = self.run(choice)
        for _ in range(ROUNDS):
            near = self.neighbours(best.choice, limit)
            if not near:
                return best
            predicted = np.abs(self.predicted(near))
            alike = np.flatnonzero(predicted <= APART * abs(best.predicted))
            order = alike[np.argsort(predicted[alike], kind="stable")][:TRIED]
            runs = [self.run(near[i]) for i in order]
            better = min(runs, key=lambda x: abs(x.measured), default=best)
            if abs(better.measured) >= abs(best.measured):
                return best
            best = better
        return best
