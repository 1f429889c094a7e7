"""One run of a program with fixes: its errors, and the operations whose roundings make them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...formats import Format
from ...interpret import Equation
from .._run._equation_statistics import EquationStatistics
from .._run._outcome import NO_ERROR, Outcome, OutputError
from .._run._session import Session
from .._sheet._balance import Balance, wrong_by_half
from .._sheet._functional import Stage
from .._sheet._make import balance_of, stages_of
from .._tape._cells import Leaf
from .._thresholds import (
    ACCUMULATED,
    ENOUGH,
    EVENTFUL,
    FEW_OF_LIMIT,
    FEW_ROUNDINGS,
    MOST_OF_ERROR,
    PART_OF_LINE,
)
from ._apply import FormatChoice
from ._measure import better

EVENTS = ("overflow", "underflow", "swamping")
Place = tuple[str | None, int]  # file and line


@dataclasses.dataclass(frozen=True, eq=False)
class Suspect:
    """A line of the user's, and what of it makes an error.

    Attributes:
        equations: the operations to widen: those of the line's parts (operations, lines of
            libraries, directions) that make at least ``PART_OF_LINE`` of its share.
        worst: the operation that makes most; None of a line where nothing is rounded.
        cause: what most of the share is made by, as of :class:`Share`; "" if that isn't known.
        share: of the error.
        place: the line where `worst` is written, or where the constant is read.
        of_user: the user's line that calls it.
    """

    equations: tuple[EquationStatistics, ...]
    worst: EquationStatistics | None
    cause: str
    share: float
    place: Place
    of_user: Place


@dataclasses.dataclass(frozen=True, eq=False)
class StageError:
    """The error of one part of the outputs, or of a change; see :class:`Stage`.

    Attributes:
        name: the stage's, "change of " before that of a change.
        limit: the error from which it is wrong.
        few: so small an error that no other fix is looked for.
    """

    name: str
    error: OutputError
    limit: float = math.inf
    few: float = 0.0
    needs_a_cause: Callable[[], bool] = bool

    @functools.cached_property
    def fails(self) -> bool:
        """Whether a cause is looked for; of a small error it takes a balance sheet to say so."""
        return self.needs_a_cause()


@dataclasses.dataclass(eq=False)
class Trial:
    """A run with a setting; what is needed of it is computed once."""

    session: Session
    fmt: Format
    setting: Any

    @functools.cached_property
    def outcome(self) -> Outcome:
        if isinstance(self.setting, FormatChoice):
            return self.setting.run(self.session)
        return self.session.with_low(self.setting).run()

    @functools.cached_property
    def _stages(self) -> list[Stage]:
        outcome = self.outcome
        return stages_of(outcome.made, self.session.floors, self.session.started_at_zero(outcome))

    @functools.cached_property
    def _errors(self) -> dict[str, StageError]:
        return {_key(x): self._stage_error(x) for x in self._stages}

    def _stage_error(self, stage: Stage) -> StageError:
        decided = stage.name == "decisions"
        error = OutputError(stage.non_finite, float(stage.error), decided=decided)
        few = max(FEW_ROUNDINGS * 2.0**-self.fmt.precision, FEW_OF_LIMIT * stage.limit)
        needs_a_cause = functools.partial(self._needs_a_cause, stage)
        return StageError(_key(stage), error, stage.limit, few, needs_a_cause)

    @functools.cached_property
    def stages(self) -> list[StageError]:
        """The parts of the outputs, and the changes that a training step gets wrong."""
        wrong = {x.path for x in self.session.wrong_changes(self.outcome)}
        found = [x for x in self._stages if (x.name in wrong if x.is_change else not x.is_part)]
        return [self._errors[_key(x)] for x in found]

    def _needs_a_cause(self, stage: Stage) -> bool:
        """Returns whether a stage is wrong, or most of a smaller error of the whole is made by a
        device's sums, or by numbers that leave the range or change nothing."""
        if stage.is_part:
            return stage.fails
        sums, error = self.session.exact_sums, stage.error
        by_sums = sums is not None and error > ACCUMULATED * sums.error
        if stage.fails or by_sums or error < EVENTFUL * 2.0**-self.fmt.precision:
            return stage.fails or by_sums
        balance = self.balance(stage.name)
        events = sum(x for (_, cause), x in balance.shares.items() if cause in EVENTS)
        return events >= MOST_OF_ERROR * balance.total

    @property
    def fails(self) -> bool:
        return any(x.fails for x in self.stages)

    def is_enough(self, name: str) -> bool:
        """Returns whether nothing is wrong any more, and little of a part's error is left."""
        own = self.stage(name)
        return own.error.relative <= own.few and not self.fails

    @functools.cached_property
    def outputs(self) -> list[StageError]:
        """Each of several outputs by itself."""
        return [self._errors[x.name] for x in self._stages if x.is_part]

    def stage(self, name: str) -> StageError:
        return self._errors.get(name, StageError(name, NO_ERROR))

    @functools.cached_property
    def _balances(self) -> dict[str, Balance]:
        return {}

    def balance(self, name: str) -> Balance:
        if name not in self._balances:
            stage = next(x for x in self._stages if _key(x) == name)
            self._balances[name] = balance_of(self.outcome.made, stage)
        return self._balances[name]

    def suspects(self, name: str) -> list[Suspect]:
        """Returns the lines that make the error of a stage, the largest share first."""
        return suspects_of(self.balance(name), self._rows)

    def hidden(self, name: str) -> list[Suspect]:
        """Returns the operations that are wrong by half, though no output shows it."""
        if not wrong_by_half(self.outcome.made.forward.tape):  # as in most programs
            return []
        balance = self.balance(name)
        shares = [(what, cause, x / balance.total) for (what, cause), x in balance.shares.items()]
        own = [[x for x in shares if x[0] is e] for e in balance.hidden()]
        return [_suspect(x, self._rows) for x in own]

    @functools.cached_property
    def _rows(self) -> dict[tuple[int, ...], EquationStatistics]:
        outcome = self.outcome
        return {outcome.recorded[e.index].path: e for e in outcome.equations}


