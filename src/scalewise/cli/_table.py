"""`scalewise table`: exact errors of functions, over every input."""

import csv
import dataclasses
import io
from pathlib import Path

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
        if to is not None:  # before the table takes minutes to compute
            check_target(to)
        columns = [f.name for f in dataclasses.fields(FunctionErrors)]
        records = function_table(fmt, names, domain)  # pyright: ignore[reportArgumentType]
        rows = [dataclasses.astuple(record) for record in records]
        heads = [column.replace("_", " ") for column in columns]
        right = set(heads) - {"name", "arithmetic", "domain"}
        cells = [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in row] for row in rows]
        print_rows(Console(), heads, cells, title=f"{fmt}: errors over every input", right=right)
        if to is not None:
            text = io.StringIO(newline="")
            csv.writer(text, lineterminator="\n").writerows([columns, *rows])
            with replacing(to) as file:
                file.write(text.getvalue().encode())


add(table, functions)
