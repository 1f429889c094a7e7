"""Changes that might help, each applied and the program run again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...formats import BF16, E4M3, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, FP16, Format
from .._run._lanes import Rounded
from .._run._loss_scale import best_power
from .._run._rounding import DOUBLE, SINGLE, as_row, scaled
from .._run._rows import Row
from .._run._session import Outcome, Session
from ._findings import Finding, Group
from ._literals import Literal

RANGE = ("nan", "overflow", "saturation", "underflow")
SUBNORMAL = 0.01  # share from which a result lies too low
WIDER = {FP16: BF16, E4M3FN: E5M2, E4M3: E5M2, E4M3FNUZ: E5M2FNUZ}  # as many bits, more range


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a run is given: a table of formats, and literals replaced."""

    formats: np.ndarray
    constants: tuple[tuple[float, float], ...] = ()

    def run(self, session: Session) -> Outcome:
        return session.run(self.formats, dict(self.constants))

    def into(self, rows: Sequence[int], row: np.ndarray) -> Setting:
        formats = self.formats.copy()
        formats[list(rows)] = row
        return dataclasses.replace(self, formats=formats)

    def wide(self, rows: Sequence[int]) -> Setting:
        return self.into(rows, SINGLE)

    def shifted(self, rows: Sequence[int], power: int) -> Setting:
        formats = self.formats.copy()
        for row in rows:
            formats[row] = scaled(formats[row], power)
        return dataclasses.replace(self, formats=formats)

    def replaced(self, old: float, new: float) -> Setting:
        return dataclasses.replace(self, constants=(*self.constants, (old, new)))


@dataclasses.dataclass(frozen=True)
class Fix:
    """A change, in words and done.

    Attributes:
        words: as the user is told.
        change: from a setting, or a lane of a policy or recipe, to the one with the change.
        size: how much becomes float32 by it, to compare with others for the same finding; 0 if it
            does something else.
        without: less than it, which has to help less: or else the rest is none of its merit.
    """

    words: str
    change: Callable[[Any], Any]
    size: int = 0
    without: Fix | None = None


def constant_fixes(literal: Literal, rows: Sequence[Row], fmt: Format) -> Iterator[Fix]:
    """Changes worth trying for a constant that the format can't hold."""
    number = literal.number
    if literal.rounded == 0:
        new = math.copysign(float(fmt.smallest_normal), number)
        yield _replaced(f"{new:.3g} in place of {literal.written}", number, new)
    elif abs(number) > float(fmt.max):
        new = math.copysign(float(fmt.max) / 2, number)
        yield _replaced(f"{new:.5g} in place of {literal.written}", number, new)
    yield _replaced(f"{literal.written} kept in float32", number, number)
    here = (literal.file, literal.line)
    line = [r.index for r in rows if literal.file and (r.file, r.line) == here]
    if line:
        words = f"float32 for line {literal.line}, its {literal.written} too"
        both, alone = (lambda now: now.replaced(number, number).wide(line)), _wide("", line)
        yield Fix(words, both, without=alone)


def _replaced(words: str, old: float, new: float) -> Fix:
    return Fix(words, lambda now: now.replaced(old, new))


def _wide(words: str, rows: Sequence[int]) -> Fix:
    return Fix(words, lambda now: now.wide(rows), len(rows))


def _shifted(words: str, rows: Sequence[int], power: int) -> Fix:
    return Fix(words, lambda now: now.shifted(rows, power))


def _into(words: str, rows: Sequence[int], row: np.ndarray) -> Fix:
    return Fix(words, lambda now: now.into(rows, row))


def constant_finding(literal: Literal) -> Finding:
    """What a constant does, without a fix yet."""
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
    rows: Sequence[Row],
    low: Rounded,
    norms: Sequence[tuple[int, ...]],
    gradients: Sequence[Row],
    last: bool,
) -> Iterator[Fix]:
    """Changes worth trying for a finding, the smallest first.

    Args:
        group: what it is about.
        kind: of the finding.
        rows: all of the program's.
        low: the lane.
        norms: the rows of norms that are written out.
        gradients: the rows that a loss scale multiplies.
        last: whether all smaller changes, and pairs of them, have been tried.
    """
    here, fmt = group.first, low.fmt
    power = best_power(gradients, fmt) if narrow_gradients(group, kind) else 0
    if power:
        yield _shifted(f"loss scale 2^{power}", [r.index for r in gradients], power)
    if kind in RANGE:
        yield from _of_range(group, low, norms)
    wide: set[tuple[int, ...]] = set()
    for words, found in (
        (f"float32 for this {here.primitive}", list(group.rows)),
        (f"float32 for line {here.line}", _like(here, rows, "file", "line", "direction")),
        (f"float32 for line {here.line}, both ways", _like(here, rows, "file", "line")),
        (
            f"float32 for all of {here.function.rpartition('.')[2]}",
            _like(here, rows, "file", "function"),
        ),
        ("float32 for the optimizer", _optimizer(here, rows)),
    ):
        indices = tuple(r.index for r in found)
        known = here.file is not None or len(found) == len(group.rows)
        if indices and indices not in wide and (known or here.direction == "optimizer"):
            wide.add(indices)
            yield _wide(words, indices)
    if last and kind in RANGE and fmt in WIDER:
        other = as_row(WIDER[fmt], low.saturate)
        yield _into(f"{WIDER[fmt].name} throughout", [r.index for r in rows], other)


def narrow_gradients(group: Group, kind: str) -> bool:
    """Whether a loss scale might help: gradients leave the range, or are in its lowest part."""
    if group.first.direction != "backward":
        return False
    return kind in RANGE or group.share("subnormal") >= SUBNORMAL


def _of_range(group: Group, low: Rounded, norms) -> Iterator[Fix]:
    """A norm that takes care of its range, a scale, a format of more range."""
    here = group.first
    written = [rows for rows in norms if set(rows) & set(group.indices)]
    if written:
        # within 0.05 ulp of an exact sum, rounded once at the root
        inner = [row for rows in written for row in rows[:-1]]
        yield _into("ops.l2_norm in place of the root of a sum of squares", inner, DOUBLE)
    power = power_below(group.rows, low.fmt)
    if power and here.file is not None:
        yield _shifted(f"scale its result by 2^{power}", group.indices, power)
    if low.fmt in WIDER:
        other = as_row(WIDER[low.fmt], low.saturate)
        yield _into(f"{WIDER[low.fmt].name} for this {here.primitive}", group.indices, other)


def _optimizer(here: Row, rows: Sequence[Row]) -> list[Row]:
    """All of the optimizer's rows, of one of them."""
    return _like(here, rows, "direction") if here.direction == "optimizer" else []


def _like(row: Row, rows: Sequence[Row], *names: str) -> list[Row]:
    return [r for r in rows if all(getattr(r, n) == getattr(row, n) for n in names)]


def power_below(rows: Sequence[Row], fmt: Format) -> int:
    """The power of two that leaves the largest number of these rows one binade of headroom."""
    top = max((max(r["amax"], r["shadow_max"]) for r in rows), default=0.0)
    return math.floor(math.log2(float(fmt.max) / top)) - 1 if top > 0 else 0
