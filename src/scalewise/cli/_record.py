"""`scalewise record`: records what a device computes in a function, equation by equation."""

from pathlib import Path

import typer

from ._results import check, computed


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
    files = None if out is None else [out]
    check(target, files)
    # JAX takes a second to import: not for --help
    from scalewise.auditing import record as recorded
    from scalewise.auditing import recordable

    recording = computed(
        lambda f: recorded(f, fused=fused),
        target, args, seed, files, recordable, everything=everything,
    )  # fmt: skip
    if recording.first_non_finite is not None:
        raise typer.Exit(1)
