"""`scalewise compare`: trains one program by several methods, side by side."""

import signal
from pathlib import Path

import typer

from ._refusal import FAILED, check_program, refusal, tell


def compare(
    program: str,
    *,
    method: list[str] | None = None,
    data: Path | None = None,
    steps: int = 300,
    seed: int = 0,
    seeds: int = 1,
    out: Path | None = None,
) -> None:
    """Train a program by several methods; show losses, times and memory side by side.

    Args:
        method (NAME): A recipe or another method; may be given again. Default: float32,
            fp16-plain, fp16, fp8 and fp8-narrow-state.
        steps (>= 1): The number of steps of each method.
        seed: The seed of parameters and batches.
        seeds (>= 1): The number of seeds, counted up from --seed.
        out (FOLDER): A new or empty folder for the files. Default: runs/<time>.

    Example:
        scalewise compare gpt --method float32 --method fp8 --steps 100
    """
    with refusal(ValueError):
        check_program(program, data)
    from scalewise import training  # JAX takes a second to import: not for --help

    with refusal(training.InputError):
        try:
            comparison = training.compare(
                program,
                method or training.DEMO,
                data=data,
                steps=steps,
                seed=seed,
                seeds=seeds,
                out=out or training.Folder.timestamped("runs"),
            )
        except KeyboardInterrupt as error:
            tell("interrupted before the first step")
            raise typer.Exit(128 + getattr(error, "signal", signal.SIGINT)) from None
    if comparison.failure:
        tell(comparison.failure)
        raise typer.Exit(FAILED)
    if comparison.interrupted:
        raise typer.Exit(128 + comparison.signal)
