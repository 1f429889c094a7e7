"""Makes the training step of a method or a policy for ``scalewise train``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from .._compare import METHODS, InputError, Program, method
from .._step import Step, step


def step_for(program: Program, name: str, **options: Any) -> Step:
    """Returns the training step of a program by a method."""
    known = list(inspect.signature(step).parameters)[2:]  # behind the loss and the optimizer
    for unknown in sorted(options.keys() - known):
        raise InputError(
            f"train() has no argument {unknown!r}; a recipe is a method, method='fp8', and "
            f"training.step has the options {', '.join(known)}"
        )
    if program.loss_of is None or program.optimizer is None:
        raise InputError(
            f"{program.name} defines no loss_of(params, batch) or no OPTIMIZER: training under a "
            "loss scale needs both (scalewise compare does without)"
        )
    given = {key: value for key, value in options.items() if value is not None}
    try:
        return step(program.loss_of, program.optimizer, **{**_arguments(name), **given})
    except (ValueError, TypeError) as error:
        raise InputError(str(error)) from error


def _arguments(name: str) -> Mapping[str, Any]:
    if "=" in name:
        return {"policy": name}
    found = method(name)
    if found.step_options is None:
        usable = (known for known, each in METHODS.items() if each.step_options is not None)
        raise InputError(
            f"{name} changes the whole program and its state: run it with scalewise compare; "
            f"scalewise train expects one of {', '.join(usable)}, or a policy such as "
            "'p=f32,c=bf16,o=f32'"
        )
    return found.step_options
