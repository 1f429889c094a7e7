"""``rollouts``: how far a policy in one format is from the same policy in another one, and why."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .._check import checked
from .._output import Rows, Tabular
from .._types import PyTree
from ..auditing import Comparison, Gap, Side, compare, name_of, side_of
from ..autoscaling import RecipeLike, autoscale
from ..interpret import check_callable
from ._result import Plan, figure
from ._sites import WIDE

Policy = RecipeLike | Plan | None
AS_WRITTEN = "as written"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair(Gap):
    """A trainer and a rollout engine with the same weights, each in its own formats.

    Attributes:
        trainer, rollout: the names of their formats.
        comparison: where the two part, and why.
    """

    trainer: str
    rollout: str
    comparison: Comparison = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Rollouts(Tabular):
    """Pairs of trainer's and rollout's formats; :meth:`show` prints a matrix of each figure."""

    function: str
    pairs: tuple[Pair, ...]

    def __getitem__(self, key: tuple[str, str]) -> Pair:
        for pair in self.pairs:
            if (pair.trainer, pair.rollout) == key:
                return pair
        names = ", ".join(f"({p.trainer!r}, {p.rollout!r})" for p in self.pairs)
        raise KeyError(f"no pair {key!r}; there are {names}")

    def __repr__(self) -> str:
        worst = max(self.pairs, key=lambda p: p.kl)
        return (
            f"<Rollouts of {self.function}: {len(self.pairs)} pairs, the farthest apart "
            f"{worst.trainer} and {worst.rollout}, KL {figure(worst.kl)}; show()>"
        )

    @property
    def title(self) -> str:
        return f"Rollouts of {self.function}"

    def sentences(self) -> list[str]:
        rows = [(f"{p.trainer} and {p.rollout}", p.comparison) for p in self.pairs]
        return [f"{names}: {found.verdict}" for names, found in rows if found.causes]

    def tables(self, *, everything: bool = True) -> list[Rows]:
        trainers, engines = (
            list(dict.fromkeys(getattr(p, side) for p in self.pairs))
            for side in ("trainer", "rollout")
        )
        titles = {
            "kl": "KL(rollout || trainer), in nats a position",
            "mean": "difference of log probabilities, mean",
            "largest": "difference of log probabilities, largest",
        }

        def row(trainer: str, name: str) -> list[str]:
            return [trainer, *(figure(getattr(self[trainer, r], name)) for r in engines)]

        return [
            Rows(title, ("trainer", *engines), [row(t, name) for t in trainers])
            for name, title in titles.items()
        ]


@checked
def rollouts(
    f: Callable[..., Any],
    trainers: Sequence[Policy] | Mapping[str, Policy] = (None, "bf16", "fp8"),
    rollouts: Sequence[Policy] | Mapping[str, Policy] = (None, "bf16", "fp8", "nvfp4"),
) -> Callable[..., Rollouts]:
    """Returns a function of ``f``'s arguments that compares a policy's formats in reinforcement
    learning.

    A rollout engine samples tokens, and a trainer computes the gradient for their probabilities.
    If both compute in other formats, the samples are off-policy, though the weights are equal. For
    each pair of formats, :func:`scalewise.auditing.compare` draws tokens from the rollout's
    probabilities at each position of the arguments, compares their log probabilities, and names the
    operation that makes most of the difference.

    Args:
        f: returns the policy's logits, at least one row of them, with the classes on the last axis.
        trainers, rollouts: recipes, their names, plans, or None for the program as written; a
            mapping gives them other names.

    Example:
        >>> import jax, jax.numpy as jnp, scalewise as sw
        >>> def policy(w, x):
        ...     return jnp.tanh(x @ w) @ w.T
        >>> w, x = (jax.random.normal(k, s) for k, s in
        ...         zip(jax.random.split(jax.random.key(0)), [(32, 32), (8, 32)]))
        >>> found = sw.rollouts(policy, ["bf16"], ["bf16", "fp8"])(w, x)
        >>> found["bf16", "bf16"].kl, found["bf16", "fp8"].kl > 1e-5
        (0.0, True)
        >>> found["bf16", "fp8"].comparison.cause.kind
        'quantised'
    """
    check_callable(f, "rollouts")
    rows, columns = _named(trainers), _named(rollouts)

    def compared(*args: PyTree, **kwargs: PyTree) -> Rollouts:
        if any(rows[n] != columns[n] for n in rows.keys() & columns.keys()):
            raise ValueError(
                "rollouts: trainers and rollouts give the same name to different formats"
            )
        sides = {name: _side(f, x, args, kwargs) for name, x in (rows | columns).items()}
        pairs = []
        for rollout, trainer in itertools.product(columns, rows):
            found = compare(sides[trainer], sides[rollout])
            assert found.gap is not None
            figures = dataclasses.asdict(found.gap)
            pairs.append(Pair(**figures, trainer=trainer, rollout=rollout, comparison=found))
        return Rollouts(name_of(f), tuple(pairs))

    return compared


def _named(some: Sequence[Policy] | Mapping[str, Policy]) -> dict[str, Policy]:
    if isinstance(some, Mapping):
        return dict(some)
    if isinstance(some, str) or not some:
        raise ValueError(f"rollouts: formats are a sequence of at least one, not {some!r}")
    named: dict[str, Policy] = {}
    for policy in some:
        if named.setdefault(_name(policy), policy) != policy:
            raise ValueError(
                f"rollouts: several formats are called {_name(policy)!r}; name them in a mapping"
            )
    return named


def _name(policy: Policy) -> str:
    if policy is None:
        return AS_WRITTEN
    if isinstance(policy, Plan):
        return f"plan of {figure(policy.bits)} bits a weight"
    return policy if isinstance(policy, str) else repr(policy)


def _side(f: Callable, policy: Policy, args: tuple, kwargs: dict[str, PyTree]) -> Side:
    @functools.wraps(f)
    def called(args: tuple, kwargs: dict[str, PyTree]) -> Any:
        return f(*args, **kwargs)

    found = jax.tree.leaves(jax.eval_shape(called, args, kwargs))
    if len(found) != 1 or found[0].ndim < 2 or found[0].shape[-1] < 2 or not found[0].size:
        shapes = ", ".join(str(x.shape) for x in found)
        raise ValueError(
            "rollouts: the function returns one array, rows of logits of at least two classes on "
            f"the last axis; this one returns {shapes or 'nothing'}"
        )
    recipe = policy.recipe if isinstance(policy, Plan) else policy
    # the same transformation for all, so that XLA fuses all of them alike
    return side_of((autoscale(called, recipe or WIDE), args, kwargs), _name(policy))
