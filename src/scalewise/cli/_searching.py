"""What `tune` and `plan` have in common: they run a function's file, print and write the result."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from .._output import check_target as check_file
from ._refusal import check_target, refusal


def check(target: str, out: list[Path] | None) -> None:
    """Refuses a target that isn't FILE:FUNCTION, and files that can't be written."""
    with refusal(ValueError):
        check_target(target)
        for path in out or ():
            check_file(path)


def searched(
    search: Callable[[Callable], Callable[..., Any]],
    target: str,
    args: str | None,
    seed: int,
    out: list[Path] | None,
) -> Any:
    """Prints what a search finds for a user's function, writes it to files, and returns it."""
    from scalewise.auditing import arguments, load_function, user_errors, writable

    with refusal(ValueError, TypeError, NotImplementedError):
        paths = [writable(path) for path in out or ()]
        function, module = load_function(target)
        run = search(function)
        positional, keywords = arguments(function, module, args, seed)
        with user_errors(module):
            found = run(*positional, **keywords)
        saved = [found.save(path) for path in paths]
        found.show()
        for path in saved:
            typer.echo(f"wrote {path}")
        return found
