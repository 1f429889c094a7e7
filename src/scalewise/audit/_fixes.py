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
IDLE = 12  # findings listed where nothing is tried
LEFT = 6  # and where nothing that was tried helped
EVENTS = ("nan", "overflow", "saturation", "underflow", "swamping")


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


def constant_fixes(literal: Literal, now: Setting, fmt: Format) -> Iterator[Fix]:
    """Changes worth trying for a constant that the format can't hold."""
    number = literal.number
    if literal.rounded == 0:
        new = math.copysign(float(fmt.smallest_normal), number)
        yield Fix(f"{new:.3g} in place of {number:.3g}", now.replaced(number, new))
    elif abs(number) > float(fmt.max):
        new = math.copysign(float(fmt.max) / 2, number)
        yield Fix(f"{new:.5g} in place of {number:.3g}", now.replaced(number, new))
    yield Fix(f"{number:.6g} kept in float32", now.replaced(number, number))


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
        evidence=f"the constant {literal.number:.6g} {literal.what}",
    )


def fixes(group: Group, kind: str, rows: Sequence[Row], now: Setting, fmt: Format) -> Iterator[Fix]:
    """Changes worth trying for a finding, the smallest first."""
    here = group.first
    if kind == "underflow" and here.direction == "backward":
        backward = [r for r in rows if r.direction == "backward"]
        power = power_below(backward, fmt)
        if power > 0:
            shift = now.shifted([r.index for r in backward], power)
            yield Fix(f"loss scale 2^{power}", shift)
    if kind in ("overflow", "saturation", "underflow") and here.file is not None:
        power = power_below(group.rows, fmt)
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


def power_below(rows: Sequence[Row], fmt: Format) -> int:
    """The power of two that leaves the largest number of these rows one binade of headroom."""
    top = max((max(r["amax"], r["shadow_max"]) for r in rows), default=0.0)
    return math.floor(math.log2(float(fmt.max) / top)) - 1 if top > 0 else 0


@dataclasses.dataclass
class Search:
    """Findings whose fixes change the outputs, each fix on top of those before; then the others.

    Attributes:
        session: what is run.
        literals: that change in the format.
        trials: how many runs may still be made.
        found: findings with a fix that helped, in order; then, if much of the error is left, what
            no change mended, or none was tried for.
        idle: findings with evidence but without a fix that helped.
        now, outcome: the fixes found so far, and what a run with them gives.
    """

    session: Session
    fmt: Format
    literals: Sequence[Literal]
    trials: int
    found: list[Finding] = dataclasses.field(default_factory=list)
    idle: list[Finding] = dataclasses.field(default_factory=list)
    now: Setting = dataclasses.field(init=False)
    outcome: Outcome = dataclasses.field(init=False)

    def run(self, start: Outcome) -> Error:
        """Looks until no change helps or trials are used up; the error with all fixes applied."""
        self.now, self.outcome = Setting(self.session.formats()), start
        if self.trials <= 0:
            self.idle += [self._finding(g) for g in groups(start.rows)[:IDLE]]
            return start.error
        floor = self._try(self.now.wide(range(len(self.now.formats)))).error
        for literal in [x for x in self.literals if not x.masks]:
            options = constant_fixes(literal, self.now, self.fmt)
            self._attempt(constant_finding(literal), options)
        tried: set[tuple[int, ...]] = set()
        while self.trials > 0 and not _near(self.outcome.error, floor):
            fresh = [g for g in groups(self.outcome.rows) if g.indices not in tried]
            if not fresh:
                break
            what = self._finding(fresh[0])
            tried.add(fresh[0].indices)
            options = fixes(fresh[0], what.kind, self.outcome.rows, self.now, self.fmt)
            if self._attempt(what, options):
                tried.clear()
        if not _near(self.outcome.error, floor):
            self._unmended()
        return self.outcome.error

    def _unmended(self) -> None:
        """What is left of the error has a cause too: findings without a fix."""
        for group in groups(self.outcome.rows)[:LEFT]:
            what = self._finding(group)
            if what.kind in EVENTS:
                error = self.outcome.error
                tried = any(x.rows == what.rows for x in self.idle)
                what = dataclasses.replace(
                    what, error_before=float(error), broken_before=error.broken, tried=tried
                )
                self.found.append(what)
                self.idle = [x for x in self.idle if x.rows != what.rows]

    def _finding(self, group: Group) -> Finding:
        return finding(group, self.fmt, self.session.low.saturate)

    def _try(self, setting: Setting) -> Outcome:
        self.trials -= 1
        return self.session.run(setting.formats, dict(setting.constants))

    def _attempt(self, what: Finding, options: Iterator[Fix]) -> bool:
        """Whether a change helps: the first that helps enough, else the one that helps most."""
        before = self.outcome.error
        best: tuple[Fix, Outcome] | None = None
        for fix in options:
            if self.trials <= 0:
                break
            after = self._try(fix.setting)
            if _better(after.error, before, GAIN) and (
                best is None or _better(after.error, best[1].error, ENOUGH)
            ):
                best = fix, after
            if best is not None and _better(best[1].error, before, ENOUGH):
                break
        what = dataclasses.replace(what, tried=True)
        if best is None:
            self.idle.append(what)
            return False
        fix, after = best
        self.found.append(_with(what, fix.words, before, after.error))
        self.now, self.outcome = fix.setting, after
        return True


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
