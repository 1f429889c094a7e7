"""`scalewise record`: records what a device computes in a function, equation by equation."""

from pathlib import Path
from typing import Annotated

import typer

from ._refusal import check_target, refusal


def record(
    target: Annotated[str, typer.Argument(help="path/to/file.py:function")],
    args: Annotated[
        str | None,
        typer.Option(help="A function of that file that makes the arguments, as a tuple or dict."),
    ] = None,
    fused: Annotated[
        bool, typer.Option("--fused", help="Read the numbers within one compiled program.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of random arguments.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="A file to write, .safetensors, for `scalewise diff`.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show all arrays.")] = False,
) -> None:
    """Show the first non-finite number that a function computes on this device, and its numbers.

    Exits with 1 if an operation makes a non-finite number, with 2 if the run or writing fails.
    """
    with refusal(ValueError):
        check_target(target)
    # JAX takes a second to import: not for --help
    from scalewise.audit import arguments, load_function, recordable, user_errors
    from scalewise.audit import record as run_recorded

    with refusal(ValueError, TypeError):
        path = None if out is None else recordable(out)
        function, module = load_function(target)
        positional, keywords = arguments(function, module, args, seed)
        with user_errors(module):
            recording = run_recorded(function, fused=fused)(*positional, **keywords)
        if path is not None:
            recording.save(path)
        recording.show(everything=everything)
        if path is not None:
            typer.echo(f"wrote {path}")
    if recording.first_non_finite is not None:
        raise typer.Exit(1)
