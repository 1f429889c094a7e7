"""The predicted objective of any plan, from an adjoint pass and few runs; the best of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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
    # Random cotangents of the outputs whose second moment is the Hessian, where the gradient is
    # zero; None to differentiate twice.
    probe: Callable[[jax.Array, Outputs], list[jax.Array]] | None
    root: bool = False  # whether people read its square root

    def shown(self, x: float) -> float:
        x = x if abs(x) < WORST else math.copysign(math.inf, x)
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
        return Objective("change of the loss", change, None)
    if name == "kl":
        wide = [i for i, x in enumerate(outputs) if x.ndim and x.shape[-1] > 1]
        if len(outputs) != 1 or not wide:
            shapes = ", ".join(str(tuple(x.shape)) for x in outputs)
            raise ValueError(f"plan: objective='kl' needs logits, one output; there are {shapes}")
        return Objective("KL divergence, in nats", lambda a, b: kl(a[0], b[0]).mean(), _kl_probe)
    return Objective("relative error of the outputs", _error, _error_probe, root=True)


def _kl_probe(key: jax.Array, reference: Outputs) -> list[jax.Array]:
    """The Hessian at the reference is Fisher's, diag(p) - p p^T for each position."""
    (z,) = reference
    p = jax.nn.softmax(z.astype(jnp.float32))
    root, normal = jnp.sqrt(p), jax.random.normal(key, z.shape)
    v = root * normal - p * jnp.sum(root * normal, axis=-1, keepdims=True)
    return [(v / (z.size // z.shape[-1]) ** 0.5).astype(z.dtype)]


LEAST = 1e-30  # of an output's sum of squares: the error of one that is zero is relative to this


def _squares(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def _error(reference: Outputs, outputs: Outputs) -> jax.Array:
    pairs = zip(reference, outputs, strict=True)
    parts = [_squares(b - a) / jnp.maximum(_squares(a), LEAST) for a, b in pairs]
    return jnp.stack(parts).mean()


def _error_probe(key: jax.Array, reference: Outputs) -> list[jax.Array]:
    keys = jax.random.split(key, len(reference))
    return [
        (jax.random.normal(k, x.shape) * (2 / (len(reference) * size)) ** 0.5).astype(x.dtype)
        for k, x in zip(keys, reference, strict=True)
        for size in [jnp.maximum(_squares(x), LEAST)]
    ]


EXCHANGED: Mapping[Role, Role] = {
    "weight": "activation", "activation": "weight", "gradient": "gradient",
}  # fmt: skip
Columns = Mapping[tuple[int, Role], Mapping[Operand, int]]
"""By site and role of an operand, its possible settings and their indices in the vector."""
Index = Mapping[tuple[int, ...], int]
"""The site of each equation by its path."""


@dataclasses.dataclass(frozen=True)
class _Perturbed(Operands):
    """Adds a share of each possible rounding's error to what is rounded; see :class:`Plans`."""

    index: Index = dataclasses.field(default_factory=dict)
    columns: Columns = dataclasses.field(default_factory=dict)
    swapped: frozenset[tuple[int, ...]] = frozenset()
    theta: jax.Array | None = None

    def operands(self, equation: Equation, values: Sequence[ScaledValue]):
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
                still = dataclasses.replace(value, data=lax.stop_gradient(value.data), memo=Memo())
                moved = value.data
                for setting, column in settings.items():
                    rounded = self.numbers(still, setting, own)
                    moved = self._moved_by(column, moved, still.data, rounded)
                value = dataclasses.replace(value, data=moved, memo=Memo())
            changed.append(value)
        return super().operands(equation, changed)

    def _moved_by(
        self, column: int, moved: jax.Array, x: jax.Array, rounded: jax.Array
    ) -> jax.Array:
        """Adds a share of a rounding's error; one that isn't finite counts as a whole alone."""
        assert self.theta is not None
        share, error = self.theta[column].astype(x.dtype), lax.stop_gradient(rounded - x)
        finite = jnp.isfinite(error)
        moved = moved + share * jnp.where(finite, error, 0)
        return jnp.where(finite | (share < 1), moved, lax.stop_gradient(rounded))


@dataclasses.dataclass(frozen=True)
class Plans:
    """A program under each possible plan, as one function of a vector, which JAX differentiates.

    An operand ``x`` is replaced by ``x + sum(theta[c] * (rounded_c(x) - x))`` over its
    possible settings ``c``. At zero that is the program itself, where one element for each of them
    is 1 it is the program under a plan. The derivative with respect to ``theta[c]`` is the gradient
    times the rounding's own error, summed over all elements, uses and iterations of loops.
    """

    program: Program
    index: Index
    columns: Columns
    swapped: frozenset[tuple[int, ...]]  # the paths of contractions whose roles are exchanged
    size: int  # of the vector

    def outputs(self, theta: jax.Array, arrays: Sequence[Argument]) -> list[jax.Array]:
        """Returns the outputs that are floats, for shares of each rounding's error."""
        operands = _Perturbed(
            Setup(WIDE), index=self.index, columns=self.columns, swapped=self.swapped,
            theta=theta,
        )  # fmt: skip
        by = Boundaries(operands)
        return float_results(self.program, by, run(self.program, by, (), arrays)[1])

    @property
    def zero(self) -> jax.Array:
        return jnp.zeros(self.size, jnp.float32)

    def chosen(self, columns: Sequence[int]) -> np.ndarray:
        """Returns the vector of a plan that rounds as these columns say."""
        theta = np.zeros(self.size, np.float32)
        theta[list(columns)] = 1
        return theta


ROUNDS = 4  # of the search for a front with jumps, whose errors don't add up
PROBES = 128  # random directions of the outputs: an expectation's relative error is sqrt(2 / 128)
AT_ONCE = 8  # directions whose adjoints are computed together: memory for time
PAIRS = 3  # that are run for each rounding of an objective that only grows, such as a divergence
AMONG = 8  # random plans that are run for each rounding of one with a sign, such as a loss
EXACT = 512  # columns up to which the whole Hessian is computed, each by one product with it


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """The objective of a plan ``theta``: ``bias @ theta + theta @ hessian @ theta / 2``."""

    bias: np.ndarray  # the mean effect of each rounding: the gradient times its error
    hessian: np.ndarray  # the effect of their variance, on the diagonal, and of each pair
    noise: float  # the correlation from which on a pair's element is no noise of random directions


def sensitivity(
    family: Plans, aim: Objective, arrays: Sequence[Argument], seed: int
) -> Sensitivity:
    if aim.probe is None:
        bias, hessian = jax.jit(lambda a: _twice(family, aim, a))(list(arrays))
    else:
        rows = jax.jit(lambda a, k: _probed(family, aim, a, k))(list(arrays), jax.random.key(seed))
        rows = np.asarray(rows, np.float64)
        bias, hessian = np.zeros(family.size), rows.T @ rows / len(rows)
    # an adjoint that overflows says nothing; the runs do
    bias, hessian = (np.where(np.isfinite(x), x, 0.0) for x in map(np.asarray, (bias, hessian)))
    noise = 0.0 if aim.probe is None and family.size <= EXACT else 3 / PROBES**0.5
    hessian = hessian.astype(np.float64)
    return Sensitivity(bias.astype(np.float64), (hessian + hessian.T) / 2, noise)


def _probed(family: Plans, aim: Objective, arrays: Sequence[Argument], key: jax.Array) -> jax.Array:
    """Returns the adjoints of random directions of the outputs: a factor of the Hessian."""
    reference, pullback = jax.vjp(lambda t: family.outputs(t, arrays), family.zero)
    assert aim.probe is not None
    probe = aim.probe

    def adjoint(key: jax.Array) -> jax.Array:
        return pullback(probe(key, reference))[0]

    return _each(adjoint, jax.random.split(key, PROBES))


def _twice(
    family: Plans, aim: Objective, arrays: Sequence[Argument]
) -> tuple[jax.Array, jax.Array]:
    reference = family.outputs(family.zero, arrays)
    at = lambda t: aim.measure(reference, family.outputs(t, arrays))  # noqa: E731
    bias, product = jax.linearize(jax.grad(at), family.zero)
    if family.size <= EXACT:
        return bias, _each(product, jnp.eye(family.size))
    signs = jax.random.rademacher(jax.random.key(0), (PROBES, family.size), jnp.float32)
    diagonal = _each(lambda s: s * product(s), signs).mean(0)
    return bias, jnp.diag(diagonal)


def _each(linear: Callable[[jax.Array], jax.Array], directions: jax.Array) -> jax.Array:
    try:
        return lax.map(linear, directions, batch_size=AT_ONCE)
    except NotImplementedError:  # no rule for vmap, as of ragged_dot's adjoint
        return lax.map(linear, directions)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The objective of a plan as the sum of what its roundings do alone and in pairs.

    The adjoint pass gives the smooth part, a quadratic form. A rounding that changes discrete
    decisions does more than that when it is run alone: decisions flip with a probability in
    proportion to the error before them, and independent errors add up in their squares.
    """

    smooth: np.ndarray  # what each rounding does, alone or as the mean among others, without jumps
    pairs: np.ndarray  # what each two do together, beyond that; the matrix has both orders
    jumps: np.ndarray  # what each does by changing decisions

    def __call__(self, thetas: np.ndarray) -> np.ndarray:
        paired = np.einsum("...i,ij,...j->...", thetas, self.pairs, thetas, optimize=True) / 2
        return thetas @ self.smooth + paired + np.sqrt(thetas @ self.jumps**2)

    def front(
        self, options: Sequence[Sequence[Sequence[int]]], costs: Sequence[np.ndarray]
    ) -> Front:
        """Returns the Pareto front of the sites' options, each a list of columns.

        Errors within a site count with their pairs. The root of the sum of squared jumps isn't a
        sum over sites: its tangent at the front's middle is, which bounds it from above.
        """

        # whichever sign an option's mean effect has: it belongs to the data at hand, and the next
        # batch has another one
        def alone(o: list[int]) -> float:
            return float(abs(self.smooth[o].sum() + self.pairs[np.ix_(o, o)].sum() / 2))

        own = [np.array([alone(list(o)) for o in some]) for some in options]
        squares = [np.array([np.sum(self.jumps[list(o)] ** 2) for o in some]) for some in options]
        total = sum(s.mean() for s in squares)
        found = front(own, costs)
        for _ in range(ROUNDS if total > 0 else 0):
            slope = 0.5 / max(total, 1e-300) ** 0.5
            found = front([e + slope * s for e, s in zip(own, squares, strict=True)], costs)
            middle = found.choices[len(found.choices) // 2]
            total = sum(s[i] for s, i in zip(squares, middle, strict=True))
        return found


def prediction(
    sensitivity: Sensitivity,
    jumping: np.ndarray,
    owners: np.ndarray,
    measure: Callable[[np.ndarray], float],
    draw: Callable[[int], np.ndarray],
) -> Prediction:
    """Returns the prediction from an adjoint pass and runs, of single roundings first.

    Of an objective that only grows, the adjoint pass says which pairs matter. They are run
    together, the strongest first: an error that rounds other numbers, since a rounding before it
    has changed them, isn't the one whose product with the first the Hessian has.

    Two roundings together change a loss by as much as each does alone, with either sign. There a
    rounding's effect is its mean among others, from runs of random plans.

    Args:
        sensitivity: of the adjoint pass.
        jumping: which roundings change discrete decisions.
        owners: by rounding, a number that those of one operand share.
        measure: returns the objective of a vector ``theta``.
        draw: returns that many random plans as rows ``theta``.
    """
    count = len(jumping)
    single = np.eye(count, dtype=np.float32)
    alone, pairs = np.array([measure(theta) for theta in single]), np.zeros((count, count))
    if sensitivity.bias.any():
        return Prediction(_among_others(alone, measure, draw(AMONG * count)), pairs, 0 * alone)
    diagonal = sensitivity.bias + np.diag(sensitivity.hessian) / 2
    jumps = np.where(jumping, np.maximum(alone - diagonal, 0.0), 0.0)
    smooth = alone - jumps
    hessian = sensitivity.hessian
    size = np.sqrt(np.maximum(np.diag(hessian), 0.0))
    known = np.abs(hessian) > sensitivity.noise * np.outer(size, size)
    known &= (hessian != 0) & (owners[:, None] < owners)
    strongest = np.argwhere(known)[np.argsort(-np.abs(hessian[known]), kind="stable")]
    for i, j in strongest[: PAIRS * count]:
        apart = smooth[i] + smooth[j] + float(np.hypot(jumps[i], jumps[j]))
        pairs[i, j] = pairs[j, i] = measure(single[i] + single[j]) - apart
    return Prediction(smooth, pairs, jumps)


def _among_others(
    alone: np.ndarray, measure: Callable[[np.ndarray], float], plans: np.ndarray
) -> np.ndarray:
    """Returns each rounding's mean effect in random plans, by ridge regression from ``alone``."""
    finite = np.abs(alone) < WORST
    plans = plans[~plans[:, ~finite].any(1)]
    measured = np.array([measure(theta) for theta in plans])
    kept = np.abs(measured) < WORST
    x, rest = plans[kept].astype(np.float64), measured[kept] - plans[kept] @ alone
    return alone + np.linalg.solve(x.T @ x + np.eye(len(alone)), x.T @ rest)


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
