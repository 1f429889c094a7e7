"""The recipes of the training comparison: all by name, and variants that lack one part."""

import dataclasses
from collections.abc import Callable

import scalewise as sw
from scalewise import Recipe, training
from scalewise.autoscaling import Operand
from scalewise.devices import MatrixUnits
from scalewise.formats import E8M0

CHANCE = "float32, moved"  # float32 from parameters that differ by less than FP16's spacing
_ALIASES = ("fp8_current",)
_PROGRAMS_OWN = ("mu_s",)  # a program of unit variance is its condition
RECIPES = (
    "float32",
    CHANCE,
    *(name for name in sw.recipes.CATALOGUE if name not in _ALIASES + _PROGRAMS_OWN),
)
STATES = tuple(f"state-{name}" for name in training.STATES)
TARGETS = ("float32", CHANCE, "bf16", "mxfp8", "nvfp4", "quartet2")
LONG = ("float32", CHANCE, "bf16", "fp8", "fp8_blockwise", "mxfp8", "nvfp4")


def each(recipe: Recipe, change: Callable[[Operand], Operand]) -> Recipe:
    """Returns a recipe whose operands are all changed alike."""
    assert recipe.products is not None

    def pair(operands):
        return tuple(x and change(x) for x in operands)

    fields = ("forward", "input_gradient", "weight_gradient")
    return recipe.with_products(**{name: pair(getattr(recipe.products, name)) for name in fields})


def with_headroom(recipe: sw.Recipe) -> sw.Recipe:
    """Returns a recipe with a margin of 17/16 in the scales of blocks that are drawn.

    A block scale in E4M3 that is rounded down saturates its block's largest numbers, by up to 1/17,
    which no random draw makes up for. MS-EDEN's operands are rounded stochastically instead.
    """

    def wider(x: Operand) -> Operand:
        if not x.draws or x.per_tensor or getattr(x.format, "scale", E8M0) == E8M0:
            return x
        return dataclasses.replace(x, scaling=sw.Amax(False, 17 / 16), rounding="stochastic")

    return each(recipe, wider)


def _nearest(x: Operand) -> Operand:
    return dataclasses.replace(x, rounding="nearest_even")


def _untransformed(x: Operand) -> Operand:
    return dataclasses.replace(x, hadamard=0, signs="fixed")


def _one_row(x: Operand) -> Operand:
    return dataclasses.replace(x, tile=1)


def _four_over_six(x: Operand) -> Operand:
    near = x.rounding == "nearest_even" and x.tile == 1 and x.hadamard == 0
    return dataclasses.replace(x, scaling=sw.FourOverSix()) if near else x


def _six(x: Operand) -> Operand:
    return dataclasses.replace(x, scaling=sw.Amax()) if x.scaling == sw.FourOverSix() else x


def _floor(x: Operand) -> Operand:
    return dataclasses.replace(x, scaling=sw.Mx("floor")) if x.scaling == sw.Mx("rceil") else x


# by the recipe's name, and what is different
ABLATIONS: dict[str, Recipe] = {
    "fp8, E4M3 gradients": sw.recipes.fp8.with_operands(backward="e4m3fn"),
    "fp8, E5M2 throughout": sw.recipes.fp8.with_operands(forward="e5m2"),
    "fp8_blockwise, 1 x 128 weights": each(sw.recipes.fp8_blockwise, _one_row),
    "nvfp4, no Hadamard": each(sw.recipes.nvfp4, _untransformed),
    "nvfp4, nearest gradients": each(sw.recipes.nvfp4, _nearest),
    "nvfp4, 1 x 16 weights": each(sw.recipes.nvfp4, _one_row),
    "nvfp4, 4/6": each(sw.recipes.nvfp4, _four_over_six),
    "nvfp4, headroom": with_headroom(sw.recipes.nvfp4),
    "nvfp4, last block and head in BF16": dataclasses.replace(
        sw.recipes.nvfp4, keep={"block_1": "bf16", "head": "bf16"}
    ),
    "fp4_all_the_way, headroom": with_headroom(sw.recipes.fp4_all_the_way),
    "quartet2, no 4/6": each(sw.recipes.quartet2, _six),
    # what headroom makes of MS-EDEN
    "quartet2, stochastic rounding": with_headroom(sw.recipes.quartet2),
    "quartet2, from the original": sw.recipes.quartet2.with_products(backward_from="original"),
    "quartet, nearest gradients": each(sw.recipes.quartet, _nearest),
    "quartet, no Hadamard": each(sw.recipes.quartet, _untransformed),
    "mxfp4, nearest": each(sw.recipes.mxfp4, _nearest),
    "mxfp4, no Hadamard": each(sw.recipes.mxfp4, _untransformed),
    "mxfp4, scales rounded down": each(sw.recipes.mxfp4, _floor),
}

# FP8, whose products a device's matrix units add
DEVICES: dict[str, Recipe] = {
    f"fp8, {name}": dataclasses.replace(sw.recipes.fp8, emulate=units)
    for name, units in (
        ("H100's fast accumulation", "h100"),
        ("H100's promotion after 128 terms", MatrixUnits("h100", promote=128)),
        ("B200", "b200"),
    )
}
VARIANTS = ABLATIONS | DEVICES

# an optimizer's state of which one moment stays in float32
STATE_ABLATIONS = {
    f"state-adam4bit, {which} moment alone": {moment: training.STATES["adam4bit"][moment]}
    for which, moment in (("first", r"\.mu\b"), ("second", r"\.nu\b"))
}
