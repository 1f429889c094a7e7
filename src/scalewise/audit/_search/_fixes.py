"""Fixes: changes that might help a finding, each applied before the program runs again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...formats import BF16, E4M3, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, FP16, Format
from .._run._equation_statistics import Equations, EquationStatistics
from .._run._interpretations import TableEmulation
from .._run._loss_scale import best_power
from .._run._rounding import FP32_PARAMS, FP64_PARAMS, format_params, scale_params
from .._run._session import Outcome, Session
from ._findings import Finding, Group
from ._literals import Literal

RANGE = ("nan", "overflow", "saturation", "underflow")
SUBNORMAL = 0.01  # share of subnormal numbers from which a loss scale is tried
WIDER = {FP16: BF16, E4M3FN: E5M2, E4M3: E5M2, E4M3FNUZ: E5M2FNUZ}  # same width, more range


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a run may choose: a table of formats, and literals replaced (old, new)."""

    formats: np.ndarray
    constants: tuple[tuple[float, float], ...] = ()

    def run(self, session: Session) -> Outcome:
        return session.run(self.formats, dict(self.constants))

    def with_format(self, indices: Sequence[int], params: np.ndarray) -> Setting:
        formats = self.formats.copy()
        formats[list(indices)] = params
        return dataclasses.replace(self, formats=formats)

    def in_float32(self, indices: Sequence[int]) -> Setting:
        return self.with_format(indices, FP32_PARAMS)

    def scaled(self, indices: Sequence[int], power: int) -> Setting:
        formats = self.formats.copy()
        for index in indices:
            formats[index] = scale_params(formats[index], power)
        return dataclasses.replace(self, formats=formats)

    def with_constant(self, old: float, new: float) -> Setting:
        return dataclasses.replace(self, constants=(*self.constants, (old, new)))


@dataclasses.dataclass(frozen=True)
class Fix:
    """A change to a run.

    Attributes:
        words: what the user is told.
        change: returns a setting, or the interpretation of a policy or recipe, with the change.
        size: how many operations become float32, to order fixes of one finding; 0 if the change
            is of another kind.
        without: a narrower fix; this one is accepted only if that one is measurably worse.
        loss_scale: whether it is a loss scale.
    """

    words: str
    change: Callable[[Any], Any]
    size: int = 0
    without: Fix | None = None
    loss_scale: bool = False


def constant_fixes(literal: Literal, equations: Equations, fmt: Format) -> Iterator[Fix]:
    """Yields fixes for a constant that the format can't hold."""
    number, written = literal.number, literal.written
    replace = partial(Setting.with_constant, old=number)
    if literal.rounded == 0:
        new = math.copysign(float(fmt.smallest_normal), number)
        yield Fix(f"{new:.3g} in place of {written}", partial(replace, new=new))
    elif abs(number) > float(fmt.max):
        new = math.copysign(float(fmt.max) / 2, number)
        yield Fix(f"{new:.5g} in place of {written}", partial(replace, new=new))
    yield Fix(f"{written} kept in float32", partial(replace, new=number))
    here = (literal.file, literal.line)
    line = [e.index for e in equations if literal.file and (e.file, e.line) == here]
    if line:
        words = f"float32 for line {literal.line}, its {written} too"
        alone = Fix("", partial(Setting.in_float32, indices=line))
        yield Fix(words, lambda now: replace(now, new=number).in_float32(line), without=alone)


def loss_scale_fix(power: int, change: Callable[[Any], Any]) -> Fix:
    return Fix(f"loss scale 2^{power}", change, loss_scale=True)


def constant_finding(literal: Literal) -> Finding:
    """Returns the finding about a constant that the format can't hold, without a fix."""
    kinds = {"flushed to zero": "underflow", "becomes infinite": "overflow",
             "becomes NaN": "overflow", "saturates": "saturation"}  # fmt: skip
    error = abs(literal.rounded - literal.number) / abs(literal.number)
    return Finding(
        kind=kinds.get(literal.what, "precision"),
        file=literal.file,
        line=literal.line,
        function="",
        source=literal.source,
        primitive=literal.primitive,
        scope=literal.scope,
        direction=literal.direction,
        iteration=None,
        introduced=error,
        inherited=error,
        evidence=f"the constant {literal.written} {literal.what}",
    )


