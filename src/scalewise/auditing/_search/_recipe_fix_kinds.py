"""The kinds of fixes of a run under a policy or a recipe, in the order in which they are tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp

from ...autocasting import Autocast, Rule
from ...autoscaling import Boundaries, Recipe
from ...autoscaling.recipes import recipe as named
from ...devices import MatrixUnits
from ...formats import BF16, E4M3FN, E5M2, E8M0, FP16, FP32, BlockFormat, Format
from ...interpret import Interpretation
from ...scaled import Amax, Mx, shown
from ...scalifying import EveryOp, Scalify, scope_parts
from .._run._equation_statistics import Equations, is_ambiguous
from .._tape._loss_scale import LossScaled, autocast_of
from .._tape._specialize import nominal_format, of_recipe
from .._thresholds import FLOAT32_ERROR
from ._fix_kinds import like
from ._fixes import Context, Fix, register

OPERANDS = {E4M3FN: (E5M2, FP16), E5M2: (FP16,), FP16: (BF16,)}  # more range, or more bits
OTHER = {FP16: BF16, BF16: FP16}
# Sums in float32 after so many terms are those of DeepSeek-V3 (section 3.3).
ACCUMULATORS = (
    ("accumulators in float32", "result", "fp32"),
    ("promotion to float32 after 128 terms", "promote", 128),
)
EXACT_DEVICE = "b200"  # its FP8 units keep 25 fractional bits


def _undoes_everything(context: Context, affected: Equations) -> bool:
    rounded = {e.index for e in context.equations if e.introduced > FLOAT32_ERROR}
    return rounded <= {e.index for e in affected}


# -- policies -------------------------------------------------------------------------------------


@register("rule", "policy")
def _rule(context: Context) -> Iterator[Fix]:
    here = context.group.first
    bare = here.function.rpartition(".")[2]
    function = here.function if is_ambiguous(bare) else bare or None
    names = [{"primitive": here.primitive, "function": function}]
    names += [{"function": function}] if function is not None else []
    for size, own in enumerate(names, 1):
        alike = like(here, context.equations, *own)
        text = ", ".join(f"{name}={value!r}" for name, value in own.items())
        change = partial(_with_rule, rule=Rule("full", **own))
        undoes = _undoes_everything(context, alike)
        yield Fix(f"Rule('full', {text})", change, size, undoes=undoes)


@register("compute", "policy")
def _compute(context: Context) -> Iterator[Fix]:
    if context.kind.out_of_range and nominal_format(context.now) == FP16:
        yield Fix("c=bf16 in the policy", partial(_with_policy, compute=jnp.bfloat16))


def _with_rule(low: Autocast | LossScaled, rule: Rule) -> Autocast | LossScaled:
    return _with_policy(low, rules=(rule, *autocast_of(low).policy.rules))


def _with_policy(low: Autocast | LossScaled, **fields: Any) -> Autocast | LossScaled:
    own = autocast_of(low)
    own = dataclasses.replace(own, policy=dataclasses.replace(own.policy, **fields))
    return dataclasses.replace(low, low=own) if isinstance(low, LossScaled) else own


# -- recipes --------------------------------------------------------------------------------------


@register("matrix_units", "recipe")
def _matrix_units(context: Context) -> Iterator[Fix]:
    units = context.now.recipe.emulate
    overflows = context.kind.name == "overflow" and units and units.result == "fp16"
    if units is None or not (overflows or context.kind.name == "accumulation"):
        return
    for text, name, value in ACCUMULATORS:
        if getattr(units, name) != value:
            other = dataclasses.replace(units, **{name: value})
            own = f"emulate=MatrixUnits({units.device!r}, {name}={value!r})"
            yield _recipe(context, f"{text}, {own}", emulate=other)
    here = context.group.first
    change = partial(_with_exception, name=here.primitive, fmt=BF16)
    kept = like(here, context.equations, "primitive")
    yield Fix(f"keep={{{here.primitive!r}: BF16}} in the recipe", change, len(kept))
    if units.device != EXACT_DEVICE:
        other = MatrixUnits(EXACT_DEVICE)
        own = f"emulate=MatrixUnits({EXACT_DEVICE!r})"
        yield _recipe(context, f"a device that keeps more bits, {own}", emulate=other)


@register("scaling", "recipe")
def _scaling(context: Context) -> Iterator[Fix]:
    if context.now.recipe.products.scaling.source != "amax":
        yield _operand(context, scaling=Amax())


@register("rounding_of_scales", "recipe")
def _rounding_of_scales(context: Context) -> Iterator[Fix]:
    products = context.now.recipe.products
    own, fmt = products.scaling.of_blocks() or Mx(), products.formats()[0][0]
    powers = isinstance(fmt, BlockFormat) and fmt.scale == E8M0
    if (
        products.short_form is not None
        and powers
        and isinstance(own, Mx)
        and own.exponent not in ("ceil", "rceil")
    ):
        yield _operand(context, scaling=Mx("rceil"))


@register("keep", "recipe", "every_op")
def _keep(context: Context) -> Iterator[Fix]:
    here, fixes = context.group.first, []
    parts = scope_parts(here.scope)
    for name in dict.fromkeys((here.primitive, *parts[-1:], *parts[:1])):
        kept = [e for e in context.equations if name in (e.primitive, *scope_parts(e.scope))]
        change = partial(_with_exception, name=name)
        undoes = _undoes_everything(context, kept)
        fixes.append(
            Fix(f"keep={{{name!r}: FP32}} in the recipe", change, len(kept), undoes=undoes)
        )
    yield from sorted(fixes, key=lambda fix: fix.size)


@register("operands", "recipe")
def _operands(context: Context) -> Iterator[Fix]:
    backward = context.group.first.direction == "backward"
    if context.now.recipe.products.short_form is None:  # each operand has a format of its own
        return
    fmt = context.now.recipe.products.formats()[int(backward)][0]
    rounded = [
        e for e in context.equations if e["operands"] and backward <= (e.direction == "backward")
    ]
    for other in OPERANDS.get(fmt, ()) if isinstance(fmt, Format) else (FP16,) if fmt else ():
        fix = _operand(context, **{"backward" if backward else "forward": other})
        yield dataclasses.replace(fix, size=len(rounded))


@register("arithmetic", "every_op")
def _arithmetic(context: Context) -> Iterator[Fix]:
    if context.now.recipe.arithmetic != "float32":
        yield _result(context, arithmetic="float32")


@register("rescale", "every_op")
def _rescale(context: Context) -> Iterator[Fix]:
    for measure in ("max", "l2"):
        if context.now.recipe.rescale != measure:
            yield _result(context, rescale=measure)


@register("residuals", "recipe", "every_op")
def _residuals(context: Context) -> Iterator[Fix]:
    recipe = context.now.recipe
    every = isinstance(recipe, Scalify)
    other = OTHER.get(recipe.format if every else recipe.residuals)
    if other is None:
        return
    if every:
        yield _result(context, format=other)
    else:
        yield _recipe(context, f"residuals={other.name}", residuals=other)


@register("results", "every_op")
def _results(context: Context) -> Iterator[Fix]:
    recipe = context.now.recipe
    if not recipe.keep:  # an exception for results may not apply without them
        name = recipe.format.name
        plain = dataclasses.replace(named(name), state=recipe.state)
        yield Fix(f"autoscale under {name!r} in place of scalify", partial(_of, recipe=plain))


def _operand(context: Context, **changes: Any) -> Fix:
    products = context.now.recipe.with_operands(**changes).products
    ((name, value),) = changes.items()
    return _recipe(context, f"{name}={_text(value)} of products", products=products)


def _result(context: Context, **changes: Any) -> Fix:
    ((name, value),) = changes.items()
    return Fix(f"{name}={_text(value)} of scalify", partial(_with_fields, **changes))


def _text(value: object) -> str:
    return value.name if isinstance(value, Format) else shown(value)


def _recipe(context: Context, text: str, **fields: Any) -> Fix:
    return Fix(f"{text} in the recipe", partial(_with_fields, **fields))


def _of(low: EveryOp, recipe: Recipe | Scalify) -> Interpretation:
    return of_recipe(recipe)


def _with_fields(low: Boundaries | EveryOp, **fields: Any) -> Interpretation:
    return of_recipe(dataclasses.replace(low.recipe, **fields))


def _with_exception(low: Boundaries | EveryOp, name: str, fmt: Format = FP32) -> Interpretation:
    return _with_fields(low, keep=((name, fmt), *low.recipe.keep))
