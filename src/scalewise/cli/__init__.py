"""The `scalewise` command: every subcommand calls one public function."""

from importlib.metadata import version
from typing import Annotated

import typer

from ._audit import audit, diff
from ._cast import cast
from ._compare import compare
from ._formats import formats, inspect
from ._recipes import recipes
from ._record import record
from ._refusal import run
from ._table import table
from ._train import train

app = typer.Typer(
    name="scalewise",
    help="Low-precision arithmetic for JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("audit")(audit)
app.command("record")(record)
app.command("diff")(diff)
app.command("compare")(compare)
app.command("train")(train)
app.command("cast")(cast)
app.command("formats")(formats)
app.command("recipes")(recipes)
app.add_typer(table, name="table")
app.command("inspect", context_settings={"ignore_unknown_options": True})(inspect)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("scalewise"))
        raise typer.Exit


@app.callback()
def callback(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Low-precision arithmetic for JAX."""


def main() -> None:
    """Entry point of the console script."""
    run(app)
