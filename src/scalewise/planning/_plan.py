"""``plan``: the formats of a program that change its results least within a budget."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .._check import Natural, checked
from .._decorator import Params, Pending
from .._resolve import as_format
from .._types import PyTree
from ..auditing import name_of as function_name
from ..autocasting import Autocast, Policy, Rule
from ..autoscaling import Boundaries, Operand, Operands, Products, Recipe, Setup, operand_format
from ..formats import BF16, FP16, BlockFormatLike, FormatLike
from ..interpret import (
    Applied,
    Argument,
    Equation,
    Interpretation,
    State,
    Value,
    check_callable,
    run,
    trace,
)  # fmt: skip
from ..scalifying import FormatOverrides
from ._budget import UNITS, Budget, ObjectiveName, bits_of
from ._predict import Front
from ._result import FrontPoint, Plan, PlanLine
from ._sites import RESULT, WIDE, Site, float_results, name_of
from ._space import Lists, Space, Tried

OperandLike = Operand | BlockFormatLike | None
WEIGHTS = ("nvfp4", "mxfp8_e4m3", "bf16")
RETRIES = 6  # of a limit of the error that the prediction keeps and the run doesn't


@checked
def plan(
    f: Callable[Params, Any],
    budget: Budget | float,
    *,
    objective: ObjectiveName = "auto",
    formats: Sequence[OperandLike] | None = None,
    activations: Sequence[OperandLike] | Literal["weights"] = (None,),
    gradients: Sequence[OperandLike] = (None,),
    results: Sequence[FormatLike] = (),
    seed: Natural = 0,
) -> Callable[Params, Plan]:
    """Returns a function of ``f``'s arguments that finds the formats of products' operands, or of
    all operations' results.

    Products are told apart by their scope and line, operations by primitive and function. One
    adjoint pass and some runs predict any plan's effect on the result; the choice is the exact
    solution of a knapsack problem. The plan and those that the prediction can't tell apart from it
    are then run, and the best is the result.

    Args:
        f: any function of pytrees made of JAX primitives: a forward pass, a loss, a training step.
        budget: a number, the mean bits of a weight; or a :class:`Budget`.
        objective: what the plan keeps small. ``"kl"``: the divergence of the softmax of ``f``'s
            result, logits. ``"loss"``: the change of the loss, the one result without axes.
            ``"error"``: the relative error (root mean square) of all results. ``"auto"``:
            ``"loss"`` if there is one result, without axes, else ``"error"``.
        formats: of weights: formats, :class:`~scalewise.Operand` or None, the program's own dtype.
            By default NVFP4, MXFP8 and BF16, or None where ``results`` are planned.
        activations: of activations; ``"weights"`` for the format of the product's weight. With
            a budget of bits or bytes they cost nothing, so that the best one given is chosen.
        gradients: of gradients, for a function that differentiates.
        results: formats to choose from for results of all operations, besides the program's own
            dtype. They aren't for a budget of seconds.
        seed: of the random directions of the outputs.

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
    if results and limits.kind == "seconds":
        raise ValueError("plan: a device's time isn't known for results; give bits, bytes or error")
    own = [Operand(as_format(x, "plan")) for x in results]
    weights = ((None,) if results else WEIGHTS) if formats is None else formats
    others = activations if isinstance(activations, str) else _operands(activations)
    lists = Lists(_operands(weights), others, _operands(gradients), [*own, None])

    def planned(*args: PyTree, **kwargs: PyTree) -> Plan:
        program = trace(f, Boundaries.of(WIDE), args, kwargs, name="plan")
        return solved(Space(program, limits, lists, objective, seed, function_name(f)))

    return Pending(planned, "plan")


