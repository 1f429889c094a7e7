"""``rollouts``: how far a policy in one format is from the same policy in another one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._check import Natural, checked
from .._output import Rows, Tabular
from .._types import PyTree
from ..auditing import Gap, gap, name_of
from ..autoscaling import RecipeLike, autoscale
from ..interpret import check_callable
from ._result import Plan, figure
from ._sites import WIDE

Policy = RecipeLike | Plan | None
AS_WRITTEN = "as written"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair(Gap):
    """A trainer and a rollout engine with the same weights, each in its own formats."""

    trainer: str  # the names of their formats
    rollout: str


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
        return []

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
    *,
    seed: Natural = 0,
) -> Callable[..., Rollouts]:
    """Returns a function of ``f``'s arguments that compares a policy's formats in reinforcement
    learning.

    A rollout engine samples tokens, and a trainer computes the gradient for their probabilities.
    If both compute in other formats, the samples are off-policy, though the weights are equal. For
    each pair of formats, tokens are drawn from the rollout's probabilities at each position of the
    arguments, and their log probabilities are compared.

    Args:
        f: returns the policy's logits, with the classes on the last axis.
        trainers, rollouts: recipes, their names, plans, or None for the program as written; a
            mapping gives them other names.
        seed: of the tokens that are drawn.

    Example:
        >>> import jax, jax.numpy as jnp, scalewise as sw
        >>> def policy(w, x):
        ...     return jnp.tanh(x @ w) @ w.T
        >>> w, x = (jax.random.normal(k, s) for k, s in
        ...         zip(jax.random.split(jax.random.key(0)), [(32, 32), (8, 32)]))
        >>> found = sw.rollouts(policy, ["bf16"], ["bf16", "fp8"])(w, x)
        >>> found["bf16", "bf16"].kl, found["bf16", "fp8"].kl > 1e-5
        (0.0, True)
    """
    check_callable(f, "rollouts")
    rows, columns = _named(trainers), _named(rollouts)

    def compared(*args: PyTree, **kwargs: PyTree) -> Rollouts:
        policies = rows | columns
        if any(rows[n] != columns[n] for n in rows.keys() & columns.keys()):
            raise ValueError(
                "rollouts: one name stands for a trainer's and another rollout's formats"
            )
        logits = {name: _logits(f, x, args, kwargs) for name, x in policies.items()}
        pairs = []
        for rollout, trainer in itertools.product(columns, rows):
            apart = gap(logits[trainer], logits[rollout], seed)
            pairs.append(Pair(**dataclasses.asdict(apart), trainer=trainer, rollout=rollout))
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


def _logits(f: Callable, policy: Policy, args: tuple, kwargs: dict[str, PyTree]) -> jax.Array:
    recipe = policy.recipe if isinstance(policy, Plan) else policy
    # the same transformation for all, so that XLA fuses all of them alike
    leaves = jax.tree.leaves(jax.jit(autoscale(f, recipe or WIDE))(*args, **kwargs))
    if len(leaves) != 1 or leaves[0].ndim < 1 or leaves[0].shape[-1] < 2:
        shapes = ", ".join(str(x.shape) for x in leaves)
        raise ValueError(
            "rollouts: the function returns one array, the logits of at least two classes on the "
            f"last axis; this one returns {shapes or 'nothing'}"
        )
    return leaves[0].astype(jnp.float32)