def helps(after: StageError, before: StageError) -> bool:
    return better(after.error, before.error, ENOUGH)


def _key(stage: Stage) -> str:
    """Returns a name that an output's error and its change's don't share."""
    return f"change of {stage.name}" if stage.is_change else stage.name


def suspects_of(
    balance: Balance, rows: Mapping[tuple[int, ...], EquationStatistics]
) -> list[Suspect]:
    """Returns the lines by their shares; by size, if much of the error isn't explained, so that
    a share may have the wrong sign."""
    lines: dict[Place, list[tuple[Equation, str, float]]] = collections.defaultdict(list)
    unexplained = 0.0
    for (what, cause), amount in balance.shares.items():
        if cause == "unexplained":
            unexplained += abs(amount / balance.total)
        elif not isinstance(what, Leaf):
            lines[_place(what)].append((what, cause, amount / balance.total))
    if unexplained >= MOST_OF_ERROR:
        lines = {at: [(e, cause, abs(x)) for e, cause, x in some] for at, some in lines.items()}
    found = [_suspect(some, rows) for some in lines.values()]
    return sorted(found, key=lambda x: -x.share)


def _place(equation: Equation) -> Place:
    return (equation.caller or equation.source or (None, 0, ""))[:2]


def _suspect(
    some: Sequence[tuple[Any, str, float]],
    rows: Mapping[tuple[int, ...], EquationStatistics],
) -> Suspect:
    share = sum(own for *_, own in some)
    size = sum(abs(own) for *_, own in some)
    causes: dict[str, float] = collections.defaultdict(float)
    parts: dict[tuple, float] = collections.defaultdict(float)
    for e, cause, own in some:
        causes[cause] += own
        parts[_part(e)] += abs(own)
    cause = max(causes, key=lambda x: causes[x])
    first = max(some, key=lambda x: (x[1] == cause, x[2]))[0]
    kept = {part for part, own in parts.items() if own >= PART_OF_LINE * size}
    own = [rows[e.path] for e, _, _ in some if _part(e) in kept and e.path in rows]
    wide = {x.index: x for x in own}
    # one rounding less may show what the line's next rounding does
    if cause not in EVENTS:
        lines = {(x.file, x.line, x.direction) for x in own if x.file}
        wide |= {x.index: x for x in rows.values() if (x.file, x.line, x.direction) in lines}
    worst = rows.get(first.path)
    file, line, _ = first.source or (None, 0, "")
    ordered = tuple(wide[i] for i in sorted(wide))
    return Suspect(ordered, worst, cause, share, (file, line), _place(first))


def _part(equation: Equation) -> tuple:
    return equation.source, equation.direction, equation.name