def _operands(some: Sequence[OperandLike]) -> list[Operand | None]:
    if isinstance(some, str) or not some:
        raise ValueError(f"plan: formats are a sequence of at least one, not {some!r}")
    found = [x if isinstance(x, Operand) else operand_format(x, "plan") for x in some]
    made = [x if isinstance(x, Operand | None) else Operand(x) for x in found]
    drawn = next((x for x in made if x is not None and (x.is_random or x.hadamard)), None)
    if drawn is not None:
        raise ValueError(f"plan: {drawn!r} draws random numbers or transforms its operand")
    return list(dict.fromkeys(made))


def solved(space: Space) -> Plan:
    aim, found = space.aim, space.predict.front(space.columns, space.costs)
    best = _best(space, found)
    recipe = _recipe(space, best.choice)
    measured, cut = _confirmed(space, recipe, best)
    return Plan(
        function=space.function, objective=aim.words,
        unit=UNITS[space.budget.kind].format(space.noun),
        cost=best.cost, predicted=aim.shown(best.predicted), measured=aim.shown(measured),
        recipe=recipe, policy=_policy(space, best), lines=lines(space, best, cut),
        front=front(space, found), runs=space.runs + 1, exact=found.exact,
    )  # fmt: skip


def _best(space: Space, found: Front) -> Tried:
    limit, aim = space.budget.limit, space.aim
    if limit is not None:
        return space.confirmed(found.choices[found.within(limit)], limit)
    wanted = float(space.budget.error or 0.0)
    aimed = most = wanted**2 if aim.root else wanted
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


def _recipe(space: Space, choice: Sequence[int]) -> Recipe:
    """Returns the recipe that rounds what the plan says, and nothing else.

    Deeper scopes come first: a line also names what is on it in scopes within its own.
    """
    shared = collections.Counter(place.line for site in space.sites for place in site.places)
    keep = []
    for site, some, i in zip(space.sites, space.options, choice, strict=True):
        a, w, g = (some[i].get(role) for role in ("activation", "weight", "gradient"))
        for place, swapped in site.places.items():
            left, right = (w, a) if swapped else (a, w)
            depth = len(place.scope.split("/")) if place.scope else 0
            if a or w or g:
                products = Products((left, right), (g, right), (left, g))
                keep.append((-depth, name_of(place), products))
            elif shared[place.line] > 1:
                keep.append((-depth, name_of(place), None))
    ordered = sorted(keep, key=lambda x: x[0])
    return dataclasses.replace(WIDE, keep=tuple((name, kept) for _, name, kept in ordered))


@dataclasses.dataclass(frozen=True)
class _Counting(Operands):
    """Adds up a plan's rounded operands; the state has the numbers cut off and all, by site."""

    index: Mapping[tuple[int, ...], int] = dataclasses.field(default_factory=dict)

    def after(
        self, state: State, equation: Equation, inputs: Sequence[Value], outs: list[Value]
    ) -> Applied:
        if equation.path in self.index:
            for x in self.rounded_operands(equation, inputs):
                counts = jnp.stack([jnp.sum(x.saturated, dtype=jnp.float32), x.exact.size])
                state = state.at[self.index[equation.path]].add(counts)
        return state, outs


def _confirmed(space: Space, recipe: Recipe, best: Tried) -> tuple[float, np.ndarray]:
    """Returns the objective as ``autoscale`` computes the program, and what is cut off.

    A recipe rounds no results: where some are rounded, the plan's own run counts.
    """
    if not recipe.keep:
        return best.measured, np.zeros(len(space.sites))
    setup = Setup(recipe, overrides=FormatOverrides(recipe.keep))
    counting = _Counting(setup, index=space.family.index)
    by = Boundaries(counting, counting.after)
    measured, state = _measured(space, by, jnp.zeros((len(space.sites), 2)))
    by.overrides.check("plan")
    cut, rounded = np.asarray(state, np.float64).T
    results = any(o[i].get("result") for o, i in zip(space.options, best.choice, strict=True))
    return best.measured if results else measured, cut / np.maximum(rounded, 1.0)


