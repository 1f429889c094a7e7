"""The operations of a report as a table: by scope, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from ...autoscale import scope_parts
from .._run._rows import Row

COUNTS = ("elements", "overflowed", "flushed", "subnormal", "nan", "swamped", "added", "cancelled")
COLUMNS = (
    "index", "primitive", "shape", "file", "line", "function", "caller", "scope", "direction",
    *COUNTS, "amax", "introduced", "inherited", "sqnr", "ulps",
)  # fmt: skip


def by_scope(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows by the user's own names around them, or else by the function that they stand in."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        name = "/".join(scope_parts(row.scope)) or row.function or "elsewhere"
        found.setdefault(name, []).append(row)
    return list(found.items())


def as_csv(rows: Sequence[Row]) -> str:
    """One line for each operation, with a head."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        shape = "x".join(map(str, row.shape))
        place = (row.file or "", row.line, row.function, row.caller, row.scope, row.direction)
        counts = [int(row[name]) for name in COUNTS]
        errors = (row["amax"], row.introduced, row.inherited, row.sqnr, row["ulps"])
        writer.writerow((row.index, row.primitive, shape, *place, *counts, *errors))
    return stream.getvalue()
