"""`scalewise compare`: trains one program by several methods, side by side."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from ._options import Data, Program
from ._refusal import FAILED, check_program, refusal, tell


def compare(
    program: Program,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A recipe or another method; may be given again. Default: float32, fp16-plain, "
            "fp16, fp8 and fp8-narrow-state.",
        ),
    ] = None,
    data: Data = None,
    steps: Annotated[int, typer.Option(min=1, help="The number of steps of each method.")] = 300,
    seed: Annotated[int, typer.Option(help="The seed of parameters and batches.")] = 0,
    seeds: Annotated[
        int, typer.Option(min=1, help="The number of seeds, counted up from --seed.")
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="A new or empty folder for the files. Default: runs/<time>."
        ),
    ] = None,
) -> None:
    """Train a program by several methods; show losses, times and memory side by side."""
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
