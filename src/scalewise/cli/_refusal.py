"""What can't be used is refused in one sentence, without a traceback, with exit code 2."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def refusal(*kinds: type[Exception]) -> Iterator[None]:
    """Turns exceptions of these kinds into their message on stderr and exit code 2."""
    try:
        yield
    except kinds as error:
        typer.echo(f"scalewise: {error}", err=True)
        raise typer.Exit(2) from None
