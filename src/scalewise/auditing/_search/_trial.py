"""One run of a program with fixes: its errors, and the operations whose roundings make them."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from ...formats import Format
from ...interpret import Equation
from .._run._equation_statistics import EquationStatistics
from .._run._outcome import Outcome, OutputError
from .._run._session import Session
from .._sheet._arithmetic import Choice
from .._sheet._balance import Balance
from .._sheet._cells import Leaf
from .._sheet._forward import LONGEST
from .._sheet._functional import Stage
from .._sheet._make import SheetRun, SheetSource, run_sheet
from .._thresholds import ACCUMULATED, EVENTFUL, MOST_OF_ERROR, PART_OF_LINE, limit_of
from ._apply import FormatChoice
from ._groups import groups

OUTPUTS = "outputs"
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
        place: the line where `worst` is written, or what reads the constant.
        of_user: the user's line that calls it.
    """

    equations: tuple[EquationStatistics, ...]
    worst: EquationStatistics | None
    cause: str
    share: float
    place: Place
    of_user: Place


@dataclasses.dataclass(frozen=True)
class StageError:
    """The error of one part of the outputs; see :class:`Stage`."""

    name: str
    error: OutputError
    fails: bool


@dataclasses.dataclass(eq=False)
class Trial:
    """A run with a setting; what is needed of it is computed once.

    Errors and shares are the balance sheet's. A program that it doesn't take (loops of very many
    iterations, several devices) has the errors of its outputs, and is searched by the operations'
    statistics.
    """

    session: Session
    source: SheetSource | None  # None if the program has no balance sheet
    fmt: Format
    setting: Any

    @functools.cached_property
    def outcome(self) -> Outcome:
        if isinstance(self.setting, FormatChoice):
            return self.setting.run(self.session)
        return self.session.with_low(self.setting).run()

    @functools.cached_property
    def sheet(self) -> SheetRun | None:
        if self.source is None:
            return None
        setting, source = self.setting, self.source
        if isinstance(setting, FormatChoice):
            indices = self.session.lockstep.indices
            choice = Choice(setting.formats, indices, dict(setting.constants))
            source = dataclasses.replace(source, choice=choice)
        else:
            source = dataclasses.replace(source, low=setting)
        return run_sheet(source)

    @property
    def has_sheet(self) -> bool:
        """Whether the run has a balance sheet; of long loops the statistics tell, once known."""
        known = self.outcome.equations if "outcome" in self.__dict__ else ()
        if sum(e["visits"] for e in known) > LONGEST:
            return False
        try:
            return self.sheet is not None
        except ValueError:
            return False

    @functools.cached_property
    def stages(self) -> list[StageError]:
        if self.sheet is None:
            errors = [(OUTPUTS, self.outcome.error, limit_of(self.fmt))]
        else:
            own = (x for x in self.sheet.stages if not x.is_change and not x.is_part)
            errors = [(x.name, _error_of(x), x.limit) for x in own]
        return [StageError(name, x, self._fails(name, x, limit)) for name, x, limit in errors]

    def _fails(self, name: str, error: OutputError, limit: float) -> bool:
        """Returns whether an error needs an explanation."""
        sums = self.session.exact_sums
        if sums is not None and error.relative > ACCUMULATED * sums.error:
            return True
        if error.non_finite or error.relative >= limit > 0 or error.decided:
            return error.non_finite > 0 or 0 < error.relative >= limit
        balance = None
        if error.relative >= EVENTFUL * 2.0**-self.fmt.precision:
            balance = self.balance(name)
        if balance is None:
            return False
        events = sum(x for (_, cause), x in balance.shares.items() if cause in EVENTS)
        return events >= MOST_OF_ERROR * balance.total

    @property
    def fails(self) -> bool:
        return any(x.fails for x in self.stages)

    @functools.cached_property
    def outputs(self) -> list[StageError]:
        """Each of several outputs by itself."""
        own = self.sheet.stages if self.sheet is not None else ()
        return [StageError(x.name, _error_of(x), x.fails) for x in own if x.is_part]

    def stage(self, name: str) -> StageError:
        every = [*self.stages, *self.outputs]
        return next((x for x in every if x.name == name), StageError(name, NONE, False))

    @functools.cached_property
    def _balances(self) -> dict[str, Balance]:
        return {}

    def balance(self, name: str) -> Balance | None:
        if self.sheet is None:
            return None
        if name not in self._balances:
            stage = next(x for x in self.sheet.stages if x.name == name and not x.is_change)
            self._balances[name] = self.sheet.balance(stage)
        return self._balances[name]

    def suspects(self, name: str) -> list[Suspect]:
        """Returns the lines that make the error of a stage, the largest share first."""
        balance = self.balance(name)
        if balance is None:
            found = groups(self.outcome.equations, self.fmt, self.outcome.causes)
            rows = [(g.worst_equation(self.fmt), g.equations) for g in found]
            places = [(e.file, e.line) for e, _ in rows]
            return [
                Suspect(tuple(own), e, "", 1.0, place, place)
                for (e, own), place in zip(rows, places, strict=True)
            ]
        return suspects_of(balance, self._rows)

    def hidden(self, name: str) -> list[Suspect]:
        """Returns the operations that are wrong by half, though no output shows it."""
        balance = self.balance(name)
        if balance is None:
            return []
        shares = [(what, cause, x / balance.total) for (what, cause), x in balance.shares.items()]
        own = [[x for x in shares if x[0] is e] for e in balance.hidden()]
        return [_suspect(x, self._rows) for x in own]

    @functools.cached_property
    def _rows(self) -> dict[tuple[int, ...], EquationStatistics]:
        recorded = self.session.lockstep.recorded
        return {recorded[e.index].path: e for e in self.outcome.equations}


NONE = OutputError(0, 0.0)


def _error_of(stage: Stage) -> OutputError:
    return OutputError(stage.non_finite, float(stage.error), decided=stage.name == "decisions")


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
    if (
        cause not in EVENTS
    ):  # what isn't rounded any more may show what the line's next rounding does
        lines = {(x.file, x.line, x.direction) for x in own if x.file}
        wide |= {x.index: x for x in rows.values() if (x.file, x.line, x.direction) in lines}
    worst = rows.get(first.path)
    file, line, _ = first.source or (None, 0, "")
    ordered = tuple(wide[i] for i in sorted(wide))
    return Suspect(ordered, worst, cause, share, (file, line), _place(first))


def _part(equation: Equation) -> tuple:
    return equation.source, equation.direction, equation.name
