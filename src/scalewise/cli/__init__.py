"""The `scalewise` command: every subcommand calls one public function."""

from importlib.metadata import version
from typing import Annotated

import typer

from ._checkpoints import cast, check, inspect
from ._command import add, run
from ._formats import formats, recipes
from ._functions import audit, compare_programs, plan, record
from ._training import compare

HELP = {"help_option_names": ["--help", "-h"]}
app = typer.Typer(
    name="scalewise",
    help="Low-precision arithmetic for JAX.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP,
    rich_markup_mode=None,  # its boxes show the types of Python beside each option
)
for command in (
    audit,
    plan,
    record,
    compare_programs,
    compare,
    cast,
    check,
    formats,
    recipes,
    inspect,
):
    add(app, command)


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
