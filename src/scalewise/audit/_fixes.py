"""Changes that might help, each applied and the program run again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from ..formats import Format
from ._findings import Finding, Group, finding, groups
from ._literals import Literal
from ._rounding import SINGLE, scaled
from ._rows import Row
from ._session import Error, Outcome, Session

ENOUGH = 0.5  # a fix that halves the error is taken before wider ones are tried
GAIN = 0.95  # and one that leaves more than this of it is none


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a run is given: a table of formats, and literals replaced."""

    formats: np.ndarray
    constants: tuple[tuple[float, float], ...] = ()

    def wide(self, rows: Sequence[int]) -> Setting:
        formats = self.formats.copy()
        formats[list(rows)] = SINGLE
        return dataclasses.replace(self, formats=formats)

    def shifted(self, rows: Sequence[int], power: int) -> Setting:
        formats = self.formats.copy()
        for row in rows:
            formats[row] = scaled(formats[row], power)
        return dataclasses.replace(self, formats=formats)

    def replaced(self, old: float, new: float) -> Setting:
        return dataclasses.replace(self, constants=(*self.constants, (old, new)))


@dataclasses.dataclass(frozen=True)
class Fix:
    """A change, in words and as a setting."""

    words: str
    setting: Setting


def fixes(
    group: Group, kind: str, rows: Sequence[Row], literals: Sequence[Literal], now: Setting,
    fmt: Format,
) -> Iterator[Fix]:  # fmt: skip
    """Changes worth trying for a finding, the smallest first."""
    here = group.first
    for literal in literals:
        if literal.number and literal.rounded == 0 and kind in ("nan", "overflow"):
            new = math.copysign(float(fmt.smallest_normal), literal.number)
            words = f"{literal.number:.3g} at line {literal.line} is 0 in {fmt.name}: {new:.3g}"
            yield Fix(f"epsilon: {words}", now.replaced(literal.number, new))
    if kind == "underflow" and here.direction == "backward":
        backward = [r for r in rows if r.direction == "backward"]
        power = loss_scale(backward, fmt)
        if power > 0:
            shift = now.shifted([r.index for r in backward], power)
            yield Fix(f"loss scale 2^{power}", shift)
    if kind in ("overflow", "saturation", "underflow") and here.file is not None:
        power = own_scale(group, fmt)
        if power:
            yield Fix(f"scale its result by 2^{power}", now.shifted(group.indices, power))
    wide: set[tuple[int, ...]] = set()
    for words, found in (
        (f"float32 for this {here.primitive}", list(group.rows)),
        (f"float32 for line {here.line}", _like(here, rows, "file", "line", "direction")),
        (f"float32 for line {here.line}, both ways", _like(here, rows, "file", "line")),
        (f"float32 for all of {here.function}", _like(here, rows, "file", "function")),
    ):
        indices = tuple(r.index for r in found)
        if indices not in wide and (here.file is not None or len(found) == len(group.rows)):
            wide.add(indices)
            yield Fix(words, now.wide(indices))


def _like(row: Row, rows: Sequence[Row], *names: str) -> list[Row]:
    return [r for r in rows if all(getattr(r, n) == getattr(row, n) for n in names)]


def loss_scale(backward: Sequence[Row], fmt: Format) -> int:
    """The power of two that leaves the largest gradient one binade of headroom."""
    top = max((r["amax"] for r in backward), default=0.0)
    return math.floor(math.log2(float(fmt.max) / top)) - 1 if top > 0 else 0


def own_scale(group: Group, fmt: Format) -> int:
    """The power of two that brings a group's largest number just below the format's largest."""
    top = max(r["amax"] for r in group.rows)
    return math.floor(math.log2(float(fmt.max) / top)) - 1 if top > 0 else 0


@dataclasses.dataclass
class Search:
    """Findings in the order of what their fixes do to the outputs, each on top of those before.

    Attributes:
        session: what is run.
        literals: that change in the format.
        trials: how many runs may be made.
        found: findings with a fix that helped, in order.
        idle: findings with evidence but without a fix that helped.
    """

    session: Session
    fmt: Format
    literals: Sequence[Literal]
    trials: int
    found: list[Finding] = dataclasses.field(default_factory=list)
    idle: list[Finding] = dataclasses.field(default_factory=list)

    def run(self, start: Outcome) -> Error:
        """Looks until no change helps or trials are used up; the error with all fixes applied."""
        now, outcome = Setting(self.session.formats()), start
        tried: set[tuple[int, ...]] = set()
        budget = self.trials
        floor = Error(0, 0.0)
        if budget:
            everything = now.wide(range(len(now.formats)))
            floor = self._try(everything).error
            budget -= 1
        saturate = self.session.low.saturate
        while budget > 0 and not _near(outcome.error, floor):
            fresh = [g for g in groups(outcome.rows) if g.indices not in tried]
            if not fresh:
                break
            group = fresh[0]
            tried.add(group.indices)
            what = finding(group, self.fmt, saturate)
            best, spent = self._best(group, what.kind, outcome, now, budget)
            budget -= spent
            if best is None:
                self.idle.append(what)
                continue
            fix, after = best
            self.found.append(_with(what, fix.words, outcome.error, after.error))
            now, outcome = fix.setting, after
            tried.clear()
        return outcome.error

    def _try(self, setting: Setting) -> Outcome:
        return self.session.run(setting.formats, dict(setting.constants))

    def _best(self, group, kind, outcome, now, budget):
        """The first change that helps enough, else the one that helps most."""
        before, best, spent = outcome.error, None, 0
        for fix in fixes(group, kind, outcome.rows, self.literals, now, self.fmt):
            if spent >= budget:
                break
            after = self._try(fix.setting)
            spent += 1
            if _better(after.error, before, GAIN) and (
                best is None or _better(after.error, best[1].error, ENOUGH)
            ):
                best = fix, after
            if best is not None and _better(best[1].error, before, ENOUGH):
                break
        return best, spent


def _near(error: Error, floor: Error) -> bool:
    return error.broken <= floor.broken and error.relative <= 1.5 * floor.relative + 1e-7


def _better(after: Error, before: Error, share: float) -> bool:
    """Whether an error is at most a share of another: first what isn't finite, then the rest."""
    if before.broken:
        return after.broken <= share * before.broken
    return after.broken == 0 and after.relative <= share * before.relative


def _with(what: Finding, fix: str, before: Error, after: Error) -> Finding:
    return dataclasses.replace(
        what,
        fix=fix,
        error_before=float(before),
        error_after=float(after),
        broken_before=before.broken,
        broken_after=after.broken,
    )