def _measured(space: Space, by: Interpretation, state: State) -> tuple[float, State]:
    program = space.program

    def emulated(arrays: Sequence[Argument]) -> tuple[jax.Array, State]:
        after, values = run(program, by, state, arrays)
        return space.aim.measure(space.reference, float_results(program, by, values)), after

    measured, state = jax.jit(emulated)(list(program.arrays))
    return float(measured), state


def _policy(space: Space, best: Tried) -> Policy | None:
    """Returns rules of ``autocast`` with the results' formats; None if it can't express them.

    It rounds an operation's operands, too, so that the policy is run: it has to keep the error.
    """
    sites = [(s, o[i].get("result")) for s, o, i in zip(
        space.sites, space.options, best.choice, strict=True) if s.roles == RESULT]  # fmt: skip
    formats = {x.format.element for _, x in sites if x is not None}
    if len(formats) != 1 or not formats <= {FP16, BF16} or len(sites) < len(space.sites):
        return None
    rules = [
        Rule("full" if x is None else "low", primitive=s.primitives[0], function=s.function or None)
        for s, x in sites
    ]
    policy = Policy(compute=formats.pop().dtype, rules=tuple(rules))
    most = space.budget.error or OFF * space.aim.shown(abs(best.measured))
    measured, _ = _measured(space, Autocast(policy), ())
    return policy if space.aim.shown(abs(measured)) <= most else None


SHOWN = 24  # points of the Pareto front that a result has
OFF = 1.5  # a factor between the adjoint pass and a run, from which on first order has failed
CUT = 0.05  # of an operand's numbers; the scales of MX formats cut off a few in each operand
UNSEEN = 1e6  # that factor where the derivative is zero, but for its own rounding
SMALL = 0.01  # of the objective: roundings that do less aren't worth a note


def lines(space: Space, best: Tried, saturated: np.ndarray) -> tuple[PlanLine, ...]:
    """Returns a line for each site, with the objective of its roundings alone."""
    columns = [space.columns[i][choice] for i, choice in enumerate(best.choice)]
    measured = [space.emulate(space.family.chosen(own)) if own else 0.0 for own in columns]
    total = sum(map(abs, measured)) or 1.0
    found = []
    for i, (site, own, result) in enumerate(zip(space.sites, columns, measured, strict=True)):
        operands, cut, share = space.options[i][best.choice[i]], saturated[i], abs(result) / total
        second = space.slopes.hessian[np.ix_(own, own)].sum() / 2
        predicted = space.aim.shown(float(space.slopes.bias[own].sum() + second))
        result = space.aim.shown(result)
        line = PlanLine(
            name=site.name, function=site.function, primitives=site.primitives,
            weights=site.weights, operands=operands,
            bits=bits_of(site.counted(operands), site.bits), elements=site.elements,
            predicted=predicted, measured=result, share=share,
            saturated=float(cut), note=_note(site, predicted, result, share, float(cut)),
        )  # fmt: skip
        found.append(line)
    return tuple(found)


def _note(site: Site, predicted: float, measured: float, share: float, cut: float) -> str:
    said = []
    ratio = abs(measured / predicted) if predicted else np.inf
    if share >= SMALL and not 1 / OFF <= ratio <= OFF:
        times = f"{ratio:.2g} times what the adjoint pass says"
        said.append(times if ratio < UNSEEN else "the adjoint pass doesn't see it")
        if site.discrete and ratio > OFF:
            said.append(f"decisions change at {', '.join(site.discrete[:3])}")
    if cut >= CUT:
        said.append(f"{cut:.2%} of numbers cut off")
    return "; ".join(said)


def front(space: Space, found: Front) -> tuple[FrontPoint, ...]:
    """Returns some points of the front, evenly spaced in their order."""
    count = len(found.costs)
    shown = np.unique(np.linspace(0, count - 1, min(SHOWN, count)).round().astype(int))
    predicted = space.predicted([tuple(map(int, found.choices[i])) for i in shown])
    errors = [space.aim.shown(float(x)) for x in predicted]
    return tuple(map(FrontPoint, map(float, found.costs[shown]), errors))
