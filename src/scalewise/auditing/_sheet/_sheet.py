"""``Sheet``: each line's share of the error, as tables, JSON and a flame graph."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from ..._jax import user_frames
from ..._output import Rows, Tabular, place, plain, replacing
from ..._types import Json
from ...interpret import Equation
from .._tape._cells import Leaf
from ._balance import Balance
from ._functional import Stage

Frame: TypeAlias = tuple[str, str, int]  # function, file, line
By: TypeAlias = Literal["line", "operation", "scope", "direction", "iteration", "cause"]
BELOW = 0.01  # a share from which a library's line is shown below the user's
CANCELLING = 0.5  # a negative share from which lines cancel others
FLAME = ".speedscope.json"
SCHEMA = "https://www.speedscope.app/file-format-schema.json"
HERE = str(Path(__file__).parents[2])  # scalewise: frames above the traced function
INSTALLED = tuple({sysconfig.get_path(x) for x in ("purelib", "platlib")})
ARGUMENTS, UNKNOWN = "arguments", "unknown line"


@dataclasses.dataclass(frozen=True)
class Share:
    """The share of the error that one operation makes, by one cause.

    Attributes:
        file, line, function: of the user's code.
        library: the library's line below it, as ``optax/transform.py:298``; "" without one.
        operation: the primitive; of an argument its path.
        scope: the name scopes, without those of derivatives.
        direction: "forward", "backward" or "update"; "" of arguments.
        cause: "rounding", "overflow", "underflow", "swamping", "constant", "argument", "decision"
            (roundings that changed a decision) or "unexplained" (what no secant explains).
        share: of the whole error; negative if it cancels others' errors.
        stack: the frames that lead to the operation, the outermost first.
    """

    file: str
    line: int
    function: str
    library: str
    operation: str
    scope: str
    direction: str
    cause: str
    share: float
    stack: tuple[Frame, ...] = ()

    @property
    def where(self) -> str:
        if not self.file:
            return ARGUMENTS if self.cause == "argument" else UNKNOWN
        return place(self.file, self.line)


@dataclasses.dataclass(frozen=True)
class LineShare:
    """The share of the error that one line makes.

    Attributes:
        where: ``file.py:34``, without the folder.
        file, line, function: of the user's code; "" and 0 of arguments.
        share: of the whole error.
        causes: the same by cause, the largest first.
        operations: the primitives, the largest share first.
        libraries: lines of libraries that it calls, with their shares.
    """

    where: str
    file: str
    line: int
    function: str
    share: float
    causes: tuple[tuple[str, float], ...]
    operations: tuple[str, ...]
    libraries: tuple[tuple[str, float], ...]


@dataclasses.dataclass(frozen=True)
class StageError:
    """The error of one part of the outputs.

    Attributes:
        name: "outputs", "loss and gradients", "decisions", or the path of a carried array, whose
            change is compared.
        non_finite: how many numbers aren't finite where the reference run's are.
        error: otherwise, the relative error.
        fails: whether it is wrong: not finite, ten half units or more, or a change 90 % wrong.
    """

    name: str
    non_finite: int
    error: float
    fails: bool

    def __str__(self) -> str:
        return f"{self.non_finite:,} not finite" if self.non_finite else f"{self.error:.2g}"


@dataclasses.dataclass(frozen=True)
class Sheet(Tabular):
    """The balance sheet of one run: shares of all operations that add up to the outputs' error.

    Attributes:
        function, low: what was audited, and the low-precision arithmetic.
        explained: the name of the stage whose error the shares are of (see ``stages``).
        stages: the outputs or, of a training step, its loss and gradients; then the changes of what
            the next call gets. The sheet explains the first that fails, or else the first.
        shares: by operation and cause, the largest first.
        iterations: by the line of the outermost loop (or "step") and iteration, the share of what
            is computed there.
        hidden: operations whose results are wrong by half, though no output shows it, a sentence
            each.
        residual: how far the sum of the shares is from the error, relative to it.
        operations: how many operations were visited, loops unrolled.
    """

    most: ClassVar[int | None] = 12
    endings: ClassVar[Sequence[str]] = (".html", ".json", ".csv")

    function: str
    low: str
    explained: str
    stages: tuple[StageError, ...]
    shares: tuple[Share, ...]
    iterations: tuple[tuple[str, int, float], ...]
    hidden: tuple[str, ...]
    residual: float
    operations: int

    @property
    def error(self) -> StageError | None:
        """The error that the shares are of; None without any."""
        return next((x for x in self.stages if x.name == self.explained), None)

    @property
    def lines(self) -> tuple[LineShare, ...]:
        """The user's lines, the largest share first."""
        groups: dict[tuple[str, int, str], list[Share]] = {}
        for x in self.shares:
            groups.setdefault((x.file, x.line, x.where), []).append(x)
        rows = [
            LineShare(
                where, file, line, some[0].function, sum(x.share for x in some),
                _summed(some, lambda x: x.cause),
                tuple(name for name, _ in _summed(some, lambda x: x.operation)),
                _summed([x for x in some if x.library], lambda x: x.library),
            )
            for (file, line, where), some in groups.items()
        ]  # fmt: skip
        return tuple(sorted(rows, key=lambda row: -row.share))

    @property
    def cancelling(self) -> tuple[LineShare, ...]:
        """The lines whose errors cancel one another: the negative shares, and the largest positive
        ones, until their sum isn't negative; () if no line cancels half of the error."""
        lines = self.lines
        negative = [x for x in lines if x.share <= -CANCELLING]
        left, found = sum(x.share for x in negative), []
        for x in lines:
            if left >= 0:
                break
            left += x.share
            found.append(x)
        return (*found, *negative)

    def by(self, by: By) -> tuple[tuple[str, float], ...]:
        """Returns shares by line, operation, scope, direction, iteration or cause."""
        if by == "line":
            return tuple((x.where, x.share) for x in self.lines)
        if by == "iteration":
            return tuple((f"{where}, {i}", share) for where, i, share in self.iterations)
        if by not in ("operation", "scope", "direction", "cause"):
            raise ValueError(
                f"sheet: by={by!r}; expected 'line', 'operation', 'scope', 'direction', "
                "'iteration' or 'cause'"
            )
        return _summed(self.shares, lambda x: getattr(x, by))

    def table(self, by: By = "line") -> Rows:
        """Returns a table of shares, the largest first."""
        if by != "line":
            rows = [(name or "–", _percent(share)) for name, share in self.by(by)]
            return Rows(f"By {by}", (by.capitalize(), "Share"), rows)
        together, rows = self.cancelling, []
        if together:
            names = " and ".join(x.where for x in together)
            whole = _percent(sum(x.share for x in together))
            rows.append((f"{names}, together", whole, "cancel one another", ""))
        for x in (*together, *(x for x in self.lines if x not in together)):
            causes = ", ".join(
                f"{cause} {_percent(share)}" if len(x.causes) > 1 else cause
                for cause, share in x.causes[:3]
            )
            rows.append(
                (
                    f"{x.where} {x.function}".strip(),
                    _percent(x.share),
                    causes,
                    ", ".join(x.operations[:3]),
                )
            )
            shown = [row for row in x.libraries if abs(row[1]) >= BELOW]
            rows += [(f"  {where}", _percent(share), "", "") for where, share in shown]
        return Rows("By line", ("Line", "Share", "Cause", "Operations"), rows)

    # -- text, JSON, flame graph -------------------------------------------------------------------

    @property
    def title(self) -> str:
        return f"Balance sheet of {self.function} in {self.low}"

    @property
    def sentence(self) -> str:
        """``Line 34 makes 92 % of the error.``"""
        lines, together = self.lines, self.cancelling
        if not lines:
            return "The low-precision run has no error."
        if together:
            names = " and ".join(f"{x.where} ({_percent(x.share)})" for x in together)
            whole = _percent(sum(x.share for x in together))
            return f"Errors of {names} cancel one another; together they make {whole}."
        first = lines[0]
        who = f"Line {first.line}" if first.line else f"The {first.where}"
        made = "makes" if first.line or first.where == UNKNOWN else "make"
        return f"{who} {made} {_percent(first.share)} of the error."

    def sentences(self) -> list[str]:
        error = self.error
        if error is None:
            return [self.sentence, *self.hidden]
        what = f"the change of {self.explained}" if self._is_change else self.explained
        return [self.sentence, f"Error of {what}: {error}.", *self.hidden]

    @property
    def _is_change(self) -> bool:
        return self.explained not in ("outputs", "loss and gradients", "decisions")

    def tables(self, *, everything: bool = True) -> list[Rows]:
        others = ("cause", "operation", "scope", "direction", "iteration") if everything else ()
        return [self.table("line"), *map(self.table, others or ("cause",))]

    def as_dict(self) -> dict[str, Json]:
        fields = super().as_dict()
        lines = [dataclasses.asdict(x) for x in self.lines]
        return plain(fields | {"sentence": self.sentence, "lines": lines})

    to_dict = as_dict

    def speedscope(self) -> dict[str, Json]:
        """Returns the shares by call stack, as https://www.speedscope.app draws a flame graph of
        them: one profile of what adds to the error, and one of what cancels."""
        frames: dict[Frame, int] = {}
        profiles = []
        for name, sign in (("error", 1.0), ("cancelling", -1.0)):
            some = [x for x in self.shares if x.share * sign > 0]
            samples = []
            for x in some:
                own = (f"{x.operation} ({x.cause})", x.file, x.line)
                samples.append([frames.setdefault(f, len(frames)) for f in (*x.stack, own)])
            weights = [100.0 * abs(x.share) for x in some]
            if some or sign > 0:
                profiles.append({
                    "type": "sampled", "name": f"{name} of {self.function}, in % of the error",
                    "unit": "none", "startValue": 0.0, "endValue": sum(weights),
                    "samples": samples, "weights": weights,
                })  # fmt: skip
        shown = [
            {"name": name} | ({"file": file, "line": line} if file else {})
            for name, file, line in frames
        ]
        return {
            "$schema": SCHEMA, "name": self.title, "exporter": "scalewise",
            "activeProfileIndex": 0, "shared": {"frames": shown}, "profiles": profiles,
        }  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the sheet to a file whose name ends with ``.html``, ``.json``, ``.csv`` (its
        lines), or ``.speedscope.json``."""
        if not str(path).endswith(FLAME):
            return super().save(path)
        path = Path(path)
        with replacing(path) as file:
            file.write(json.dumps(self.speedscope()).encode())
        return path


def _summed(shares: Sequence[Share], key: Callable[[Share], str]) -> tuple[tuple[str, float], ...]:
    found: dict[str, float] = collections.defaultdict(float)
    for x in shares:
        found[key(x)] += x.share
    return tuple(sorted(found.items(), key=lambda row: -abs(row[1])))


def _percent(share: float) -> str:
    return f"{100 * share:.{0 if abs(share) >= 0.1 or share == 0 else 1}f} %"


# -- from the pass backwards -----------------------------------------------------------------------


def sheet_from(
    function: str, low: str, found: Sequence[Stage], stage: Stage | None,
    balance: Balance | None, operations: int, *, fails: bool,
) -> Sheet:  # fmt: skip
    """Returns the sheet of a pass; without one if there is no error to explain."""
    errors = tuple(StageError(x.name, x.non_finite, x.error, x.fails) for x in found)
    if balance is None or stage is None or not balance.total:
        return Sheet(function, low, "", errors, (), (), (), 0.0, operations)
    total = balance.total
    shares = [_share(*key, amount / total) for key, amount in balance.shares.items()]
    iterations = [(*key, amount / total) for key, amount in balance.iterations.items()]
    hidden = [] if fails else [_hidden(e) for e in balance.hidden()]
    return Sheet(
        function, low, stage.name, errors, tuple(sorted(shares, key=lambda x: -abs(x.share))),
        tuple(sorted(iterations)), tuple(hidden), balance.residual, operations,
    )  # fmt: skip


def _hidden(equation: Equation) -> str:
    where = _share(equation, "rounding", 0.0).where
    return (
        f"{where}: the result of {equation.name} is wrong by half or more; the outputs don't show "
        "it, since what reads it is hidden behind larger numbers"
    )


def _share(what: Equation | Leaf, cause: str, share: float) -> Share:
    if isinstance(what, Leaf):
        return Share("", 0, "", "", what.name, "", "", cause, share)
    source = what.source
    own = what.caller or source or ("", 0, "")
    library = ""
    if source is not None and what.caller is not None:
        library = f"{_short(source[0])}:{source[1]}"
    return Share(
        *own, library, what.name, _scope(what.scope), what.direction, cause, share,
        tuple(_stack(what)),
    )  # fmt: skip


def _short(file: str) -> str:
    """Returns ``optax/transform.py`` for a file of an installed package."""
    for root in INSTALLED:
        if file.startswith(root):
            package = Path(file).relative_to(root).parts[0]
            return f"{package}/{Path(file).name}" if package != Path(file).name else package
    return "/".join(Path(file).parts[-2:])


def _scope(scope: str) -> str:
    """Returns a name stack without ``jvp``, ``transpose`` and other transformations."""
    while (shorter := re.sub(r"\b\w+\(([^()]*)\)", r"\1", scope)) != scope:
        scope = shorter
    return "/".join(filter(None, scope.split("/")))


def _stack(equation: Equation | None) -> Iterator[Frame]:
    frames: list[Frame] = []
    while equation is not None and not frames:
        for file, line, function in user_frames(equation.eqn):
            if file.startswith(HERE):
                break
            frames.append((function, file, line))
        equation = equation.within
    yield from reversed(frames)
