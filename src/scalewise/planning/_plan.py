"""``plan``: the formats of a program's operands that change its results least within a budget."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .._check import Natural, checked
from .._types import PyTree
from ..auditing._file import name_of
from ..autoscaling import Boundaries, FormatOverrides, Operand, Products, Recipe
from ..autoscaling._operand_settings import Role, operand_format
from ..formats import BlockFormatLike
from ..interpret import Argument, Program, check_callable, run, trace
from ._budget import Budget, Option
from ._confirm import Emulation, Space, Tried
from ._family import Columns, Family
from ._knapsack import Front
from ._objective import Objective, ObjectiveName, objective
from ._predict import prediction
from ._report import Counting, Report, saturated_shares
from ._result import Plan
from ._sensitivity import Sensitivity, sensitivity
from ._sites import WIDE, Site, float_results, sites

OperandLike = Operand | BlockFormatLike | None
RETRIES = 6  # of a limit of the error that the prediction keeps and the run doesn't


@checked
def plan(
    f: Callable[..., Any],
    budget: Budget | float,
    *,
    objective: ObjectiveName = "auto",
    formats: Sequence[OperandLike] = ("nvfp4", "mxfp8_e4m3", "bf16"),
    activations: Sequence[OperandLike] | Literal["weights"] = (None,),
    gradients: Sequence[OperandLike] = (None,),
    seed: Natural = 0,
) -> Callable[..., Plan]:
    """Returns a function of ``f``'s arguments that finds the format of each product's operands.

    Products are told apart by their scope and line. One adjoint pass gives what each rounding and
    each two of them do to the result, to second order; runs with one rounding, and with the two of
    the strongest pairs, replace that where they differ. The choice is the exact solution of a
    knapsack problem. The plan and those that the prediction can't tell
    apart from it are then run, and the best is the result.

    Args:
        f: any function of pytrees made of JAX primitives: a forward pass, a loss, a training step.
        budget: a number, the mean bits of a weight; or a :class:`Budget`.
        objective: what the plan keeps small. ``"kl"``: the divergence of the softmax of ``f``'s
            result, logits. ``"loss"``: the change of the loss, the one result without axes.
            ``"error"``: the relative error (root mean square) of all results. ``"auto"``:
            ``"loss"`` if there is one result, without axes, else ``"error"``.
        formats: of weights: formats, :class:`~scalewise.Operand` or None, the program's own dtype.
        activations: of activations; ``"weights"`` for the format of the product's weight. With
            a budget of bits or bytes they cost nothing, so that the best one given is chosen.
        gradients: of gradients, for a function that differentiates.
        seed: of the random directions of the outputs.

    Returns:
        A function to be called with arrays, that returns a :class:`Plan`; it holds for them.

    Raises:
        ValueError: an unknown format, a budget below the cheapest plan, outputs that don't suit the
            objective, or a function without products to be planned.

    Example:
        >>> import jax, jax.numpy as jnp, scalewise as sw
        >>> def logits(params, x):
        ...     return jnp.tanh(x @ params["up"]) @ params["down"]
        >>> k = jax.random.split(jax.random.key(0), 3)
        >>> params = {"up": jax.random.normal(k[0], (32, 64)) / 6,
        ...           "down": jax.random.normal(k[1], (64, 32)) / 8}
        >>> found = sw.plan(logits, 6.5, objective="kl")(params, jax.random.normal(k[2], (16, 32)))
        >>> found.cost <= 6.5, len(found.lines)
        (True, 2)
    """
    check_callable(f, "plan")
    limits = budget if isinstance(budget, Budget) else Budget(bits=budget)
    lists = Lists(_operands(formats), activations if isinstance(activations, str)
                   else _operands(activations), _operands(gradients))  # fmt: skip

    def planned(*args: PyTree, **kwargs: PyTree) -> Plan:
        program = trace(f, Boundaries(WIDE), args, kwargs, name="plan")
        task = Task(program, limits, lists, objective, seed, name_of(f))
        return task.solved()

    return planned


@dataclasses.dataclass(frozen=True)
class Lists:
    """The operands to choose from, by role."""

    weight: Sequence[Operand | None]
    activation: Sequence[Operand | None] | str
    gradient: Sequence[Operand | None]

    def options(self, site: Site) -> list[Option]:
        """Returns the options of a site, those that differ in what it has."""
        tied = self.activation == "weights"
        own: dict[Role, Sequence[Operand | None]] = {"gradient": self.gradient}
        if "weight" in site.roles:
            own["weight"] = self.weight
        if not isinstance(self.activation, str):
            own["activation"] = self.activation
        own = {r: some for r, some in own.items() if r in site.roles and list(some) != [None]}
        found: list[Option] = []
        for chosen in itertools.product(*own.values()):
            option = dict(zip(own, chosen, strict=True))
            if tied and "weight" in option and "activation" in site.roles:
                option["activation"] = option["weight"]
            found.append(option)
        return found


def _operands(some: Sequence[OperandLike]) -> list[Operand | None]:
    if isinstance(some, str) or not some:
        raise ValueError(f"plan: formats are a sequence of at least one, not {some!r}")
    made = [x if isinstance(x, Operand) else _plain(x) for x in some]
    drawn = next((x for x in made if x is not None and (x.is_random or x.hadamard)), None)
    if drawn is not None:
        raise ValueError(
            f"plan: {drawn!r} draws random numbers or transforms its operand; a plan has operands "
            "that are rounded to nearest"
        )
    return list(dict.fromkeys(made))


def _plain(fmt: BlockFormatLike | None) -> Operand | None:
    found = operand_format(fmt)
    return None if found is None else Operand(found)


@dataclasses.dataclass
class Task:
    """One program to be planned."""

    program: Program
    budget: Budget
    lists: Lists
    objective: ObjectiveName
    seed: int
    function: str

    def __post_init__(self):
        found, index = sites(self.program)
        self.sites = found
        self.options = [self.lists.options(site) for site in found]
        self.weights = sum(site.elements for site in found)
        columns: dict[tuple[int, Role], dict[Operand, int]] = {}
        count = itertools.count()
        for i, some in enumerate(self.options):
            for role, operand in (item for option in some for item in option.items()):
                own = columns.setdefault((i, role), {})
                if operand is not None and operand not in own:
                    own[operand] = next(count)
        self.columns = columns
        as_pairs: Columns = {k: [(c, x) for x, c in v.items()] for k, v in columns.items()}
        swapped = frozenset(i for i, site in enumerate(found) if site.swapped)
        self.family = Family(self.program, index, as_pairs, swapped, next(count))
        if not any(len(some) > 1 for some in self.options):
            raise ValueError(
                f"plan: {self.function} has no product whose operands have several formats to "
                "choose from: it has no weights among the operands of its products, or one format "
                "was given"
            )

    def space(self) -> tuple[Space, Sensitivity, Emulation]:
        """Returns the plans with their costs and predictions, and what these are made of."""
        arrays = list(self.program.arrays)
        aim = objective(
            self.objective, jax.eval_shape(self.family.outputs, self.family.zero, arrays)
        )
        costs = [
            np.array([self.budget.cost(s, o, self.weights) for o in some])
            for s, some in zip(self.sites, self.options, strict=True)
        ]
        self._check(costs)
        slopes = sensitivity(self.family, aim, arrays, self.seed)
        emulate = Emulation(self.family, aim, arrays)
        columns = [[self._columns(i, o) for o in some] for i, some in enumerate(self.options)]
        predict = prediction(
            slopes, self._jumping(), self._owners(), lambda c: emulate(self.family.chosen(c))
        )
        return Space(columns, costs, predict, emulate, self.family.chosen), slopes, emulate

    def solved(self) -> Plan:
        """Returns the plan."""
        space, slopes, emulate = self.space()
        aim = emulate.aim
        found = space.predict.front(space.options, space.costs)
        best = self._best(space, found, aim)
        alike = len(space.tried) - 1
        recipe = self._recipe(best.choice)
        measured, saturated = self._confirmed(recipe, aim, emulate.reference)
        report = Report(self.sites, self.options, space, slopes, aim, self.budget)
        return Plan(
            function=self.function,
            objective=aim.words,
            unit=report.unit,
            cost=best.cost,
            predicted=aim.shown(best.predicted),
            measured=aim.shown(measured),
            recipe=recipe,
            lines=report.lines(best, saturated),
            front=report.front(found),
            upgrade=report.upgrade(best),
            runs=emulate.runs + 1,
            alike=alike,
            exact=found.exact,
        )

    def _confirmed(
        self, recipe: Recipe, aim: Objective, reference: Sequence[jax.Array]
    ) -> tuple[float, np.ndarray]:
        """Returns the objective as ``autoscale`` computes the program, and what is cut off."""
        by = Counting(recipe, overrides=FormatOverrides(recipe.keep), index=self.family.index)

        def emulated(arrays: Sequence[Argument]) -> tuple[jax.Array, jax.Array]:
            state, values = run(self.program, by, jnp.zeros((len(self.sites), 2)), arrays)
            return aim.measure(reference, float_results(self.program, by, values)), state

        measured, state = jax.jit(emulated)(list(self.program.arrays))
        by.overrides.check("plan")
        return float(measured), saturated_shares(state)

    def _check(self, costs: Sequence[np.ndarray]) -> None:
        low, limit = sum(x.min() for x in costs), self.budget.limit
        if limit is not None and low > limit * (1 + 1e-9):
            raise ValueError(
                f"plan: the cheapest plan of {self.function} takes {low:.4g} {self.budget.kind}, "
                f"more than the budget of {limit:.4g}; add a narrower format, or raise the budget"
            )

    def _columns(self, i: int, option: Option) -> list[int]:
        return [self.columns[i, r][x] for r, x in option.items() if x is not None]

    def _owners(self) -> np.ndarray:
        """Returns for each column the number of its operand."""
        found = np.zeros(self.family.size, int)
        for number, own in enumerate(self.columns.values()):
            found[list(own.values())] = number
        return found

    def _jumping(self) -> np.ndarray:
        """Returns for each column whether discrete decisions depend on it."""
        found = np.zeros(self.family.size, bool)
        for (i, _), own in self.columns.items():
            found[list(own.values())] = bool(self.sites[i].discrete)
        return found

    def _best(self, space: Space, found: Front, aim: Objective) -> Tried:
        limit = self.budget.limit
        if limit is not None:
            return space.confirmed(found.choices[found.within(limit)], limit)
        wanted = float(self.budget.error or 0.0)
        most = wanted**2 if aim.root else wanted
        aimed = most
        for _ in range(RETRIES):
            at = found.cheapest(aimed)
            tried = space.run(found.choices[at])
            tried = space.confirmed(tried.choice, tried.cost)
            if abs(tried.measured) <= most:
                return tried
            aimed = min(aimed, abs(tried.predicted)) * 0.9 * most / abs(tried.measured)
        last = space.run(found.choices[-1])
        if abs(last.measured) <= most:
            return last
        raise ValueError(
            f"plan: with the widest formats given the {aim.words} is "
            f"{aim.shown(last.measured):.3g}, more than {wanted:.3g}; add a wider format, or None "
            "for the program's own dtype"
        )

    def _recipe(self, choice: Sequence[int]) -> Recipe:
        """Returns the recipe that rounds what the plan says, and nothing else.

        Deeper scopes come first: a line also names what is on it in scopes within its own.
        """
        shared = collections.Counter(site.place.line for site in self.sites)
        keep = []
        for site, some, i in zip(self.sites, self.options, choice, strict=True):
            a, w, g = (some[i].get(role) for role in ("activation", "weight", "gradient"))
            a, w = (w, a) if site.swapped else (a, w)
            depth = len(site.place.scope.split("/")) if site.place.scope else 0
            if a or w or g:
                keep.append((-depth, site.name, Products((a, w), (g, w), (a, g))))
            elif shared[site.place.line] > 1:
                keep.append((-depth, site.name, None))
        ordered = sorted(keep, key=lambda x: x[0])
        return dataclasses.replace(WIDE, keep=tuple((name, kept) for _, name, kept in ordered))
