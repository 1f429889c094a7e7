"""`scalewise recipes`: the recipes, and what each of them does."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

from ._refusal import refusal


def recipes(name: str | None = None) -> None:
    """List the recipes of autoscale and the optimizer states; docs/recipes.md has the sources.

    Args:
        name (NAME): A recipe to show as Python code that makes it.

    Example:
        scalewise recipes fp8
    """
    from .. import training
    from ..autoscaling.recipes import CATALOGUE, recipe

    if name is not None:
        with refusal(ValueError):
            typer.echo(repr(recipe(name)))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    table.add_column("what")
    states = [method for method in training.METHODS if method.startswith("state-")]
    for known in (*CATALOGUE, *states):
        table.add_row(known, training.METHODS[known].what)
    console = Console()
    console.width = min(console.width, 80)
    console.print(table)
