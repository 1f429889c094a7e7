"""The recipes by name; ``dataclasses.replace`` derives others from them."""

from __future__ import annotations

from typing import Any

from .._resolve import unknown
from ..formats import BF16, E4M3FN, E5M2, FP16, MXFP4, MXFP8_E4M3
from ..scaled import Delayed, Unit
from ._recipe import Recipe

fp16 = Recipe(forward=FP16, backward=FP16, storage=FP16)
bf16 = Recipe(forward=BF16, backward=BF16, storage=BF16)
# Current scaling, each operand's scale from its own largest magnitude: automatic bias selection
# (FP8-AMAX, arXiv 2309.17224), since a power of two is another exponent bias.
fp8 = Recipe(forward=E4M3FN, backward=E5M2, storage=FP16)
# Scales from the largest magnitudes of the last 16 steps, a history that is explicit state
# ("FP8 Formats for Deep Learning", arXiv 2209.05433).
fp8_delayed = Recipe(forward=E4M3FN, backward=E5M2, storage=FP16, scaling=Delayed(history=16))
# OCP Microscaling: a scale for each 32 elements along the contracted axis, E4M3 both ways
# ("Recipes for Pre-training LLMs with MXFP8", arXiv 2506.08027).
mxfp8 = Recipe(forward=MXFP8_E4M3, backward=MXFP8_E4M3, storage=FP16)
mxfp4 = Recipe(forward=MXFP4, backward=MXFP8_E4M3, storage=FP16)
# Scales predicted from shapes, without a pass over the data (arXiv 2303.11257).
unit_scaling = Recipe(forward=E4M3FN, backward=E5M2, storage=FP16, scaling=Unit())
# Every result rounded to FP16 with a scale of its own: found from the data, or propagated
# (Scalify, arXiv 2407.17353).
fp16_every_op = Recipe(store="every_op", storage=FP16, rescale="max")
scalify = Recipe(store="every_op", storage=FP16)

# each recipe above, by the name that it has there
CATALOGUE: dict[str, Recipe] = {n: x for n, x in globals().items() if isinstance(x, Recipe)}


def recipe(name: Any) -> Recipe:
    """Returns a recipe by name, or the recipe itself.

    Raises:
        ValueError: no recipe has that name.
        TypeError: neither a name nor a recipe.
    """
    if isinstance(name, Recipe):
        return name
    if isinstance(name, str):
        if name in CATALOGUE:
            return CATALOGUE[name]
        raise ValueError(unknown(name, "recipe", where="recipe"))
    raise TypeError(
        f"a recipe is a scalewise.Recipe or one of the names {', '.join(CATALOGUE)}; "
        f"got a {type(name).__name__}: {name!r}"
    )
