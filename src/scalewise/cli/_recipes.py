"""`scalewise recipes`: the recipes, and what each of them does."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .._output import print_table
from ._refusal import refusal


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="A recipe, to show as Python code that makes it.")
    ] = None,
) -> None:
    """List the recipes of autoscale and the optimizer states; docs/recipes.md has the sources."""
    from .. import training
    from ..autoscale.recipes import CATALOGUE, recipe

    if name is not None:
        with refusal(ValueError):
            typer.echo(repr(recipe(name)))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("recipe", "what"):
        table.add_column(heading)
    states = [method for method in training.METHODS if method.startswith("state-")]
    for known in (*CATALOGUE, *states):
        table.add_row(known, training.METHODS[known].what)
    print_table(Console(), table)
