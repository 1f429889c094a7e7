"""The operations of a report as a table, grouped by scope, and as CSV."""

from __future__ import annotations

import csv
import io

from .._run._equation_statistics import Equations, EquationStatistics
from ._trace import module

COUNTS = (
    "elements", "overflowed", "flushed", "subnormal", "nan", "swamped", "added", "cancelled",
    "operands", "operands_saturated", "operands_flushed",
)  # fmt: skip
COLUMNS = (
    "index", "primitive", "shape", "file", "line", "function", "caller", "scope", "direction",
    *COUNTS, "amax", "introduced", "inherited", "sqnr", "ulps",
)  # fmt: skip


def by_scope(equations: Equations) -> list[tuple[str, list[EquationStatistics]]]:
    found: dict[str, list[EquationStatistics]] = {}
    for e in equations:
        found.setdefault(module(e), []).append(e)
    return list(found.items())


def as_csv(equations: Equations) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for e in equations:
        shape = "x".join(map(str, e.shape))
        place = (e.file or "", e.line, e.function, e.caller, e.scope, e.part)
        counts = [int(e[name]) for name in COUNTS]
        errors = (e["amax"], e.introduced, e.inherited, e.sqnr, e["ulps"])
        writer.writerow((e.index, e.primitive, shape, *place, *counts, *errors))
    return stream.getvalue()
