"""``plan``: the formats of a program's products that change its results least."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from .._check import Natural, Positive, checked
from .._decorator import Params, Pending
from .._output import progress
from .._types import PyTree
from ..auditing import name_of as function_name
from ..autoscaling import Boundaries, Operand, Products, Recipe, operand_format
from ..formats import BlockFormatLike
from ..interpret import Argument, check_callable, run, trace
from ._predict import Front, ObjectiveName
from ._result import FrontPoint, Plan, PlanLine
from ._sites import WIDE, Site, float_results, name_of
from ._space import Lists, Space, Tried, bits_of

OperandLike = Operand | BlockFormatLike | None
WEIGHTS = ("nvfp4", "mxfp8_e4m3", "bf16")
RETRIES = 6  # of a limit of the error that the prediction keeps and the run doesn't


@checked
def plan(
    f: Callable[Params, Any],
    bits: Positive | None = None,
    *,
    error: Positive | None = None,
    objective: ObjectiveName = "auto",
    formats: Sequence[OperandLike] = WEIGHTS,
    activations: OperandLike | Literal["weights"] = None,
    seed: Natural = 0,
) -> Callable[Params, Plan]:
    """Returns a function of ``f``'s arguments that finds the formats of products' operands.

    Products are told apart by their scope and line. Runs with one rounding each, and of random
    plans, predict any plan's effect on the result; the choice is the exact solution of a knapsack
    problem. The plan and those that the prediction can't tell apart from it are then run, and the
    best is the result.

    Args:
        f: any function of pytrees made of JAX primitives: a forward pass, a loss, a training step.
        bits: the most that a weight may take on the average, with the scales of its blocks.
        error: in place of ``bits`` a limit of the objective: the plan of the fewest bits keeps it.
        objective: what the plan keeps small. ``"kl"``: the divergence of the softmax of ``f``'s
            result, logits. ``"loss"``: the change of the loss, the one result without axes.
            ``"error"``: the relative error (root mean square) of all results. ``"auto"``:
            ``"loss"`` if there is one result, without axes, else ``"error"``.
        formats: of weights: formats, :class:`~scalewise.Operand` or None, the program's own dtype.
        activations: how all activations are rounded, by default not at all; ``"weights"`` gives
            each the format of its product's weight.
        seed: of the random plans.

    Raises:
        ValueError: neither or both of ``bits`` and ``error``, an unknown format, bits below the
            cheapest plan, outputs that don't suit the objective, or a function without products to
            be planned.

    Example:
        >>> import jax, jax.numpy as jnp, scalewise as sw
        >>> def logits(params, x):
        ...     return jnp.tanh(x @ params["up"]) @ params["down"]
        >>> k = jax.random.split(jax.random.key(0), 3)
        >>> params = {"up": jax.random.normal(k[0], (32, 64)) / 6,
        ...           "down": jax.random.normal(k[1], (64, 32)) / 8}
        >>> found = sw.plan(logits, 6.5, objective="kl")(params, jax.random.normal(k[2], (16, 32)))
        >>> found.bits <= 6.5, len(found.lines)
        (True, 2)
    """
    check_callable(f, "plan")
    if (bits is None) == (error is None):
        raise ValueError("plan: expected one of bits, the mean of a weight, and error, a limit")
    tied = activations == "weights"
    lists = Lists(_operands(formats), "weights" if tied else _operands([activations]))

    def planned(*args: PyTree, **kwargs: PyTree) -> Plan:
        with progress(f"plan {(name := function_name(f))}") as tell:
            program = trace(f, Boundaries.of(WIDE), args, kwargs, name="plan")
            return solved(Space(program, lists, objective, seed, name, tell), bits, error)

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


def solved(space: Space, bits: float | None, error: float | None) -> Plan:
    aim, found = space.aim, space.predict.front(space.columns, space.costs)
    if bits is None:
        best = _keeping(space, found, error or 0.0)
    elif (at := found.within(bits)) < 0:
        least = f"{found.costs[0]:.4g} bits a weight, more than {bits:.4g}"
        raise ValueError(f"plan: the cheapest plan of {space.function} takes {least}")
    else:
        best = space.confirmed(found.choices[at], bits)
    recipe = _recipe(space, best.choice)
    measured = _confirmed(space, recipe, best)
    return Plan(
        function=space.function, objective=aim.words, bits=best.cost,
        predicted=aim.shown(best.predicted), measured=aim.shown(measured), recipe=recipe,
        lines=lines(space, best), front=front(space, found), runs=space.runs + 1,
        exact=found.exact,
    )  # fmt: skip


def _keeping(space: Space, found: Front, error: float) -> Tried:
    aim = space.aim
    aimed = most = error**2 if aim.root else error
    for _ in range(RETRIES):
        tried = space.run(found.choices[found.cheapest(aimed)])
        tried = space.confirmed(tried.choice, tried.cost)
        if abs(tried.measured) <= most:
            return tried
        aimed = min(aimed, abs(tried.predicted)) * 0.9 * most / abs(tried.measured)
    last = space.run(found.choices[-1])
    if abs(last.measured) <= most:
        return last
    raise ValueError(
        f"plan: with the widest formats given the {aim.words} is "
        f"{aim.shown(last.measured):.3g}, more than {error:.3g}; add a wider format, or None "
        "for the program's own dtype"
    )


def _recipe(space: Space, choice: Sequence[int]) -> Recipe:
    """Returns the recipe that rounds what the plan says, and nothing else.

    Deeper scopes come first: a line also names what is on it in scopes within its own.
    """
    shared = collections.Counter(place.line for site in space.sites for place in site.places)
    keep = []
    for site, some, i in zip(space.sites, space.options, choice, strict=True):
        a, w = some[i].get("activation"), some[i].get("weight")
        for place, swapped in site.places.items():
            left, right = (w, a) if swapped else (a, w)
            depth = len(place.scope.split("/")) if place.scope else 0
            if a or w:
                products = Products((left, right), (None, right), (left, None))
                keep.append((-depth, name_of(place), products))
            elif shared[place.line] > 1:
                keep.append((-depth, name_of(place), None))
    ordered = sorted(keep, key=lambda x: x[0])
    return dataclasses.replace(WIDE, keep=tuple((name, kept) for _, name, kept in ordered))


def _confirmed(space: Space, recipe: Recipe, best: Tried) -> float:
    """Returns the objective as ``autoscale`` computes the program."""
    if not recipe.keep:
        return best.measured
    by, program = Boundaries.of(recipe), space.program

    def emulated(arrays: Sequence[Argument]) -> jax.Array:
        results = float_results(program, by, run(program, by, (), arrays)[1])
        return space.aim.measure(space.reference, results)

    measured = jax.jit(emulated)(list(program.arrays))
    by.overrides.check("plan")
    return float(measured)


SHOWN = 24  # points of the Pareto front that a result has
OFF = 2.0  # a factor between an effect alone and the same among others that is worth a note
SMALL = 0.01  # of the objective: roundings that do less aren't worth a note


def lines(space: Space, best: Tried) -> tuple[PlanLine, ...]:
    """Returns a line for each site, with the objective of its roundings alone."""
    columns = [space.columns[i][choice] for i, choice in enumerate(best.choice)]
    alone = [space.emulate(space.family.chosen(own)) if own else 0.0 for own in columns]
    total = sum(map(abs, alone)) or 1.0
    found = []
    for i, (site, own) in enumerate(zip(space.sites, columns, strict=True)):
        operands, share = space.options[i][best.choice[i]], abs(alone[i]) / total
        among = space.predict.among_others(own, space.columns[i])
        line = PlanLine(
            name=site.name, function=site.function, primitives=site.primitives,
            weights=site.weights, operands=operands,
            bits=bits_of(operands.get("weight"), site.bits), elements=site.elements,
            among_others=space.aim.shown(among), alone=space.aim.shown(alone[i]), share=share,
            note=_note(site, among, alone[i]) if share >= SMALL else "",
        )  # fmt: skip
        found.append(line)
    return tuple(found)


def _note(site: Site, among: float, alone: float) -> str:
    said, ratio = [], alone / among if among else math.inf
    if not 1 / OFF <= ratio <= OFF:
        said.append(f"alone {ratio:.2g} times what it does among others")
    if site.discrete:
        said.append(f"may change decisions at {', '.join(site.discrete[:3])}")
    return "; ".join(said)


def front(space: Space, found: Front) -> tuple[FrontPoint, ...]:
    """Returns some points of the front, evenly spaced in their order."""
    count = len(found.costs)
    shown = np.unique(np.linspace(0, count - 1, min(SHOWN, count)).round().astype(int))
    predicted = space.predicted([tuple(map(int, found.choices[i])) for i in shown])
    errors = [space.aim.shown(float(x)) for x in predicted]
    return tuple(map(FrontPoint, map(float, found.costs[shown]), errors))
