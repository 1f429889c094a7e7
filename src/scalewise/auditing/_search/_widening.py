"""Lines that make an error, computed in a wider dtype together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from .._run._equation_statistics import EquationStatistics
from .._thresholds import ENOUGH, LINES
from ._evidence import finding_of, literal_of
from ._findings import Finding
from ._fix_kinds import kept_in
from ._fixes import Fix, both, described, joined, library_calls, widened
from ._literals import Literal
from ._trial import StageError, Suspect, Trial, helps

if TYPE_CHECKING:
    from ._search import Search

Line: TypeAlias = tuple[Suspect, Finding]  # what to widen, and what it does


def widen(search: Search, stage: StageError) -> bool:
    """Widens the line with the largest share, then those that the sheet says would do, until the
    part doesn't fail.

    Nothing is counted behind the first infinity: such faults show one by one. If the part fails
    when all its numbers are finite, that is another fault. Lines without which the fix helps as
    much are left out again.
    """
    trial, lines = search.now, list[Line]()
    best: tuple[list[Line], Trial] | None = None
    while len(lines) <= LINES:
        chosen, kept = _parts(search, [x for x, _ in lines])
        fresh = [
            x for x, own in ((x, _parts(search, [x])) for x in search.suspects(trial, stage.name))
            if x.share > 0 and not (own[0].keys() <= chosen.keys() and own[1].keys() <= kept.keys())
        ]  # fmt: skip
        if not fresh:
            break
        most = _sufficient(fresh, trial.stage(stage.name)) if lines else 1
        for suspect in fresh[: min(most, LINES + 1 - len(lines))]:
            lines = _with_line(search, lines, (suspect, finding_of(search, suspect, trial, stage)))
        # another fix may have been the same run; what is next is seen in this one
        after = search.attempt(wide(search, lines), again=True)
        if after is None:
            break
        trial = after
        error, least = trial.stage(stage.name), stage if best is None else best[1].stage(stage.name)
        if helps(error, stage) and error.error <= least.error:
            best = lines, trial
            if not error.fails or (stage.error.non_finite and not error.error.non_finite):
                break
    if best is None:
        return False
    _accept_lines(search, stage, *_fewer(search, stage, *best))
    return True


def _sufficient(suspects: Sequence[Suspect], error: StageError) -> int:
    """Returns how many lines leave too small an error to fail, by their shares."""
    if error.error.non_finite:
        return 1
    left = error.error.relative * (1 - np.cumsum([x.share for x in suspects]))
    enough = left <= ENOUGH * error.limit
    return int(np.argmax(enough)) + 1 if enough.any() else len(suspects)


def _with_line(search: Search, lines: Sequence[Line], new: Line) -> list[Line]:
    """Returns the lines and another one. Of two faults on one line the first has the finding, and
    the whole line is widened."""
    for i, (suspect, what) in enumerate(lines):
        if suspect.of_user == new[0].of_user:
            some = (*suspect.equations, *new[0].equations)
            own, parts = {e.index for e in some}, {(e.file, e.line, e.direction) for e in some}
            equations = tuple(
                e for e in search.outcome.equations
                if e.index in own or (e.file and (e.file, e.line, e.direction) in parts)
            )  # fmt: skip
            both = dataclasses.replace(suspect, equations=equations)
            return [*lines[:i], (both, what), *lines[i + 1 :]]
    return [*lines, new]


def _parts(
    search: Search, suspects: Iterable[Suspect]
) -> tuple[dict[int, EquationStatistics], dict[float, Literal]]:
    """Returns the operations to widen by index, and the constants to keep by number."""
    suspects = list(suspects)
    wide = {e.index: e for x in suspects for e in x.equations}
    for call in library_calls(list(wide.values()), search.outcome.equations).values():
        wide |= {e.index: e for e in call}  # a user changes a call, not a library's lines
    own = {x.place for x in suspects if literal_of(search, x) is not None}
    lines = own | {(e.file, e.line) for e in wide.values() if e.file}
    kept = {x.number: x for x in search.literals if (x.file, x.line) in lines and not x.slight}
    return wide, kept if search.session.adjustable else {}


def wide(search: Search, lines: Sequence[Line]) -> Fix:
    wide, kept = _parts(search, [x for x, _ in lines])
    some = [wide[i] for i in sorted(wide)]
    limits = search.limits if any(x.cause == "constant" for x, _ in lines) else ()
    if not some:
        return functools.reduce(both, [kept_in(search.word, x) for x in kept.values()])
    fix = widened(search.word, described(some, search.outcome.equations), some, limits=limits)
    for literal in kept.values():  # a line in float32 has its constants in float32
        whole = both(fix, kept_in(search.word, literal))
        fix = dataclasses.replace(fix, change=whole.change)
    return fix


def _fewer(
    search: Search, stage: StageError, lines: list[Line], trial: Trial
) -> tuple[list[Line], Trial]:
    """Returns the lines without those that the error doesn't need, and the run with them."""
    whole = trial.stage(stage.name).error
    enough = max(2 * whole.relative, stage.few)
    for line in sorted(lines, key=lambda x: x[0].share):
        rest = [x for x in lines if x is not line]
        after = search.attempt(wide(search, rest)) if rest else None
        if after is not None:
            error = after.stage(stage.name).error
            if error.non_finite <= whole.non_finite and error.relative <= enough:
                lines, trial = rest, after
    return lines, trial


def _accept_lines(search: Search, stage: StageError, lines: Sequence[Line], trial: Trial) -> None:
    whole, found = wide(search, lines), []
    some = [e for e in search.outcome.equations if e.index in {*whole.indices}]
    all_lines = f"{search.word} for {described(some, some)}" if some else str(whole)
    for line in lines:
        own = wide(search, [line])
        others = [str(wide(search, [x])) for x in lines if x is not line]
        text = f"{own}, together with {joined(others)}" if others else str(whole)
        fix = dataclasses.replace(whole, text=text, size=own.size, all_lines=all_lines)
        found.append(dataclasses.replace(line[1], fix=fix))
    # where numbers exceed the range comes before roundings that it makes matter
    found.sort(key=lambda x: x.kind not in ("nan", "overflow"))
    search.accept(whole, trial, found, stage.name)
