"""Runs a function of a user's file, and prints and writes results."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from .._output import check_target as check_file
from .._user_file import function_file
from ._refusal import refusal


def check(target: str, out: Sequence[Path] | None) -> None:
    """Refuses a missing file of a function or model, and files that can't be written, before JAX.

    JAX takes a second to import.
    """
    with refusal(ValueError):
        config = target.removeprefix("hf:")
        if config == target:
            function_file(target)
        elif not Path(config).exists():
            raise ValueError(f"no file at {config!r}: expected a config of transformers (.json)")
        for path in out or ():
            check_file(path)


def computed(
    compute: Callable[[Callable], Callable[..., Any]],
    target: str,
    args: str | None,
    seed: int,
    out: Sequence[Path] | None,
    usable: Callable[[Path], Path],
    **options: Any,
) -> Any:
    """Prints what is computed of a user's function, writes it to files, and returns it."""
    from scalewise.auditing import arguments, load_function, user_errors

    with refusal(ValueError, TypeError, NotImplementedError):
        paths = [usable(path) for path in out or ()]
        function, module = load_function(target)
        run = compute(function)
        positional, keywords = arguments(function, module, args, seed)
        with user_errors(module):
            found = run(*positional, **keywords)
        shown(found, paths, **options)
        return found


def shown(report: Any, paths: Sequence[Path] | None, json: bool = False, **options: Any) -> None:
    """Prints a report, after it is written to files; also one that a full disk doesn't take."""
    failed: OSError | None = None
    for path in paths or ():
        try:
            report.save(path)
        except OSError as error:
            failed = failed or error
    if json:
        typer.echo(report.json())
    else:
        report.show(**options)
    if failed is not None:
        raise failed
    if not json:
        for path in paths or ():
            typer.echo(f"wrote {path}")
