"""The predicted objective of any plan, from few runs; the best of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from ..auditing import kl
from ..autoscaling import Boundaries, Operand, Operands, Role, Setup, between_activations
from ..interpret import Argument, Equation, Program, run
from ..primitives import params
from ..scalifying import Memo, ScaledValue
from ._sites import WIDE, float_results

ObjectiveName = Literal["auto", "kl", "loss", "error"]
WORST = 1e30  # in place of an objective that isn't finite: sums of it and others stay numbers
Outputs = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class Objective:
    """A number that grows with what a plan changes."""

    words: str  # what the number is, for people
    measure: Callable[[Outputs, Outputs], jax.Array]  # of the reference's outputs and a plan's
    root: bool = False  # whether people read its square root
    # Random plans that are run for each rounding: more for a number with a sign, where effects of
    # other roundings hide that of one.
    plans: int = 3

    def shown(self, x: float) -> float:
        if not abs(x) < WORST:
            x = math.inf if math.isnan(x) else math.copysign(math.inf, x)
        return max(x, 0.0) ** 0.5 if self.root else x


def objective(name: str, outputs: Sequence[jax.ShapeDtypeStruct]) -> Objective:
    scalars = [i for i, x in enumerate(outputs) if x.shape == ()]
    if not outputs:
        raise ValueError("plan: the function returns no floats, so that no error can be measured")
    if name == "auto":
        name = "loss" if len(outputs) == 1 and scalars else "error"
    if name == "loss":
        if len(scalars) != 1:
            count = len(scalars)
            raise ValueError(f"plan: objective='loss' needs one output without axes, not {count}")
        change = lambda a, b: (b[scalars[0]] - a[scalars[0]]).astype(jnp.float32)  # noqa: E731
        return Objective("change of the loss", change, plans=8)
    if name == "kl":
        wide = [i for i, x in enumerate(outputs) if x.ndim and x.shape[-1] > 1]
        if len(outputs) != 1 or not wide:
            shapes = ", ".join(str(tuple(x.shape)) for x in outputs)
            raise ValueError(f"plan: objective='kl' needs logits, one output; there are {shapes}")
        return Objective("KL divergence, in nats", lambda a, b: kl(a[0], b[0]).mean())
    return Objective("relative error of the outputs", _error, root=True)


LEAST = 1e-30  # of an output's sum of squares: the error of one that is zero is relative to this


def _squares(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x))


def _error(reference: Outputs, outputs: Outputs) -> jax.Array:
    parts = []
    for a, b in zip(reference, outputs, strict=True):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        size = jnp.maximum(jnp.max(jnp.abs(a)), LEAST**0.5)  # squares of large numbers overflow
        parts.append(_squares((b - a) / size) / jnp.maximum(_squares(a / size), LEAST / size**2))
    return jnp.stack(parts).mean()


EXCHANGED: Mapping[Role, Role] = {
    "weight": "activation", "activation": "weight", "gradient": "gradient",
}  # fmt: skip
Columns = Mapping[tuple[int, Role], Mapping[Operand, int]]
"""By site and role of an operand, its possible settings and their indices in the vector."""
Index = Mapping[tuple[int, ...], int]
"""The site of each equation by its path."""


@dataclasses.dataclass(frozen=True)
class _Chosen(Operands):
    """Rounds operands as a vector says; see :class:`Plans`."""

    index: Index = dataclasses.field(default_factory=dict)
    columns: Columns = dataclasses.field(default_factory=dict)
    swapped: frozenset[tuple[int, ...]] = frozenset()
    theta: jax.Array | None = None

    def operands(self, equation: Equation, values: Sequence[ScaledValue]):
        assert self.theta is not None
        attention = between_activations(equation, values)
        axes = params.contracted_axes(equation)
        site = self.index.get(equation.path, -1)
        changed = []
        for value, (_, role), own in zip(
            values, self.uses(equation, values, attention), axes, strict=True
        ):
            role = EXCHANGED[role] if equation.path in self.swapped else role
            settings = self.columns.get((site, role), {})
            if settings and not value.integers and value.constant_value is None:
                data = value.data
                for setting, column in settings.items():
                    rounded = self.numbers(value, setting, own).astype(data.dtype)
                    data = jnp.where(self.theta[column], rounded, data)
                value = dataclasses.replace(value, data=data, memo=Memo())
            changed.append(value)
        return super().operands(equation, changed)


@dataclasses.dataclass(frozen=True)
class Plans:
    """A program under each possible plan, as one compiled function of a vector.

    The vector has an element for each possible setting of each operand: whether it is rounded so.
    """

    program: Program
    index: Index
    columns: Columns
    swapped: frozenset[tuple[int, ...]]  # the paths of contractions whose roles are exchanged
    size: int  # of the vector

    def outputs(self, theta: jax.Array, arrays: Sequence[Argument]) -> list[jax.Array]:
        """Returns the outputs that are floats."""
        operands = _Chosen(
            Setup(WIDE), index=self.index, columns=self.columns, swapped=self.swapped,
            theta=theta,
        )  # fmt: skip
        by = Boundaries(operands)
        return float_results(self.program, by, run(self.program, by, (), arrays)[1])

    def chosen(self, columns: Sequence[int]) -> np.ndarray:
        """Returns the vector of a plan that rounds as these columns say."""
        theta = np.zeros(self.size, bool)
        theta[list(columns)] = True
        return theta


# What is expected before these runs: a rounding's effect among others differs from its effect alone
# by half of it; two together do 0.3 of the geometric mean of their effects beyond both; what three
# and more do beyond pairs is a tenth of the sum of a plan's effects.
EFFECT, PAIR, REST = 0.5, 0.3, 0.1


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The objective of a plan as the sum of what its roundings do, singly and in pairs."""

    effects: np.ndarray  # by rounding
    pairs: np.ndarray  # what each two do together beyond their effects; in both orders
    mean: np.ndarray  # how often a random plan has each rounding

    def __call__(self, thetas: np.ndarray) -> np.ndarray:
        x = thetas.astype(np.float64)
        return (
            x @ self.effects + np.einsum("...i,ij,...j->...", x, self.pairs, x, optimize=True) / 2
        )

    def among_others(self, own: Sequence[int], options: Sequence[Sequence[int]]) -> float:
        """Returns what one of a site's options does in the mean of all plans of the other sites."""
        others, own = self.mean.copy(), list(own)
        others[list(itertools.chain(*options))] = 0.0
        together = self.pairs[np.ix_(own, own)].sum() / 2 + (self.pairs[own] @ others).sum()
        return float(self.effects[own].sum() + together)

    def front(
        self, options: Sequence[Sequence[Sequence[int]]], costs: Sequence[np.ndarray]
    ) -> Front:
        """Returns the Pareto front of the sites' options, each a list of columns, by what they do
        among others."""
        # whichever sign an effect has: it belongs to the data at hand, the next batch has another
        own = [np.array([abs(self.among_others(o, some)) for o in some]) for some in options]
        return front(own, costs)


