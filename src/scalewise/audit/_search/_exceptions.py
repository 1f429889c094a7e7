"""Changes to a policy of autocast or a recipe of autoscale: exceptions, another format."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp

from ...autocast import Autocast, Rule
from ...autoscale import Boundaries, EveryOp, Recipe, interpretation, scope_parts
from ...formats import BF16, E4M3FN, E5M2, FP16, FP32, Format
from ...interpret import Interpretation
from ...scaled import Amax, Mx
from .._run._lane import nominal
from .._run._loss_scale import LossScaled, best_power
from .._run._rows import Row
from ._findings import Group
from ._fixes import RANGE, Fix, narrow_gradients

OPERANDS = {E4M3FN: (E5M2, FP16), E5M2: (FP16,), FP16: (BF16,)}  # wider, or more precise
OTHER = {FP16: BF16, BF16: FP16}


def changeable(low: Interpretation) -> bool:
    """Whether changes are known for a lane that isn't of one format."""
    return isinstance(low, Autocast | Boundaries | EveryOp)


def exceptions(group: Group, kind: str, now: Any, gradients: Sequence[Row]) -> Iterator[Fix]:
    """Lanes worth trying for a finding, the smallest change first.

    Args:
        group: what it is about.
        kind: of the finding.
        now: the lane that is to be changed.
        gradients: the rows that a loss scale multiplies.
    """
    if isinstance(now, Autocast | LossScaled):
        return _of_policy(group, kind, now, gradients)
    if isinstance(now, EveryOp):
        return _of_every_op(group, now.recipe)
    return _of_recipe(group, now.recipe)


def _of_policy(
    group: Group, kind: str, now: Autocast | LossScaled, gradients: Sequence[Row]
) -> Iterator[Fix]:
    here = group.first
    fmt = nominal(now)
    power = best_power(gradients, fmt) if narrow_gradients(group, kind) else 0
    if power and isinstance(now, Autocast):
        yield Fix(f"loss scale 2^{power}", lambda now: LossScaled(_policy(now), power))
    function = here.function.rpartition(".")[2] or None
    rules = [
        (f"Rule('full', primitive={here.primitive!r}, function={function!r})",
         Rule("full", primitive=here.primitive, function=function)),
    ]  # fmt: skip
    if function is not None:
        rules.append((f"Rule('full', function={function!r})", Rule("full", function=function)))
    for size, (words, rule) in enumerate(rules, 1):
        yield Fix(words, partial(_with_rule, rule=rule), size)
    if kind in RANGE and fmt == FP16:
        yield Fix("c=bf16 in the policy", partial(_with_policy, compute=jnp.bfloat16))


def _policy(lane: Autocast | LossScaled) -> Autocast:
    return lane.low if isinstance(lane, LossScaled) else lane


def _with_rule(lane: Autocast | LossScaled, rule: Rule) -> Autocast | LossScaled:
    return _with_policy(lane, rules=(rule, *_policy(lane).policy.rules))


def _with_policy(lane: Autocast | LossScaled, **fields: Any) -> Autocast | LossScaled:
    own = _policy(lane)
    own = dataclasses.replace(own, policy=dataclasses.replace(own.policy, **fields))
    return dataclasses.replace(lane, low=own) if isinstance(lane, LossScaled) else own


def _of_recipe(group: Group, recipe: Recipe) -> Iterator[Fix]:
    here = group.first
    if not isinstance(recipe.scaling, Amax | Mx):
        yield _recipe("scaling=Amax()", scaling=Amax())
    yield from _kept(group)
    side = "backward" if here.direction == "backward" else "forward"
    fmt = getattr(recipe, side)
    for other in OPERANDS.get(fmt, ()) if isinstance(fmt, Format) else (FP16,) if fmt else ():
        yield _recipe(f"{side}={other.name}", **{side: other})
    if recipe.storage in OTHER:
        yield _recipe(f"storage={OTHER[recipe.storage].name}", storage=OTHER[recipe.storage])


def _of_every_op(group: Group, recipe: Recipe) -> Iterator[Fix]:
    """Exceptions, how sums are added up, how scales are found, the other format; at last float32 in
    flight."""
    yield from _kept(group)
    if recipe.arithmetic != "float32":
        yield _recipe("arithmetic='float32'", arithmetic="float32")
    for measure in ("max", "l2"):
        if recipe.rescale != measure:
            yield _recipe(f"rescale={measure!r}", rescale=measure)
    other = OTHER[recipe.storage] if recipe.storage else BF16
    yield _recipe(f"storage={other.name}", storage=other)
    plain = {"store": "boundaries", "rescale": None, "arithmetic": "float32"}
    if not recipe.keep:
        yield _recipe("store='boundaries'", **plain)


def _kept(group: Group) -> Iterator[Fix]:
    """float32 for the primitive, for the innermost scope around it, for the outermost."""
    here = group.first
    parts = scope_parts(here.scope)
    for name in dict.fromkeys((here.primitive, *parts[-1:], *parts[:1])):
        yield Fix(f"keep={{{name!r}: FP32}} in the recipe", partial(_keep, name=name))


def _recipe(words: str, **fields: Any) -> Fix:
    """Other settings of a recipe; an exception made for another way to store is none here."""
    return Fix(f"{words} in the recipe", partial(_changed, **fields))


def _changed(lane: Boundaries | EveryOp, **fields: Any) -> Interpretation:
    return interpretation(dataclasses.replace(lane.recipe, **fields))


def _keep(lane: Boundaries | EveryOp, name: str) -> Interpretation:
    return _changed(lane, keep=((name, FP32), *lane.recipe.keep))
