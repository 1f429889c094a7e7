"""The multiple-choice knapsack: one option of each item, the least error for each cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

MOST = 1 << 14  # plans that are kept beside each other


@dataclasses.dataclass(frozen=True)
class Front:
    """Each choice that no other one beats in both, from the cheapest to the best."""

    costs: np.ndarray  # ascending
    errors: np.ndarray  # descending
    choices: np.ndarray  # by item, the index of its option, ``[choices, items]``
    exact: bool  # whether nothing was left out; see :func:`front`

    def within(self, limit: float) -> int:
        """Returns the best choice of at most this cost; -1 if all cost more."""
        slack = 1e-9 * max(abs(limit), 1e-300)
        return int(np.searchsorted(self.costs, limit + slack, side="right")) - 1

    def cheapest(self, error: float) -> int:
        """Returns the cheapest choice of at most this error; -1 if all have more."""
        found = np.flatnonzero(self.errors <= error)
        return int(found[0]) if len(found) else -1


def front(errors: Sequence[np.ndarray], costs: Sequence[np.ndarray], most: int = MOST) -> Front:
    """Returns the Pareto front of the sums of errors and costs over all items.

    Dynamic programming over items: of all choices for the first k items, those remain that no other
    one beats in both (Nemhauser and Ullmann, 1969). The result is exact while at most ``most`` of
    them remain. Beyond that, one remains in each of ``most`` equal intervals of the cost, the one
    of the least error; costs and errors stay exact.
    """
    cost, error = np.zeros(1), np.zeros(1)
    steps: list[tuple[np.ndarray, np.ndarray]] = []  # the choice before, and the option
    exact = True
    for own_errors, own_costs in zip(errors, costs, strict=True):
        options = len(own_errors)
        total = (cost[:, None] + own_costs).ravel()
        sums = (error[:, None] + own_errors).ravel()
        order = np.lexsort((sums, total))
        best = np.minimum.accumulate(sums[order])
        kept = order[np.concatenate([[True], best[1:] < best[:-1]])]
        if len(kept) > most:
            exact = False
            kept = _thinned(kept, total[kept], most)
        cost, error = total[kept], sums[kept]
        steps.append((kept // options, kept % options))
    choices = np.zeros((len(cost), len(steps)), int)
    at = np.arange(len(cost))
    for i in reversed(range(len(steps))):
        before, option = steps[i]
        choices[:, i] = option[at]
        at = before[at]
    return Front(cost, error, choices, exact)


def _thinned(kept: np.ndarray, cost: np.ndarray, most: int) -> np.ndarray:
    """Returns the last of the choices in each interval of the cost, which has the least error."""
    span = max(float(cost[-1] - cost[0]), 1e-300)
    interval = np.minimum(((cost - cost[0]) / span * most).astype(int), most - 1)
    last = np.concatenate([interval[1:] != interval[:-1], [True]])
    last[0] = True  # the cheapest of all
    return kept[last]
