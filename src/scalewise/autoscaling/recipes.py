"""The recipes by name; ``dataclasses.replace`` derives others from them."""

from __future__ import annotations

from typing import Literal

from .._check import checked
from .._resolve import unknown
from ..formats import (
    BF16,
    E4M3FN,
    E5M2,
    FP32,
    MXFP4,
    MXFP8_E4M3,
    MXFP8_E5M2,
    BlockFormat,
)
from ..formats import NVFP4 as NVFP4_BLOCKS
from ..scaled import Amax, Delayed, Fixed, FourOverSix, MsEden, Mx, Quest, Unit
from ..scalifying import Scalify
from ._operand_settings import Operand, Products
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


def products_of(given: RecipeLike, where: str, what: str = "recipe") -> Recipe:
    """Returns a recipe of products; raises ValueError for settings of ``scalify``."""
    found = recipe(given)
    if isinstance(found, Scalify):
        raise ValueError(
            f"{where}: {what} is {given!r}, which rounds "
            "every result; expected a recipe of products, such as 'fp8'"
        )
    return found
