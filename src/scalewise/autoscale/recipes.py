"""The recipes by name; ``dataclasses.replace`` makes a user's own of them."""

from __future__ import annotations

from typing import Any

from ..formats import BF16, E4M3FN, E5M2, FP16
from ._recipe import Recipe

fp16 = Recipe(forward=FP16, backward=FP16, storage=FP16)
bf16 = Recipe(forward=BF16, backward=BF16, storage=BF16)
fp8 = Recipe(forward=E4M3FN, backward=E5M2, storage=FP16)

CATALOGUE: dict[str, Recipe] = {"fp16": fp16, "bf16": bf16, "fp8": fp8}


def recipe(name: Any) -> Recipe:
    """A recipe by name, or the recipe itself.

    Raises:
        ValueError: no recipe has that name.
        TypeError: neither a name nor a recipe.
    """
    if isinstance(name, Recipe):
        return name
    if isinstance(name, str):
        if name in CATALOGUE:
            return CATALOGUE[name]
        raise ValueError(f"no recipe is called {name!r}: there are {', '.join(CATALOGUE)}")
    raise TypeError(
        f"a recipe is a scalewise.Recipe or one of the names {', '.join(CATALOGUE)}; "
        f"got a {type(name).__name__}: {name!r}"
    )
