"""The `scalewise` command: thin, every subcommand calls one public function."""

import typer

from ._compare import compare

app = typer.Typer(
    name="scalewise",
    help="Low-precision arithmetic for JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("compare")(compare)


@app.callback()
def callback() -> None:
    """Low-precision arithmetic for JAX."""


def main() -> None:
    """Entry point of the console script."""
    app()
