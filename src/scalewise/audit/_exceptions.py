"""Changes to a policy of autocast or a recipe of autoscale: exceptions, another format."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from ..autocast import Autocast, Rule
from ..autoscale import Boundaries, interpretation, scope_parts
from ..formats import BF16, E4M3FN, E5M2, FP16, FP32, Format
from ..interpret import Interpretation
from ._findings import Group
from ._fixes import RANGE, Fix

OPERANDS = {E4M3FN: (E5M2, FP16), E5M2: (FP16,), FP16: (BF16,)}  # wider, or more precise


def changeable(low: Interpretation) -> bool:
    """Whether changes are known for a lane that isn't of one format."""
    return isinstance(low, Autocast | Boundaries)


def exceptions(group: Group, kind: str, now: Any) -> Iterator[Fix]:
    """Lanes worth trying for a finding, the smallest change first."""
    if isinstance(now, Autocast):
        return _of_policy(group, kind, now)
    return _of_recipe(group, now)


def _of_policy(group: Group, kind: str, now: Autocast) -> Iterator[Fix]:
    here, policy = group.first, now.policy
    function = here.function.rpartition(".")[2] or None
    rules = [
        (f"Rule('full', primitive={here.primitive!r}, function={function!r})",
         Rule("full", primitive=here.primitive, function=function)),
    ]  # fmt: skip
    if function is not None:
        rules.append((f"Rule('full', function={function!r})", Rule("full", function=function)))
    for words, rule in rules:
        changed = dataclasses.replace(policy, rules=(rule, *policy.rules))
        yield Fix(words, dataclasses.replace(now, policy=changed))
    if kind in RANGE and policy.compute == jnp.float16:
        changed = dataclasses.replace(policy, compute=jnp.bfloat16)
        yield Fix("c=bf16 in the policy", dataclasses.replace(now, policy=changed))


def _of_recipe(group: Group, now: Boundaries) -> Iterator[Fix]:
    here, recipe = group.first, now.recipe
    for name in (here.primitive, *scope_parts(here.scope)[-1:]):
        changed = dataclasses.replace(recipe, keep=((name, FP32), *recipe.keep))
        yield Fix(f"keep={{{name!r}: FP32}} in the recipe", interpretation(changed))
    for fmt in OPERANDS.get(recipe.forward, ()) if isinstance(recipe.forward, Format) else ():
        changed = dataclasses.replace(recipe, forward=fmt)
        yield Fix(f"forward={fmt.name} in the recipe", interpretation(changed))
