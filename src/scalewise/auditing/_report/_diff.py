"""Comparison of two saved reports: findings gone and new, and where the error changed."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from rich.console import Console

from ..._check import checked
from ..._output import Printed, TargetError, check_source
from ..._output._text import Text
from ..._types import Json
from ..._user_file import InputError

REQUIRED = ("function", "low", "findings", "equations", "error")
EXPECTED = "expected a file that report.save wrote"
Place = tuple[str, int, str, str]  # file, line, primitive, direction


@dataclasses.dataclass(frozen=True)
class Difference(Printed):
    """Changes from one report to another.

    Attributes:
        names: function and format of each report.
        errors: of the outputs in each report: (non-finite numbers, relative error).
        gone, new, kept: findings by kind and place, a sentence each.
        moved: operations whose error against the reference run changed at least twofold: (place,
            before, after), the largest change first.
    """

    names: tuple[str, str]
    errors: tuple[tuple[int, float], tuple[int, float]]
    gone: tuple[str, ...]
    new: tuple[str, ...]
    kept: tuple[str, ...]
    moved: tuple[tuple[str, float, float], ...]

    def show(self, console: Console | None = None) -> None:
        """Prints the comparison."""
        console = console or Console()
        before, after = (f"{n:,} not finite" if n else f"{x:.2g}" for n, x in self.errors)
        console.print(Text(f"{self.names[0]} -> {self.names[1]}: error {before} -> {after}"))
        for mark, style, lines in (("-", "green", self.gone), ("+", "red", self.new),
                                   ("=", "dim", self.kept)):  # fmt: skip
            for line in lines:
                console.print(Text(f"{mark} {line}", style=style))
        for place, old, new in self.moved[:10]:
            console.print(Text(f"  {place}: error {old:.2g} -> {new:.2g}"))
        if not (self.gone or self.new or self.moved):
            console.print("No finding is gone or new; no operation's error changed twofold.")


def load_report(path: str | os.PathLike[str]) -> dict[str, Json]:
    path = Path(path)
    try:
        check_source(path)
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"can't read {str(path)!r}: {error.strerror}") from None
    except TargetError as error:
        raise InputError(str(error)) from None
    except (ValueError, RecursionError):
        raise InputError(f"{str(path)!r} is no JSON: expected a report saved as .json") from None
    if not isinstance(data, dict) or any(name not in data for name in REQUIRED):
        raise InputError(f"{str(path)!r} is no report: {EXPECTED}")
    return data


@checked
def diff(before: str | os.PathLike[str], after: str | os.PathLike[str]) -> Difference:
    """Compares two reports that were saved as JSON.

    Args:
        before, after: paths.

    Raises:
        InputError: a file can't be read, or is no report.
    """
    (name, error, old, places), (name_after, error_after, new, places_after) = (
        _saved(before), _saved(after)
    )  # fmt: skip
    return Difference(
        names=(name, name_after),
        errors=(error, error_after),
        gone=tuple(old[k] for k in old if k not in new),
        new=tuple(new[k] for k in new if k not in old),
        kept=tuple(new[k] for k in new if k in old),
        moved=_moved(places, places_after),
    )


def _saved(
    path: str | os.PathLike[str],
) -> tuple[str, tuple[int, float], dict[tuple, str], dict[Place, float]]:
    """Returns a report's name, its error, its findings, and the error at each place."""
    report = load_report(path)
    try:
        return (
            f"{report['function']} in {report['low']}",
            (int(report["error"]["non_finite"]), float(report["error"]["relative"])),
            _findings(report),
            _errors(report),
        )
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InputError(
            f"{str(path)!r} is no report: {EXPECTED} ({type(error).__name__}: {error})"
        ) from None


def _findings(report: dict[str, Json]) -> dict[tuple, str]:
    return {
        (f["kind"], f["file"], f["line"], f["primitive"], f["direction"]):
            f"{f['kind']}  {Path(f['file'] or '?').name}:{f['line']}  {f['primitive']}, "
            f"{f['direction']}: {f['evidence']}"
        for f in report["findings"]
    }  # fmt: skip


def _errors(report: dict[str, Json]) -> dict[Place, float]:
    found: dict[Place, float] = {}
    for equation in report["equations"]:
        numbers = equation["numbers"]
        noise, signal = float(numbers["inherited2"]), float(numbers["reference2"])
        file, line = str(equation["file"] or "?"), int(equation["line"])
        key = (file, line, str(equation["primitive"]), str(equation["direction"]))
        if min(noise, signal) < 0:
            raise ValueError(f"a squared error is {min(noise, signal)}")
        if signal:
            found[key] = max(found.get(key, 0.0), (noise / signal) ** 0.5)
    return found


def _moved(
    old: dict[Place, float], new: dict[Place, float]
) -> tuple[tuple[str, float, float], ...]:
    def factor(key: Place) -> float:
        a, b = old[key] + 1e-12, new[key] + 1e-12
        return max(a / b, b / a)

    places = sorted((k for k in old if k in new and factor(k) >= 2), key=factor, reverse=True)
    return tuple((f"{Path(k[0]).name}:{k[1]} {k[2]}, {k[3]}", old[k], new[k]) for k in places)
