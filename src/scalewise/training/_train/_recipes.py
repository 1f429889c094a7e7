"""What ``scalewise train --recipe`` may say: arguments of ``training.step`` by name; policies."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from ...autoscale.recipes import CATALOGUE
from .._compare import InputError, Program
from .._moments import NARROW_ADAM
from .._step import Step, step

# One row each: what training.step gets. Every recipe of autoscale is one.
RECIPES: dict[str, Mapping[str, Any]] = {
    "float32": {},
    "autocast-fp16": {"policy": "p=f32,c=f16,o=f32"},
    "autocast-bf16": {"policy": "p=f32,c=bf16,o=f32"},
    "master-fp16": {"policy": "p=f16,c=f16,o=f32", "weights": "master"},
    "master-bf16": {"policy": "p=bf16,c=bf16,o=f32", "weights": "master"},
    "stochastic-bf16": {"policy": "p=bf16,c=bf16,o=f32", "weights": "stochastic"},
    "compensated-bf16": {"policy": "p=bf16,c=bf16,o=f32", "weights": "compensated"},
    "five-bytes": {
        "policy": "p=f16,c=f16,o=f32",
        "weights": "stochastic",
        "moments": NARROW_ADAM,
    },
    **{name: {"policy": recipe} for name, recipe in CATALOGUE.items()},
}


def step_for(program: Program, recipe: str, **options: Any) -> Step:
    """The training step of a program under a recipe.

    Args:
        program: one that defines ``loss_of(params, batch)`` and ``OPTIMIZER``.
        recipe: a name in :data:`RECIPES`, or a policy, ``"p=f32,c=bf16,o=f32"``.
        options: further arguments of :func:`training.step` that aren't None.

    Raises:
        InputError: there is no such recipe, it doesn't fit the optimizer, or the program has no
            loss of its own.
    """
    if program.loss_of is None or program.optimizer is None:
        raise InputError(
            f"{program.name} defines no loss_of(params, batch) or no OPTIMIZER: training under a "
            "loss scale needs both (scalewise compare does without)"
        )
    given = {name: value for name, value in options.items() if value is not None}
    if recipe not in RECIPES and "=" not in recipe:
        close = difflib.get_close_matches(recipe.lower(), RECIPES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(
            f"unknown recipe {recipe!r}: accepted are {', '.join(RECIPES)}, or a policy such as "
            f"'p=f32,c=bf16,o=f32'{hint}"
        )
    row = RECIPES.get(recipe, {"policy": recipe})
    try:
        return step(program.loss_of, program.optimizer, **{**row, **given})
    except (ValueError, TypeError) as error:
        raise InputError(str(error)) from error
