"""A policy or recipe specialised to one equation, so that equations share compiled code."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable

import numpy as np

from ...autocasting import Autocast, Policy
from ...autoscaling import (
    RULES,
    Boundaries,
    EveryOp,
    Family,
    FormatOverrides,
    OperandAmaxes,
    Recipe,
    interpretation,
)
from ...autoscaling._overrides import Scope
from ...formats import FP32, FP64, BlockFormat, Format
from ...formats import format as format_
from ...interpret import Equation, Interpretation, Value
from ...scaled import Delayed
from ._interpretations import TableEmulation
from ._loss_scale import LossScaled
from ._rounding import format_params

Overrides = tuple[tuple[Scope, Format | BlockFormat | None], ...]


def specialize(low: Interpretation, equation: Equation) -> tuple[Interpretation, Hashable]:
    """Equations with equal interpretations share compiled code, and so do runs under other
    policies."""
    match low:
        case Autocast():
            return _policy_of(low.policy, equation), equation.direction
        case LossScaled():
            inner = _policy_of(low.low.policy, equation)
            return LossScaled(inner, low.power), equation.direction
        case Boundaries(traced=False) | EveryOp():
            own = _recipe(_of_products(low.recipe, equation), _exception(low.recipe, equation))
            return own, (equation.direction, _copy_scope(equation))
    return low, (equation.scope, equation.source)


def is_elementwise(low: Interpretation) -> bool:
    """Returns True if ``low`` has no scale per array: then arrays may be kept flat and padded."""
    return isinstance(low, TableEmulation | Autocast | LossScaled)


def _policy_of(policy: Policy, equation: Equation) -> Autocast:
    run, only = policy.run(equation), frozenset({equation.name})
    low, full = (only if run == name else frozenset() for name in ("low", "full"))
    return Autocast(Policy(compute=policy.compute, low=low, full=full))


def _of_products(recipe: Recipe, equation: Equation) -> Recipe:
    if recipe.emulate is None or RULES[equation.name].family is Family.CONTRACTION:
        return recipe
    return dataclasses.replace(recipe, emulate=None)


def _exception(recipe: Recipe, equation: Equation) -> Overrides:
    """Returns the entry of ``Recipe.keep`` for an equation, or one that never matches."""
    keep = recipe.keep
    if not keep:
        return ()
    fmt = FormatOverrides(keep).find(equation, keep)  # `keep` itself: no override applies
    if fmt is keep or isinstance(fmt, tuple):
        return (("", FP32),)
    return ((equation.name, fmt),)


@functools.lru_cache(maxsize=1024)
def _recipe(recipe: Recipe, keep: Overrides) -> Interpretation:
    return of_recipe(dataclasses.replace(recipe, keep=keep))


def of_recipe(recipe: Recipe) -> Boundaries | EveryOp:
    """Returns the interpretation of a recipe; with delayed scaling it is given past magnitudes."""
    if recipe.scaling.source == "history":
        overrides = FormatOverrides(recipe.keep)
        return Boundaries(recipe, overrides=overrides, amaxes=OperandAmaxes())
    return interpretation(recipe)


def history_of(low: Interpretation) -> int:
    """Returns how many steps' magnitudes scales depend on; 0 for none."""
    if not isinstance(low, Boundaries) or low.amaxes is None:
        return 0
    assert isinstance(low.recipe.scaling, Delayed)
    return len(low.recipe.scaling.amaxes)


def _copy_scope(equation: Equation) -> str:
    """Returns a copy's scope: in some scopes a copy requests another scale."""
    return equation.scope if equation.name.startswith("copy") else ""


def nominal_format(low: Interpretation) -> Format:
    match low:
        case TableEmulation():
            return low.fmt
        case Autocast():
            return format_(low.policy.compute)
        case LossScaled():
            return nominal_format(low.low)
        case EveryOp():
            return low.fmt
        case Boundaries():
            fmt = low.recipe.forward or FP32
            return fmt if isinstance(fmt, Format) else fmt.element
    return FP32


def result_format_params(low: Interpretation, value: Value) -> np.ndarray:
    """Returns a result's format: that of its dtype under a policy, FP64 if it has a scale."""
    if isinstance(low, LossScaled):
        return result_format_params(low.low, value.value)
    return format_params(format_(value.data.dtype) if isinstance(low, Autocast) else FP64)
