"""The recipes by name; ``dataclasses.replace`` derives others from them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from .._check import checked, shown
from .._resolve import unknown
from ..devices import MatrixUnits
from ..formats import (
    BF16,
    BLOCK_FORMATS,
    E4M3FN,
    E5M2,
    FP32,
    MXFP4,
    MXFP8_E4M3,
    MXFP8_E5M2,
    BlockFormat,
    Format,
)
from ..formats import CATALOGUE as FORMATS
from ..formats import NVFP4 as NVFP4_BLOCKS
from ..scaled import SCALINGS, Amax, Delayed, Fixed, FourOverSix, MsEden, Mx, Quest, Storage, Unit
from ..scalifying import Scalify
from ._operand_settings import Attention, Operand, Products
from ._recipe import Recipe, RecipeLike


def _two_ways(
    forward: Operand, backward: Operand, source: Literal["original", "forward"] = "forward"
) -> Products:
    """Returns products whose forward operands are rounded alike, and whose backward ones are."""
    return Products((forward, forward), (backward, backward), (backward, backward), source)


fp16 = Recipe()
bf16 = Recipe(Products.short(BF16, BF16), residuals=BF16)
# Current scaling, each operand's scale from its own largest magnitude: automatic bias selection
# (FP8-AMAX, arXiv 2309.17224), since a power of two is another exponent bias.
fp8 = Recipe(Products.short(E4M3FN, E5M2))
fp8_current = fp8
# Scales from the largest magnitudes of the last 16 steps, a history that is explicit state
# ("FP8 Formats for Deep Learning", arXiv 2209.05433).
fp8_delayed = Recipe(Products.short(E4M3FN, E5M2, scaling=Delayed(history=16)))
# A scale for each row of each operand, the smallest power of two with which nothing saturates,
# E4M3 throughout; with the weight gradient's product wide (torchao's recipes of these names).
UP = Mx("rceil")
fp8_rowwise = Recipe(Products.short(E4M3FN, E4M3FN, scaling=UP, per="channel"))
_row = Operand(E4M3FN, UP, per="channel")
fp8_rowwise_gw_hp = Recipe(
    Products(
        forward=(_row, _row),
        input_gradient=(_row, Operand(E4M3FN, UP)),
        weight_gradient=(None, None),
    ),
)
# 1 x 128 blocks of activations and gradients, 128 x 128 blocks of weights, E4M3 throughout, float32
# scales (DeepSeek-V3, arXiv 2412.19437).
FP8_BLOCKS = BlockFormat("e4m3fn_blocks_of_128", E4M3FN, scale=FP32, size=128)
_part, _square = Operand(FP8_BLOCKS), Operand(FP8_BLOCKS, tile=128)
fp8_blockwise = Recipe(
    Products(
        forward=(_part, _square), input_gradient=(_part, _square), weight_gradient=(_part, _part)
    ),
)
# OCP Microscaling: a scale for each 32 elements along the contracted axis, E4M3 both ways, or E5M2
# for gradients. The scale is rounded up ("Recipes for Pre-training LLMs with MXFP8", arXiv
# 2506.08027), under mxfp8_floor down, as OCP's specification says.
mxfp8 = Recipe(Products.short(MXFP8_E4M3, MXFP8_E4M3, scaling=UP))
mxfp8_hybrid = Recipe(Products.short(MXFP8_E4M3, MXFP8_E5M2, scaling=UP))
mxfp8_floor = Recipe(Products.short(MXFP8_E4M3, MXFP8_E4M3))
# MXFP4 forward and MXFP8 with a gradient, as OCP defines both: no published training method.
mxfp4_forward = Recipe(Products.short(MXFP4, MXFP8_E4M3))
# 16 x 16 blocks of weights, gradients rounded stochastically, a random Hadamard transform of the
# weight gradient's operands ("Pretraining Large Language Models with NVFP4", arXiv 2509.25149).
_near, _block = Operand(NVFP4_BLOCKS), Operand(NVFP4_BLOCKS, tile=16)
nvfp4 = Recipe(
    Products(
        forward=(_near, _block),
        input_gradient=(Operand(NVFP4_BLOCKS, rounding="stochastic"), _block),
        weight_gradient=(
            Operand(NVFP4_BLOCKS, hadamard=16),
            Operand(NVFP4_BLOCKS, hadamard=16, rounding="stochastic"),
        ),
    ),
)
# Blocks along the contracted axis alone, and stochastic rounding of gradients and of the weight
# gradient's activations ("FP4 All the Way", arXiv 2505.19115).
_random = Operand(NVFP4_BLOCKS, rounding="stochastic")
fp4_all_the_way = Recipe(
    Products(
        forward=(_near, _near),
        input_gradient=(_random, _near),
        weight_gradient=(_random, _random),
    ),
)
# BF16 forward, MXFP4 backward, both of whose operands are transformed and rounded stochastically
# ("Training LLMs with MXFP4", arXiv 2502.20586; scales rounded up in place of its factor of 3/4).
_mixed = Operand(MXFP4, UP, rounding="stochastic", hadamard=64, signs="random")
mxfp4 = Recipe(_two_ways(Operand(BF16), _mixed, "original"), residuals=BF16)
# Forward nearest with scales to 6 or 4; backward MS-EDEN, after a Hadamard transform of 128 whose
# signs are new for each product ("Quartet II", arXiv 2601.22813; its kernels' default is 4/6).
_best = Operand(NVFP4_BLOCKS, FourOverSix())
_eden = Operand(NVFP4_BLOCKS, MsEden(), hadamard=128, signs="random")
quartet2 = Recipe(_two_ways(_best, _eden))
# Forward nearest after a Hadamard transform of 32, scales from the standard deviation (QuEST);
# backward stochastic after a transform with new signs ("Quartet", arXiv 2505.14669).
_quest = Operand(MXFP4, Quest(), hadamard=32)
_mixed_32 = Operand(MXFP4, UP, rounding="stochastic", hadamard=32, signs="random")
quartet = Recipe(_two_ways(_quest, _mixed_32))
# Forward nearest, backward stochastic after a Hadamard transform of 16 with new signs, whose scales
# have a margin to be rounded down ("TetraJet-v2", arXiv 2510.27527, without its resets of weights
# and its outlier channels).
_unbiased = Operand(
    NVFP4_BLOCKS, Amax(False, 17 / 16), rounding="stochastic", hadamard=16, signs="random"
)
tetrajet2 = Recipe(_two_ways(_near, _unbiased))
# Scales predicted from shapes, without a pass over the data (arXiv 2303.11257).
unit_scaling = Recipe(Products.short(E4M3FN, E5M2, scaling=Unit()))
# No scales at all, for programs of unit variance (scalewise.training.mu_s; arXiv 2502.05967).
mu_s = Recipe(Products.short(E4M3FN, E5M2, scaling=Fixed()))
# Every result rounded to FP16 with a scale of its own: found from the data, or propagated
# (Scalify, arXiv 2407.17353).
fp16_every_op = Scalify(rescale="max")
scalify = Scalify()

# each recipe above, by the name that it has there
CATALOGUE: dict[str, Recipe | Scalify] = {
    n: x for n, x in globals().items() if isinstance(x, Recipe | Scalify)
}


@checked
def recipe(name: RecipeLike | str) -> Recipe | Scalify:
    """Returns a recipe by name, or the recipe itself.

    Raises:
        ValueError: no recipe has that name.
        TypeError: neither a name nor a recipe.
    """
    if not isinstance(name, str):
        return name
    if found := CATALOGUE.get(name.replace("-", "_")):
        return found
    raise ValueError(unknown(name, "recipe", where="recipe"))


def products_of(given: RecipeLike, where: str) -> Recipe:
    """Returns a recipe of products; raises ValueError for settings of ``scalify``."""
    found = recipe(given)
    if isinstance(found, Scalify):
        raise ValueError(
            f"{where}: recipe is {given!r}, which rounds "
            "every result; expected a recipe of products, such as 'fp8'"
        )
    return found


# what a recipe consists of, besides other recipes, numbers, texts and lists
_PARTS = {
    kind.__name__: kind
    for kind in (
        Attention, BlockFormat, Format, MatrixUnits, Operand, Products, Storage, *SCALINGS.values()
    )
}  # fmt: skip


@checked
def to_dict(given: RecipeLike) -> dict[str, Any]:
    """Returns a recipe as data that JSON and YAML hold: a recipe's name, and what differs.

    Values are numbers, texts, lists, and dicts with one key, the name of a class:
    ``{"Operand": {"format": "e4m3fn"}}``. :func:`from_dict` returns an equal recipe.

    Example:
        >>> import dataclasses, scalewise as sw
        >>> own = dataclasses.replace(sw.recipes.mxfp8, keep={"head": "bf16"})
        >>> sw.recipes.to_dict(own)
        {'recipe': 'mxfp8', 'keep': [['head', 'bf16']]}
    """
    return _as_data(recipe(given))


@checked
def from_dict(data: Mapping[str, Any]) -> Recipe | Scalify:
    """Returns the recipe of :func:`to_dict`, or of a dict in a config written by hand.

    Example:
        >>> import scalewise as sw
        >>> sw.recipes.from_dict({"recipe": "fp8", "keep": {"head": "bf16"}})
        Recipe(products=Products.short('e4m3fn', 'e5m2'), keep=(('head', 'bf16'),))
    """
    found = _from_data(data)
    if not isinstance(found, Recipe | Scalify):
        raise ValueError(f"from_dict: {shown(data)} is no recipe; expected {{'recipe': name, ...}}")
    return found


def _as_data(x: Any) -> Any:
    if isinstance(x, Recipe | Scalify):
        bases = [(_changes(x, b), n) for n, b in CATALOGUE.items() if type(b) is type(x)]
        changes, name = min(bases, key=lambda pair: len(pair[0]))
        return {"recipe": name} | changes
    if isinstance(x, Format | BlockFormat) and {**FORMATS, **BLOCK_FORMATS}.get(x.name) == x:
        return x.name
    if isinstance(x, re.Pattern):
        return {"Pattern": x.pattern}
    if dataclasses.is_dataclass(x):
        return {type(x).__name__: _changes(x, None)}
    return [_as_data(item) for item in x] if isinstance(x, tuple) else x


def _changes(x: Any, base: Any) -> dict[str, Any]:
    """Returns the fields of an instance that differ from another's, or from the defaults."""
    values = {f.name: (getattr(x, f.name), f.default) for f in dataclasses.fields(x)}
    return {
        name: _as_data(value)
        for name, (value, default) in values.items()
        if value != (default if base is None else getattr(base, name))
    }


def _from_data(data: Any) -> Any:
    if isinstance(data, list | tuple):
        return tuple(map(_from_data, data))
    if not isinstance(data, Mapping):
        return data
    if "recipe" in data:
        fields = {name: _from_data(x) for name, x in data.items() if name != "recipe"}
        return dataclasses.replace(recipe(data["recipe"]), **fields)
    if len(data) == 1:
        ((name, value),) = data.items()
        if name == "Pattern":
            return re.compile(value)
        if name in _PARTS and isinstance(value, Mapping):
            return _PARTS[name](**{field: _from_data(x) for field, x in value.items()})
    return {key: _from_data(x) for key, x in data.items()}
