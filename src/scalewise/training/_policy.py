"""Applies the policy or recipe of ``training.step`` to the loss function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._resolve import resolve
from ..autocasting import Policy, autocast
from ..autocasting import policy as policy_
from ..autoscaling import Recipe, Schedule, autoscale


def named_policy(policy: str) -> Policy | Recipe:
    return resolve(policy, "policy", "recipe", where="step")


def loss_transform(
    policy: Policy | Recipe | Schedule | DTypeLike | None,
) -> tuple[Callable[[Callable], Callable], np.dtype | None, bool]:
    """Returns the transformation of the loss function, the parameters' dtype, and if it is float16.

    With a Schedule the transformed function takes the step first.
    """
    if policy is None:
        return lambda f: f, None, False
    if isinstance(policy, Schedule):
        _refuse_state(policy.recipe(0))
        return lambda f: autoscale(f, policy), None, False
    if isinstance(policy, Recipe):
        _refuse_state(policy)
        if policy.scaling.source == "history":  # Step differentiates it together with its history
            return lambda f: f, None, False
        return lambda f: autoscale(f, policy), None, False
    chosen = policy_(policy)
    narrow = jnp.float16 in (chosen.compute, chosen.params)
    params = None if chosen.params is None else np.dtype(chosen.params)
    # Step casts the parameters, and the loss is float32: autocast only casts operations
    inner = dataclasses.replace(chosen, params=None, output=None)
    return lambda f: autocast(f, inner), params, narrow


def _refuse_state(recipe: Recipe) -> None:
    if recipe.state:
        raise ValueError(
            f"step: the recipe's state says how parts of a training state are stored, first "
            f"{recipe.state[0][0]!r}; here moments={{...}} and the policy's p= do; expected a "
            "recipe without, or autoscale of a training step of your own"
        )