def fixes(
    group: Group,
    kind: str,
    equations: Equations,
    low: TableEmulation,
    norms: Sequence[tuple[int, ...]],
    gradients: Equations,
    final: bool,
) -> Iterator[Fix]:
    """Yields fixes for a finding of a run in one format, the smallest change first.

    Args:
        group: the finding's equations.
        kind: of the finding.
        equations: all of the program's.
        low: the emulation of the format.
        norms: the indices of each written-out norm's equations (see :func:`norms`).
        gradients: the equations that a loss scale multiplies.
        final: whether smaller fixes, and pairs of them, were tried, so that another format for the
            whole program may be.
    """
    here, fmt = group.first, low.fmt
    power = best_power(gradients, fmt) if may_need_loss_scale(group, kind) else 0
    if power:
        indices = [e.index for e in gradients]
        yield loss_scale_fix(power, partial(Setting.scaled, indices=indices, power=power))
    if kind in RANGE:
        yield from _range_fixes(group, low, norms)
    yielded: set[tuple[int, ...]] = set()
    optimizer = here.direction == "optimizer"
    for words, found in (
        (f"float32 for this {here.primitive}", list(group.equations)),
        (f"float32 for line {here.line}", _like(here, equations, "file", "line", "direction")),
        (f"float32 for line {here.line}, both ways", _like(here, equations, "file", "line")),
        (
            f"float32 for all of {here.function.rpartition('.')[2]}",
            _like(here, equations, "file", "function"),
        ),
        ("float32 for the optimizer", _like(here, equations, "direction") if optimizer else []),
    ):
        indices = tuple(e.index for e in found)
        located = here.file is not None or len(found) == len(group.equations)
        if indices and indices not in yielded and (located or optimizer):
            yielded.add(indices)
            yield Fix(words, partial(Setting.in_float32, indices=indices), len(indices))
    if final and kind in RANGE and fmt in WIDER:
        other = format_params(WIDER[fmt], low.saturate)
        words, everywhere = f"{WIDER[fmt].name} throughout", [e.index for e in equations]
        yield Fix(words, partial(Setting.with_format, indices=everywhere, params=other))


def may_need_loss_scale(group: Group, kind: str) -> bool:
    """Returns True if gradients here leave the format's range or are partly subnormal."""
    if group.first.direction != "backward":
        return False
    return kind in RANGE or group.share("subnormal") >= SUBNORMAL


def _range_fixes(group: Group, low: TableEmulation, norms) -> Iterator[Fix]:
    """Yields a norm that avoids overflow, a scale on the result, a format with more range."""
    here = group.first
    written = [indices for indices in norms if set(indices) & set(group.indices)]
    if written:
        # ops.l2_norm is within 0.05 ulp of an exact sum that is rounded once, at the root
        inner = [index for indices in written for index in indices[:-1]]
        words = "ops.l2_norm in place of the root of a sum of squares"
        yield Fix(words, partial(Setting.with_format, indices=inner, params=FP64_PARAMS))
    power = scale_power(group.equations, low.fmt)
    if power and here.file is not None:
        change = partial(Setting.scaled, indices=group.indices, power=power)
        yield Fix(f"scale its result by 2^{power}", change)
    if low.fmt in WIDER:
        other = format_params(WIDER[low.fmt], low.saturate)
        change = partial(Setting.with_format, indices=group.indices, params=other)
        yield Fix(f"{WIDER[low.fmt].name} for this {here.primitive}", change)


def _like(here: EquationStatistics, equations: Equations, *names: str) -> list[EquationStatistics]:
    return [e for e in equations if all(getattr(e, n) == getattr(here, n) for n in names)]


def scale_power(equations: Equations, fmt: Format) -> int:
    """Returns the exponent of the scale that puts the largest number a binade below overflow."""
    top = max((max(e["amax"], e["reference_max"]) for e in equations), default=0.0)
    return math.floor(math.log2(float(fmt.max) / top)) - 1 if top > 0 else 0
