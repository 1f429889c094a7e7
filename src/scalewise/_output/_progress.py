"""The progress of a long call, on one line of a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[str], None]


@contextmanager
def progress(what: str) -> Iterator[Tell]:
    """Yields a function that shows what a call does now, beside its name and a spinner.

    The line is written to the standard error stream and is gone at the end. Nothing is written
    where the stream is no terminal.
    """
    from rich.console import Console

    from ._text import Text

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(Text(what)) as status:
        yield lambda text: status.update(Text(f"{what}: {text}", overflow="ellipsis"))
