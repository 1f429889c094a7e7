"""The kinds of low-precision runs, and each specialised to one equation to share compiled code."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

from ...autocasting import Autocast, Policy
from ...autoscaling import RULES, Boundaries, Family, OperandAmaxes, Recipe, interpretation
from ...autoscaling.recipes import CATALOGUE
from ...formats import FP32, FP64, BlockFormat, Format
from ...formats import format as format_
from ...interpret import Equation, Interpretation
from ...scaled import Delayed
from ...scalifying import EveryOp, FormatOverrides, Scalify, Scope
from ._interpretations import TableEmulation
from ._loss_scale import LossScaled

Overrides = tuple[tuple[Scope, Format | BlockFormat | None], ...]


def _policy_of(policy: Policy, equation: Equation) -> Autocast:
    run, only = policy.run(equation), frozenset({equation.name})
    low, full = (only if run == name else frozenset() for name in ("low", "full"))
    return Autocast(Policy(compute=policy.compute, low=low, full=full))


def _follows(policy: Policy, equation: Equation) -> bool:
    return policy.run(equation) == "follow" and equation.direction != "update"


def _exception(low: Boundaries | EveryOp, equation: Equation) -> Overrides:
    """Returns the entry of ``Recipe.keep`` for an equation; one that never matches if there is none
    and the code depends on whether the recipe has any."""
    keep, overrides = low.recipe.keep, FormatOverrides(low.recipe.keep)
    if not keep:
        return ()
    fmt = overrides.find(equation, keep)  # `keep` itself: no override applies
    if fmt is not keep and not isinstance(fmt, tuple):
        return ((equation.name, fmt),)
    shared = isinstance(low, Boundaries) and not overrides.have_settings
    return () if shared else (("", FP32),)


@functools.lru_cache(maxsize=1024)
def _without_products(recipe: Recipe | Scalify) -> Recipe | Scalify:
    """Returns a recipe that rounds everything but operands of products in the same way."""
    if isinstance(recipe, Scalify):
        return recipe
    same = dataclasses.replace(recipe, emulate=None)
    if recipe.products.short_form is None:
        return same
    return same.with_operands(forward=None, backward=None)


@functools.lru_cache(maxsize=1024)
def _recipe(recipe: Recipe | Scalify, keep: Overrides) -> Interpretation:
    return of_recipe(dataclasses.replace(recipe, keep=keep))


def of_recipe(recipe: Recipe | Scalify) -> Boundaries | EveryOp:
    return interpretation(recipe, amaxes=OperandAmaxes() if recipe.is_delayed else None)


def history_of(low: Interpretation) -> int:
    if not isinstance(low, Boundaries) or low.amaxes is None:
        return 0
    scaling = low.recipe.products.scaling
    assert isinstance(scaling, Delayed)
    return scaling.history


def _of_policy(low: Autocast, equation: Equation) -> tuple[Interpretation, Hashable]:
    return _policy_of(low.policy, equation), equation.direction


def _of_loss_scale(low: LossScaled, equation: Equation) -> tuple[Interpretation, Hashable]:
    return LossScaled(_policy_of(low.low.policy, equation), low.power), equation.direction


def _of_recipe(low: Boundaries | EveryOp, equation: Equation) -> tuple[Interpretation, Hashable]:
    recipe = low.recipe
    if RULES[equation.name].family is not Family.CONTRACTION:
        recipe = _without_products(recipe)
    scope = equation.scope if equation.name.startswith("copy") else ""  # may ask for another scale
    return _recipe(recipe, _exception(low, equation)), (equation.direction, scope)


def _as_it_is(low: Interpretation, equation: Equation) -> tuple[Interpretation, Hashable]:
    return low, (equation.scope, equation.source)


def _forward_element(low: Boundaries) -> Format:
    operand = low.recipe.products.operand("forward", "activation")
    return FP32 if operand is None else operand.format.element


def _recipe_name(low: Boundaries | EveryOp) -> str:
    own, units = low.recipe, None
    if isinstance(own, Recipe):
        own, units = dataclasses.replace(own, emulate=None), own.emulate
    names = [name for name, recipe in CATALOGUE.items() if recipe == own]
    device = f" on {units}" if units else ""
    return f"autoscale {names[0] if names else '(own recipe)'}{device}"


@dataclasses.dataclass(frozen=True)
class Low:
    """Describes a kind of low-precision run; the defaults hold for any interpretation."""

    run: str | None = None  # one of ``FixKind.runs``; None if no fixes are known
    elementwise: bool = False  # whether no array has a scale, so that it may be flat and padded
    fmt: Callable[[Any], Format] = lambda low: FP32  # whose range and units a report uses
    name: Callable[[Any], str] = lambda low: type(low).__name__  # in a report
    # returns an interpretation that acts on an equation as the run does, equal for as many as
    # possible, which then share compiled code; and what else of its place the code depends on
    specialize: Callable[[Any, Equation], tuple[Interpretation, Hashable]] = _as_it_is
    result: Callable[[Any], Format] = lambda value: FP64  # of a result; FP64 if it has a scale
    # whether a reshape returns its operand's numbers, in arrays that are flat and padded
    keeps: Callable[[Any, Equation], bool] = lambda low, equation: False


LOWS = {
    TableEmulation: Low(
        "format",
        elementwise=True,
        fmt=lambda low: low.fmt,
        name=lambda low: low.fmt.name + ("" if low.saturate is False else ", saturating"),
        keeps=lambda low, equation: True,
    ),
    Autocast: Low(
        "policy",
        elementwise=True,
        fmt=lambda low: format_(low.policy.compute),
        name=lambda low: f"autocast {low.policy}",
        specialize=_of_policy,
        result=lambda value: format_(value.data.dtype),
        keeps=lambda low, equation: _follows(low.policy, equation),
    ),
    LossScaled: Low(
        "policy",
        elementwise=True,
        fmt=lambda low: format_(low.low.policy.compute),
        specialize=_of_loss_scale,
        result=lambda value: format_(value.value.data.dtype),
        keeps=lambda low, equation: _follows(low.low.policy, equation),
    ),
    EveryOp: Low("every_op", fmt=lambda low: low.fmt, name=_recipe_name, specialize=_of_recipe),
    Boundaries: Low("recipe", fmt=_forward_element, name=_recipe_name, specialize=_of_recipe),
}


def kind_of_run(low: Interpretation) -> Low:
    return next((LOWS[own] for own in type(low).__mro__ if own in LOWS), Low())


def nominal_format(low: Interpretation) -> Format:
    return kind_of_run(low).fmt(low)
