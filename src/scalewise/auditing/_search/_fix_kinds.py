"""The kinds of fixes of a run in one format, in the order in which a search tries them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from functools import partial

import jax.numpy as jnp

from ..._jax import ShapedArray
from ...autocasting import Autocast
from ...formats import Format
from ...primitives import Family, names
from ...rounding import FP64_PARAMS
from .._run._equation_statistics import Equations, EquationStatistics
from .._run._histograms import best_power
from .._tape._loss_scale import LossScaled, autocast_of
from .._tape._specialize import nominal_format
from .._thresholds import FEW_MASKS, SUBNORMAL
from ._apply import FormatChoice
from ._fixes import Context, Fix, both, described, joined, register, widened
from ._literals import Literal, written
from ._rewrites import Rewrite

COMPARISONS = names(lambda row: row.family is Family.COMPARISON)
L2_NORM = "ops.l2_norm"
PRODUCTS = ("reduce_prod", "cumprod")


# -- a constant that the format can't hold --------------------------------------------------------


@register("constant", "constant")
def _constant(context: Context) -> Iterator[Fix]:
    literal, fmt = context.literal, context.fmt
    assert literal is not None
    number = literal.number
    replace = partial(FormatChoice.with_constant, old=number)
    if literal.rounded == 0:
        new = math.copysign(float(fmt.smallest_normal), number)
        change = partial(replace, new=new)
        yield Fix(f"{new:.3g} in place of {literal.written}", change, replaces=(number, new))
    elif abs(number) > float(fmt.max) and _may_be_smaller(context):
        yield from _smaller_masks(number, fmt)
    kept = kept_in(context.word, literal)
    yield kept
    here = (literal.file, literal.line)
    line = [e for e in context.equations if literal.file and (e.file, e.line) == here]
    if line:
        wide = widened(context.word, described(line, line), line)  # its literals are wide too
        if len(context.places) == 1:  # those of a comparison or a maximum as well
            wide = dataclasses.replace(wide, change=both(wide, kept).change)
        yield wide
        alike = [e for e in context.equations if (e.file, e.line) in context.places]
        if len(alike) > len(line):
            yield widened(context.word, described(alike, alike), alike)


def kept_in(word: str, literal: Literal) -> Fix:
    number = literal.number
    change = partial(FormatChoice.with_constant, old=number, new=number)
    return Fix(f"{literal.written} kept in {word}", change, replaces=(number, number), word=word)


def _may_be_smaller(context: Context) -> bool:
    """Returns whether another large number may take a constant's place: that of a mask, unlike a
    threshold or a factor of small numbers (a mask's are 0 and 1)."""
    literal = context.literal
    assert literal is not None
    if literal.primitive != "mul":
        return literal.primitive not in COMPARISONS
    place = literal.file, literal.line, "mul"
    here = [e for e in context.equations if (e.file, e.line, e.primitive) == place]
    largest = max((e["reference_max"] for e in here), default=0.0)
    return not 0 < largest < abs(literal.number) / 2


def _smaller_masks(number: float, fmt: Format) -> Iterator[Fix]:
    for part in (2, 8):
        new = math.copysign(float(fmt.max) / part, number)
        change = partial(FormatChoice.with_constant, old=number, new=new)
        yield Fix(f"{new:.5g} in place of {written(number)}", change, replaces=(number, new))


# -- one format -----------------------------------------------------------------------------------


@register("masks", "format")
def _masks(context: Context) -> Iterator[Fix]:
    largest = max((e["amax"] for e in context.group.equations), default=0.0)
    for number in context.masks if context.kind.name == "overflow" else ():
        if largest <= FEW_MASKS * abs(number):
            yield from _smaller_masks(number, context.fmt)


@register("loss_scale", "format", "policy")
def _loss_scale(context: Context) -> Iterator[Fix]:
    group, now = context.group, context.now
    needed = context.kind.out_of_range or group.share("subnormal") >= SUBNORMAL
    if group.first.direction != "backward" or not needed or isinstance(now, LossScaled):
        return
    fmt = nominal_format(context.low if isinstance(now, FormatChoice) else now)
    power = best_power(context.gradients, fmt, _seed_exponent(context, fmt))
    if isinstance(now, FormatChoice):
        indices = [e.index for e in context.gradients]
        change = partial(FormatChoice.scaled, indices=indices, power=power)
    else:
        change = partial(_with_loss_scale, power=power)
    if power:
        yield Fix(f"loss scale 2^{power}", change, power=power)


def _seed_exponent(context: Context, fmt: Format) -> float:
    """The loss's own gradient is the scale. Under a policy, losses are computed in float32."""
    if not isinstance(context.now, FormatChoice):
        return math.inf
    first = min(context.gradients, key=lambda e: e.index, default=None)
    if first is None:
        return math.inf
    aval = ShapedArray(first.shape, jnp.dtype(first.dtype))
    return fmt.max_exponent if context.emulation.is_low(aval) else math.inf


def _with_loss_scale(low: Autocast | LossScaled, power: int) -> LossScaled:
    return LossScaled(autocast_of(low), power)


@register("norm", "format")
def _norm(context: Context) -> Iterator[Fix]:
    here = [n for n in context.norms if set(n) & set(context.group.indices)]
    if not context.kind.out_of_range or not here:
        return
    for some, text in ((here, "the root"), (context.norms, "each root")):
        # ops.l2_norm is within 0.05 ulp of an exact sum that is rounded once, at the root
        if some is here or len(some) > len(here):
            inner = [index for indices in some for index in indices[:-1]]
            change = partial(FormatChoice.with_format, indices=inner, params=FP64_PARAMS)
            text, everywhere = f"{L2_NORM} in place of {text} of a sum of squares", some is not here
            yield Fix(text, change, better=(L2_NORM,), everywhere=everywhere)


@register("logarithm", "format")
def _logarithm(context: Context) -> Iterator[Fix]:
    """Of a product that float32 doesn't hold either."""
    group, needed = context.group, context.word == "float64" and context.kind.out_of_range
    product = group.first.primitive in PRODUCTS or (
        group.first.primitive == "mul" and _reads_itself(context, {"mul"})
    )
    if needed and product:
        change = partial(FormatChoice.with_format, indices=group.indices, params=FP64_PARAMS)
        better = ("sum(log(x))",)
        yield Fix(f"{better[0]} in place of prod(x), kept as a logarithm", change, better=better)


@register("rewrite", "format")
def _rewrite(context: Context) -> Iterator[Fix]:
    group = context.group
    own = set(group.indices)
    equations = {e.index: e for e in context.equations}
    found: dict[str, list[Rewrite]] = {}
    known = [x for x in context.rewrites if x.root in equations and not _overflows(x, context)]
    for rewrite in known:
        found.setdefault(rewrite.text, []).append(rewrite)
    for alike in sorted(found.values(), key=lambda own: -len(own[0].inner)):
        written = [x for x in alike if own & {*x.inner, x.root}]
        places = {(equations[x.root].file, equations[x.root].line) for x in written}
        # an expression of a function that is called twice is one
        line = [x for x in alike if (equations[x.root].file, equations[x.root].line) in places]
        for some in (line, alike) if len(alike) > len(line) else (line,):
            if written:
                yield _rewritten(some, known, everywhere=some is not line)


def _overflows(rewrite: Rewrite, context: Context) -> bool:
    """Returns whether a sum of exponentials exceeds the format divided by the largest one, too."""
    inner = [e for e in context.equations if e.index in rewrite.inner]
    total, largest = (
        max((e["amax"] for e in inner if e.primitive == name), default=0.0)
        for name in ("reduce_sum", "exp")
    )
    return largest > 0 and total > float(context.fmt.max) * largest


def _rewritten(some: Sequence[Rewrite], known: Sequence[Rewrite], *, everywhere: bool) -> Fix:
    """Returns the fix of some expressions, and of those that share operations with them, whose
    results it doesn't round either."""
    inner = {i for x in some for i in x.inner}
    others = [x for x in known if x not in some and inner & {*x.inner} and x.root not in inner]
    inner |= {i for x in others for i in x.inner}
    every = [*some, *others]
    texts = [x.partition(" in place of ") for x in dict.fromkeys(x.text for x in every)]
    better, _, worse = (tuple(own) for own in zip(*texts, strict=True))
    return Fix(
        f"{joined(better)} in place of {joined(worse)}{', everywhere' * everywhere}",
        partial(FormatChoice.with_format, indices=sorted(inner), params=FP64_PARAMS),
        better=better,
        everywhere=everywhere,
        rewrites=tuple(sorted(inner | {x.root for x in every})),
    )


def _reads_itself(context: Context, primitives: Collection[str]) -> bool:
    """Returns True if an operation has its own result of the iteration before as an operand."""
    operands = context.causes.operands if context.causes is not None else {}
    looped = [e.index for e in context.group.equations if e.looped and e.primitive in primitives]
    return any(i in operand for i in looped for operand in operands.get(i, ()))


@register("float32_addition", "lost_updates")
def _float32_addition(context: Context) -> Iterator[Fix]:
    here, found = context.group.first, context.group.equations
    text = f"this {here.primitive}, its result kept in {context.word}"
    yield widened(context.word, text, found)
    line = like(here, context.equations, "file", "line", "direction")
    if here.file and len(line) > len(found):
        yield widened(context.word, f"line {here.line}, its result kept in {context.word}", line)
    if here.direction == "optimizer":  # what is added may be wrong too
        yield widened(context.word, "the optimizer", like(here, context.equations, "direction"))


def like(here: EquationStatistics, equations: Equations, *names: str) -> list[EquationStatistics]:
    return [e for e in equations if all(getattr(e, n) == getattr(here, n) for n in names)]
