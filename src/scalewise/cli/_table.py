"""`scalewise table`: exact errors of functions and of the cast, over every input."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from .._output import as_csv, check_target, print_rows, replacing
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
    from ..ops import function_table

    _show(f"{fmt}: errors over every input", to, lambda: function_table(fmt, names, domain))  # pyright: ignore[reportArgumentType]


def ranges(names: list[str] | None = None, *, fmt: str = "fp16", to: Path | None = None) -> None:
    """Show inputs of a format at which functions overflow, or become zero."""
    from ..ops import function_ranges

    title = f"{fmt}: intervals of inputs that overflow or become zero"
    _show(title, to, lambda: function_ranges(fmt, names))


def cast(*, fmt: str = "fp16", distribution: str = "float32", to: Path | None = None) -> None:
    """Show errors of the cast from float32, over every float32 number in the format's range.

    Args:
        distribution (NAME): float32: every number; log_uniform: expected errors of samples.
    """
    from ..ops import cast_table

    title = f"float32 to {fmt}: errors over every number"
    if distribution == "log_uniform":
        title = f"real numbers to {fmt}: expected errors of log-uniform samples"
    _show(title, to, lambda: cast_table(fmt, distribution))  # pyright: ignore[reportArgumentType]


for command in (functions, ranges, cast):
    add(table, command)


def _show(title: str, to: Path | None, compute: Callable[[], Iterable[Any]]) -> None:
    with refusal(ValueError):
        if to is not None:
            check_target(to)  # before the table takes minutes to compute
        records = list(compute())
        columns = [f.name for f in dataclasses.fields(records[0])]
        rows = [dataclasses.astuple(record) for record in records]
        heads = [column.replace("_", " ") for column in columns]
        right = set(heads) - {"name", "arithmetic", "domain"}
        print_rows(Console(), heads, [[*map(_cell, row)] for row in rows], title=title, right=right)
        if to is not None:
            with replacing(to) as file:
                file.write(as_csv(columns, rows).encode())


def _cell(value: Any) -> str:
    if isinstance(value, tuple):  # intervals
        return "; ".join(
            f"{low:.4g}" if low == high else f"{low:.4g}..{high:.4g}" for low, high in value
        )
    return f"{value:.4g}" if isinstance(value, float) else str(value)
