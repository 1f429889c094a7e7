"""The recipes of ``scalewise train``: methods that ``training.step`` can apply, and policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._compare import METHODS, InputError, Program, method
from .._step import Step, step

# The arguments of training.step, by the name of the method.
RECIPES: dict[str, Mapping[str, Any]] = {
    name: m.step_options for name, m in METHODS.items() if m.step_options is not None
}


def step_for(program: Program, recipe: str, **options: Any) -> Step:
    """Returns the training step of a program under a recipe.

    Args:
        program: one that defines ``loss_of(params, batch)`` and ``OPTIMIZER``.
        recipe: a name in :data:`RECIPES`, or a policy, ``"p=f32,c=bf16,o=f32"``.
        options: further arguments of :func:`training.step` that aren't None.

    Raises:
        InputError: there is no such recipe, it doesn't fit the optimizer, or the program has no
            loss or no optimizer.
    """
    if program.loss_of is None or program.optimizer is None:
        raise InputError(
            f"{program.name} defines no loss_of(params, batch) or no OPTIMIZER: training under a "
            "loss scale needs both (scalewise compare does without)"
        )
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return step(program.loss_of, program.optimizer, **{**_arguments(recipe), **given})
    except (ValueError, TypeError) as error:
        raise InputError(str(error)) from error


def _arguments(recipe: str) -> Mapping[str, Any]:
    """Returns the arguments of ``training.step`` for a recipe's name or a policy."""
    if "=" in recipe:
        return {"policy": recipe}
    found = method(recipe)
    if found.step_options is None:
        raise InputError(
            f"{recipe} changes the whole program and its state: run it with scalewise compare; "
            f"scalewise train expects one of {', '.join(RECIPES)}, or a policy such as "
            "'p=f32,c=bf16,o=f32'"
        )
    return found.step_options