def prediction(alone: np.ndarray, plans: np.ndarray, measured: np.ndarray) -> Prediction:
    """Returns the prediction from runs with one rounding each, and runs of random plans.

    Effects and pairs are the posterior mean of a Gaussian process whose covariance is a polynomial
    of degree two (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, 2.2).
    Decisions that change, roundings that undo each other and losses that fall are in the runs.

    Args:
        alone: the objective with one rounding each.
        plans: a vector of :class:`Plans` in each row.
        measured: the objective of each.
    """
    finite = np.abs(alone) < WORST
    kept = (np.abs(measured) < WORST) & ~plans[:, ~finite].any(1)
    x, y = plans[kept].astype(np.float64), measured[kept]
    size = np.where(finite, np.abs(alone), 0.0)
    single, both = (x * size**2) @ x.T, (x * size) @ x.T
    covariance = EFFECT**2 * single + PAIR**2 * (both**2 - single) / 2
    rest = np.square(REST * (x @ size)) + np.finfo(np.float64).tiny
    weights = np.linalg.solve(covariance + np.diag(rest), y - x @ alone)
    pairs = PAIR**2 * np.outer(size, size) * ((x.T * weights) @ x)
    np.fill_diagonal(pairs, 0.0)
    return Prediction(alone + EFFECT**2 * size**2 * (x.T @ weights), pairs, plans.mean(0))


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
            # the last in each interval of the cost, which has the least error; and the cheapest
            span = max(float(total[kept[-1]] - total[kept[0]]), 1e-300)
            interval = ((total[kept] - total[kept[0]]) / span * most).astype(int)
            interval = np.minimum(interval, most - 1)
            last = np.concatenate([interval[1:] != interval[:-1], [True]])
            last[0] = True
            kept = kept[last]
        cost, error = total[kept], sums[kept]
        steps.append((kept // options, kept % options))
    choices = np.zeros((len(cost), len(steps)), int)
    at = np.arange(len(cost))
    for i in reversed(range(len(steps))):
        before, option = steps[i]
        choices[:, i] = option[at]
        at = before[at]
    return Front(cost, error, choices, exact)
