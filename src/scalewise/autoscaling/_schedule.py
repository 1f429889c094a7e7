"""Recipes that follow each other in the steps of a run."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._check import Converted, Count, Words, checked, is_array, kept, shown
from .._jax import Tracer
from .._types import PyTree
from ..interpret import pure_call
from ..scalifying import Scalify
from ._recipe import Recipe, RecipeLike
from .recipes import recipe as recipe_

Phases = Annotated[
    Mapping[int | float, RecipeLike] | tuple[tuple[int | float, RecipeLike], ...],
    Words("a dict from first steps to recipes, {0: 'bf16', 1000: 'fp8'}"),
]


@checked
@dataclasses.dataclass(frozen=True)
class Schedule:
    """Recipes that follow each other: a warm-up in a wider one, BF16 for the last 10 % of steps.

    Attributes:
        phases: ``{first step: recipe or name}``, or pairs; the first at step 0. A float is a
            fraction of ``steps``, rounded up to a step. The last phase has no end.
        steps: how many steps the run has; for fractions, and to check that every phase begins.

    Raises:
        TypeError, ValueError: no phases, no step 0, steps that don't increase, a fraction without
            ``steps``, a phase that begins after the last step, a recipe with delayed scaling, or
            recipes that store different parts of the state.

    Example:
        >>> import scalewise as sw
        >>> schedule = sw.Schedule({0: "bf16", 100: "nvfp4", 0.9: "bf16"}, steps=2000)
        >>> schedule.starts, schedule.recipe(1799) == sw.recipes.nvfp4
        ((0, 100, 1800), True)
    """

    phases: Converted[tuple[tuple[int, Recipe | Scalify], ...], Phases] = kept()
    steps: Count | None = None

    def __post_init__(self):
        given: Any = self.phases
        given = given.items() if isinstance(given, Mapping) else given
        phases = tuple((self._step(start), recipe_(r)) for start, r in given)
        object.__setattr__(self, "phases", phases)
        if not phases or phases[0][0] != 0:
            raise ValueError(f"Schedule.phases begin at {self.starts[:1]}; expected step 0")
        for (start, _), (after, _) in itertools.pairwise(phases):
            if after <= start:
                raise ValueError(
                    f"Schedule.phases begin at the steps {', '.join(map(str, self.starts))}; "
                    "expected increasing ones"
                )
            if self.steps is not None and after >= self.steps:
                raise ValueError(
                    f"Schedule: the phase that begins at step {start} never ends: the next begins "
                    f"at step {after}, and the run has {self.steps} steps"
                )
        for _, recipe in phases:
            if recipe.is_delayed:
                raise ValueError(
                    "Schedule: delayed scaling needs the history of every step; use it without a "
                    "schedule, or fp8_current here"
                )
            if recipe.state != phases[0][1].state:
                raise ValueError(
                    "Schedule: the recipes store different parts of the state, whose type would "
                    "change within a run; give all of them the same Recipe.state"
                )

    @property
    def starts(self) -> tuple[int, ...]:
        """The first step of each phase."""
        return tuple(start for start, _ in self.phases)

    def recipe(self, step: int) -> Recipe | Scalify:
        """Returns the recipe of a step."""
        if step < 0:
            raise ValueError(f"Schedule.recipe: step is {step}; expected 0, 1, ...")
        return next(recipe for start, recipe in reversed(self.phases) if start <= step)

    def apply(self, transform: Callable[[Recipe | Scalify], Callable]) -> Callable:
        """Returns a function ``(step, *args)`` that calls ``transform(recipe)`` of the step.

        A traced step compiles the programs of all phases; a Python integer only its own.
        """
        functions = [transform(recipe) for _, recipe in self.phases]

        def scheduled(step: int | jax.Array, *args: PyTree, **kwargs: PyTree) -> PyTree:
            number = is_array(step) and not np.ndim(step)
            if not number or not jnp.issubdtype(jnp.result_type(step), jnp.integer):
                raise TypeError(
                    "autoscale: with a Schedule the first argument is the step, an integer, not "
                    f"{shown(step)}"
                )
            if not isinstance(step, Tracer):
                self.recipe(int(step))  # fails for a step before the first
                return functions[bisect.bisect(self.starts, int(step)) - 1](*args, **kwargs)
            starts = np.asarray(self.starts, np.int32)
            phase = jnp.sum(step.astype(jnp.int32) >= starts, dtype=jnp.int32) - 1
            now = functions[0]
            with pure_call(lambda *args, **kwargs: now(*args, **kwargs), args, kwargs) as call:

                def branch(f: Callable) -> PyTree:
                    nonlocal now
                    now = f
                    return call.whole(call.f(*call.args, **call.kwargs))

                branches = [functools.partial(branch, f) for f in functions]
                return call.finish(lax.switch(phase, branches))

        return scheduled

    def _step(self, start: object) -> int:
        if isinstance(start, int | np.integer) and not isinstance(start, bool):
            return int(start)
        if not isinstance(start, float) or not 0 <= start < 1:
            raise ValueError(
                f"Schedule: a phase begins at {start!r}; expected a step, or a fraction of the "
                "steps from 0.0 to below 1.0"
            )
        if self.steps is None:
            raise ValueError(
                f"Schedule: a phase begins at the fraction {start}; expected steps, the number of "
                "steps of the run"
            )
        return int(np.ceil(round(start * self.steps, 6)))
