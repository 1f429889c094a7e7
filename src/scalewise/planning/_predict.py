"""The predicted objective of any plan, from one adjoint pass and runs of one or two roundings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ._knapsack import Front, front
from ._sensitivity import Sensitivity

ROUNDS = 4  # of the search for a front with jumps, whose errors don't add up


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The objective of a plan as the sum of what its roundings do alone and in pairs.

    The adjoint pass gives the smooth part, a quadratic form. A rounding that changes discrete
    decisions (the experts that are chosen, say) does more than that when it is run alone: decisions
    flip with a probability in proportion to the error before them, and independent errors add up in
    their squares, so that what the roundings of a plan add by flipping does, too.

    Attributes:
        smooth: what each rounding does alone, without jumps.
        pairs: what each two do together, beyond that; the matrix has both orders.
        jumps: what each does by changing decisions.
    """

    smooth: np.ndarray
    pairs: np.ndarray
    jumps: np.ndarray

    def __call__(self, thetas: np.ndarray) -> np.ndarray:
        """Returns the objective of plans, ``[..., columns]``."""
        paired = np.einsum("...i,ij,...j->...", thetas, self.pairs, thetas, optimize=True) / 2
        return thetas @ self.smooth + paired + np.sqrt(thetas @ self.jumps**2)

    def front(
        self, options: Sequence[Sequence[Sequence[int]]], costs: Sequence[np.ndarray]
    ) -> Front:
        """Returns the Pareto front of the sites' options, each a list of columns.

        Errors within a site count with their pairs. The root of the sum of squared jumps isn't a
        sum over sites: its tangent is, which bounds it from above. The tangent is taken at the
        front's middle, where most of the next front is.
        """
        own = [np.array([self._alone(list(o)) for o in some]) for some in options]
        squares = [np.array([np.sum(self.jumps[list(o)] ** 2) for o in some]) for some in options]
        total = sum(s.mean() for s in squares)
        found = front(own, costs)
        for _ in range(ROUNDS if total > 0 else 0):
            slope = 0.5 / max(total, 1e-300) ** 0.5
            found = front([e + slope * s for e, s in zip(own, squares, strict=True)], costs)
            middle = found.choices[len(found.choices) // 2]
            total = sum(s[i] for s, i in zip(squares, middle, strict=True))
        return found

    def _alone(self, columns: list[int]) -> float:
        """Returns what one option adds, whichever sign its mean effect has: the sign belongs to
        the data at hand, and the next batch has another one."""
        return float(
            abs(self.smooth[columns].sum() + self.pairs[np.ix_(columns, columns)].sum() / 2)
        )


def prediction(
    sensitivity: Sensitivity,
    jumping: np.ndarray,
    owners: np.ndarray,
    measure: Callable[[Sequence[int]], float],
) -> Prediction:
    """Returns the prediction from an adjoint pass, and from runs with one rounding and with two.

    The adjoint pass says which pairs matter. They are run together, the strongest first, as many as
    there are roundings: an error that rounds other numbers, since a rounding before it has changed
    them, isn't the one whose product with the first the Hessian has.

    Args:
        sensitivity: of the adjoint pass.
        jumping: for each rounding, whether discrete decisions depend on it.
        owners: the number of the operand that it rounds: two roundings of one aren't a pair.
        measure: returns the objective with some of the roundings.
    """
    count = len(jumping)
    alone = np.array([measure([c]) for c in range(count)])
    diagonal = sensitivity.bias + np.diag(sensitivity.hessian) / 2
    jumps = np.where(jumping, np.maximum(alone - diagonal, 0.0), 0.0)
    smooth, pairs = alone - jumps, np.zeros((count, count))
    for i, j in _strongest(sensitivity, owners)[:count]:
        both = measure([i, j]) - smooth[i] - smooth[j] - float(np.hypot(jumps[i], jumps[j]))
        pairs[i, j] = pairs[j, i] = both
    return Prediction(smooth, pairs, jumps)


def _strongest(sensitivity: Sensitivity, owners: np.ndarray) -> list[tuple[int, int]]:
    """Returns the pairs whose element of the Hessian isn't noise, the largest first."""
    hessian = sensitivity.hessian
    size = np.sqrt(np.maximum(np.diag(hessian), 0.0))
    known = np.abs(hessian) > sensitivity.noise * np.outer(size, size)
    known &= (hessian != 0) & (owners[:, None] < owners)
    found = np.argwhere(known)
    order = np.argsort(-np.abs(hessian[known]), kind="stable")
    return [(int(i), int(j)) for i, j in found[order]]
