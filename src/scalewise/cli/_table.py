"""`scalewise table`: exact errors of functions and of the cast, over every input."""

import csv
import dataclasses
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from .._output import check_target, print_rows, replacing
from ._command import add, refusal

table = typer.Typer(
    help="Compute exact errors, over every input of a format.", no_args_is_help=True
)


def functions(
    names: list[str] | None = None,
    *,
    fmt: str = "fp16",
    domain: str = "all",
    to: Path | None = None,
) -> None:
    """Show errors of elementary functions: native arithmetic against float32 with one rounding.

    Args:
        domain (NAME): all: every finite input; normal: no zeros, no subnormals.
    """
    from ..ops import FunctionErrors, function_table

    with refusal(ValueError):
        _check(to)
        title = f"{fmt}: errors over every input"
        _show(title, FunctionErrors, function_table(fmt, names, domain), to)  # pyright: ignore[reportArgumentType]


def ranges(names: list[str] | None = None, *, fmt: str = "fp16", to: Path | None = None) -> None:
    """Show inputs of a format at which functions overflow, or become zero."""
    from ..ops import FunctionRange, function_ranges

    with refusal(ValueError):
        _check(to)
        title = f"{fmt}: intervals of inputs that overflow or become zero"
        _show(title, FunctionRange, function_ranges(fmt, names), to)


def cast(*, fmt: str = "fp16", distribution: str = "float32", to: Path | None = None) -> None:
    """Show errors of the cast from float32, over every float32 number in the format's range.

    Args:
        distribution (NAME): float32: every number; log_uniform: expected errors of samples.
    """
    from ..ops import CastErrors, cast_table

    with refusal(ValueError):
        _check(to)
        title = f"float32 to {fmt}: errors over every number"
        if distribution == "log_uniform":
            title = f"real numbers to {fmt}: expected errors of log-uniform samples"
        _show(title, CastErrors, cast_table(fmt, distribution), to)  # pyright: ignore[reportArgumentType]


for command in (functions, ranges, cast):
    add(table, command)


def _check(to: Path | None) -> None:
    """Checks that the file can be written, before the table takes minutes to compute."""
    if to is not None:
        check_target(to)


def _show(title: str, kind: Any, records: Iterable[Any], to: Path | None) -> None:
    columns = [f.name for f in dataclasses.fields(kind)]
    rows = [dataclasses.astuple(record) for record in records]
    heads = [column.replace("_", " ") for column in columns]
    right = set(heads) - {"name", "arithmetic", "domain"}
    print_rows(Console(), heads, [list(map(_cell, row)) for row in rows], title=title, right=right)
    if to is not None:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows([columns, *rows])
        with replacing(to) as file:
            file.write(text.getvalue().encode())


def _cell(value: Any) -> str:
    if isinstance(value, tuple):  # intervals
        return "; ".join(
            f"{low:.4g}" if low == high else f"{low:.4g}..{high:.4g}" for low, high in value
        )
    return f"{value:.4g}" if isinstance(value, float) else str(value)
