"""Lanes other than that of one format: an equation's own part of a policy or recipe."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import numpy as np

from ...autocast import Autocast, Policy
from ...autoscale import Boundaries, EveryOp, Exceptions, Recipe, interpretation
from ...formats import FP32, FP64, Format
from ...formats import format as format_
from ...interpret import Equation, Interpretation
from ._lanes import Rounded
from ._loss_scale import LossScaled
from ._rounding import as_row

Kept = tuple[tuple[str, Any], ...]


def alike(low: Interpretation, equation: Equation) -> tuple[Interpretation, Hashable]:
    """A lane that does to this equation what ``low`` does, the same for as many as possible.

    Equations with equal lanes share compiled code, and so do runs under different policies.

    Returns:
        The lane, and what else of the equation's place its code depends on.
    """
    match low:
        case Autocast():
            return _decided(low.policy, equation), equation.direction
        case LossScaled():
            lane = _decided(low.low.policy, equation)
            return LossScaled(lane, low.power), equation.direction
        case Boundaries(traced=False) | EveryOp():
            lane = _recipe(low.recipe, _exception(low.recipe, equation))
            return lane, (equation.direction, _marked(equation))
    return low, (equation.scope, equation.source)


def number_by_number(low: Interpretation) -> bool:
    """Whether what a lane makes of one number of an array has nothing to do with the others, as a
    scale would that is found from all of them: then arrays may be kept flat, zeros behind them."""
    return isinstance(low, Rounded | Autocast | LossScaled)


def _decided(policy: Policy, equation: Equation) -> Autocast:
    """The policy's word on one equation, without its reasons."""
    run, only = policy.run(equation), frozenset({equation.name})
    low, full = (only if run == name else frozenset() for name in ("low", "full"))
    return Autocast(Policy(compute=policy.compute, low=low, full=full))


def _exception(recipe: Recipe, equation: Equation) -> Kept:
    """What of a recipe's exceptions an equation sees: its own, or one that it isn't."""
    keep: Any = recipe.keep  # pairs, once there is a recipe
    if not keep:
        return ()
    fmt = Exceptions(keep).find(equation, keep)  # the default is no format
    return (("", FP32),) if fmt is keep else ((equation.name, fmt),)


@functools.lru_cache(maxsize=1024)
def _recipe(recipe: Recipe, keep: Kept) -> Interpretation:
    return interpretation(dataclasses.replace(recipe, keep=keep))


def _marked(equation: Equation) -> str:
    """Where a copy stands: there are some that ask for another scale."""
    return equation.scope if equation.name.startswith("copy") else ""


def nominal(low: Interpretation) -> Format:
    """The narrow format of a lane, in whose range and units a report speaks."""
    match low:
        case Rounded():
            return low.fmt
        case Autocast():
            return format_(low.policy.compute)
        case LossScaled():
            return nominal(low.low)
        case EveryOp():
            return low.fmt
        case Boundaries():
            fmt = low.recipe.forward or FP32
            return fmt if isinstance(fmt, Format) else fmt.element
    return FP32


def own_row(low: Interpretation, value: Any) -> np.ndarray:
    """The range of a result: that of its dtype under a policy, unlimited behind scales."""
    if isinstance(low, LossScaled):
        return own_row(low.low, value.value)
    return as_row(format_(value.data.dtype) if isinstance(low, Autocast) else FP64)
