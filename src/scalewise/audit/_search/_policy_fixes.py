"""Fixes for autocast policies and autoscale recipes: exceptions, other formats, a loss scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp

from ...autocast import Autocast, Rule
from ...autoscale import Boundaries, EveryOp, Recipe, interpretation, scope_parts
from ...formats import BF16, E4M3FN, E5M2, FP16, FP32, Format
from ...interpret import Interpretation
from ...scaled import Amax
from .._run._equation_statistics import Equations
from .._run._loss_scale import LossScaled, best_power
from .._run._specialize import nominal_format
from ._findings import Group
from ._fixes import RANGE, Fix, loss_scale_fix, may_need_loss_scale

OPERANDS = {E4M3FN: (E5M2, FP16), E5M2: (FP16,), FP16: (BF16,)}  # more range, or more bits
OTHER = {FP16: BF16, BF16: FP16}


def has_fixes(low: Interpretation) -> bool:
    """Returns True for the policies and recipes that :func:`policy_fixes` can change."""
    return isinstance(low, Autocast | Boundaries | EveryOp)


def policy_fixes(group: Group, kind: str, now: Any, gradients: Equations) -> Iterator[Fix]:
    """Yields fixes for a finding under a policy or recipe, the smallest change first.

    Args:
        group: the finding's equations.
        kind: of the finding.
        now: the interpretation to change.
        gradients: the equations that a loss scale multiplies.
    """
    if isinstance(now, Autocast | LossScaled):
        return _of_policy(group, kind, now, gradients)
    if isinstance(now, EveryOp):
        return _of_every_op(group, now.recipe)
    return _of_recipe(group, now.recipe)


def _of_policy(
    group: Group, kind: str, now: Autocast | LossScaled, gradients: Equations
) -> Iterator[Fix]:
    here = group.first
    fmt = nominal_format(now)
    power = best_power(gradients, fmt) if may_need_loss_scale(group, kind) else 0
    if power and isinstance(now, Autocast):
        yield loss_scale_fix(power, lambda now: LossScaled(_autocast(now), power))
    function = here.function.rpartition(".")[2] or None
    words = f"Rule('full', primitive={here.primitive!r}, function={function!r})"
    rules = [(words, Rule("full", primitive=here.primitive, function=function))]
    if function is not None:
        rules.append((f"Rule('full', function={function!r})", Rule("full", function=function)))
    for size, (words, rule) in enumerate(rules, 1):
        yield Fix(words, partial(_with_rule, rule=rule), size)
    if kind in RANGE and fmt == FP16:
        yield Fix("c=bf16 in the policy", partial(_with_policy, compute=jnp.bfloat16))


def _autocast(low: Autocast | LossScaled) -> Autocast:
    return low.low if isinstance(low, LossScaled) else low


def _with_rule(low: Autocast | LossScaled, rule: Rule) -> Autocast | LossScaled:
    return _with_policy(low, rules=(rule, *_autocast(low).policy.rules))


def _with_policy(low: Autocast | LossScaled, **fields: Any) -> Autocast | LossScaled:
    own = _autocast(low)
    own = dataclasses.replace(own, policy=dataclasses.replace(own.policy, **fields))
    return dataclasses.replace(low, low=own) if isinstance(low, LossScaled) else own


def _of_recipe(group: Group, recipe: Recipe) -> Iterator[Fix]:
    here = group.first
    if recipe.scaling.source != "amax":
        yield _recipe("scaling=Amax()", scaling=Amax())
    yield from _exceptions(group)
    operands = "backward" if here.direction == "backward" else "forward"
    fmt = getattr(recipe, operands)
    for other in OPERANDS.get(fmt, ()) if isinstance(fmt, Format) else (FP16,) if fmt else ():
        yield _recipe(f"{operands}={other.name}", **{operands: other})
    if recipe.storage in OTHER:
        yield _recipe(f"storage={OTHER[recipe.storage].name}", storage=OTHER[recipe.storage])


def _of_every_op(group: Group, recipe: Recipe) -> Iterator[Fix]:
    """Yields exceptions, other sums, scales and formats; at last float32 between stores."""
    yield from _exceptions(group)
    if recipe.arithmetic != "float32":
        yield _recipe("arithmetic='float32'", arithmetic="float32")
    for measure in ("max", "l2"):
        if recipe.rescale != measure:
            yield _recipe(f"rescale={measure!r}", rescale=measure)
    other = OTHER[recipe.storage] if recipe.storage else BF16
    yield _recipe(f"storage={other.name}", storage=other)
    plain = {"store": "boundaries", "rescale": None, "arithmetic": "float32"}
    if not recipe.keep:  # an exception for one `store` may not apply under another
        yield _recipe("store='boundaries'", **plain)


def _exceptions(group: Group) -> Iterator[Fix]:
    """Yields float32 for the primitive, for the innermost scope around it, for the outermost."""
    here = group.first
    parts = scope_parts(here.scope)
    for name in dict.fromkeys((here.primitive, *parts[-1:], *parts[:1])):
        yield Fix(f"keep={{{name!r}: FP32}} in the recipe", partial(_with_exception, name=name))


def _recipe(words: str, **fields: Any) -> Fix:
    return Fix(f"{words} in the recipe", partial(_with_fields, **fields))


def _with_fields(low: Boundaries | EveryOp, **fields: Any) -> Interpretation:
    return interpretation(dataclasses.replace(low.recipe, **fields))


def _with_exception(low: Boundaries | EveryOp, name: str) -> Interpretation:
    return _with_fields(low, keep=((name, FP32), *low.recipe.keep))
