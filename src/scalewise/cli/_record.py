"""`scalewise record`: records what a device computes in a function, equation by equation."""

from pathlib import Path

import typer

from .._output import check_target as check_file
from ._refusal import check_target, refusal


def record(
    target: str,
    *,
    args: str | None = None,
    fused: bool = False,
    seed: int = 0,
    out: Path | None = None,
    everything: bool = False,
) -> None:
    """Show the first non-finite number that a function computes on this device, and its numbers.

    Exits with 1 if an operation makes a non-finite number, with 2 if the run or writing fails.

    Args:
        fused: Read the numbers within one compiled program.
        out (FILE): A .safetensors file to write, for `scalewise diff`.

    Example:
        scalewise record model.py:train_step --out here.safetensors
    """
    with refusal(ValueError):
        check_target(target)
        if out is not None:
            check_file(out)
    # JAX takes a second to import: not for --help
    from scalewise.auditing import arguments, load_function, recordable, user_errors
    from scalewise.auditing import record as run_recorded

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
