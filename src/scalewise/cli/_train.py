"""`scalewise train`: trains one program by one method; a killed run can be resumed."""

from pathlib import Path
from typing import Annotated

import typer

from ._options import Data, Program
from ._refusal import FAILED, check_program, refusal, tell

STATE = {"weights": r"^\.params", "optimizer": r"^\.optimizer.*\.(mu|nu|trace|m|v)\b"}


def train(
    program: Program,
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="A recipe, another method, or a policy such as p=f32,c=bf16,o=f32."
        ),
    ] = "float32",
    data: Data = None,
    steps: Annotated[int, typer.Option(min=1, help="The number of steps in all.")] = 300,
    seed: Annotated[int, typer.Option(help="The seed of parameters and batches.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="A folder for metrics and checkpoints. Default: runs/<time>."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out, or begin it.")
    ] = False,
    every: Annotated[
        int, typer.Option(min=1, help="The number of steps between two checkpoints.")
    ] = 100,
    clip: Annotated[float | None, typer.Option(help="Clip gradients to this global norm.")] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="The number of microbatches in a step.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How narrow weights are updated: master, stochastic, compensated or plain.",
        ),
    ] = None,
    allow_changes: Annotated[
        bool,
        typer.Option("--allow-changes", help="Resume with an edited program or other settings."),
    ] = False,
    monitor: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT", help="Measure weights and moments in this format every 10 steps."
        ),
    ] = None,
) -> None:
    """Train a program by a method or policy; a killed run resumes to the same bits."""
    with refusal(ValueError):
        check_program(program, data)
    from scalewise import training  # JAX takes a second to import: not for --help
    from scalewise.auditing import Monitor

    with refusal(training.InputError, ValueError):
        watch = Monitor(monitor, groups=STATE).numbers if monitor else None
        try:
            ended = training.train(
                program,
                method,
                data=data,
                steps=steps,
                seed=seed,
                out=out if out or resume else training.Folder.timestamped("runs"),
                resume=resume,
                every=every,
                clip=clip,
                accumulate=accumulate,
                weights=weights,
                watch=watch,
                allow_changes=allow_changes,
            )
        except (training.CheckpointError, training.TrainingError) as error:
            tell(str(error))
            raise typer.Exit(FAILED) from None
    typer.echo(
        f"{ended.program}, {ended.method}: {ended.steps} steps, loss {ended.loss:.4f}, "
        f"scale {ended.scale:g}, {ended.skipped} skipped; state {ended.digest[:16]}"
    )
    typer.echo(f"run: {ended.folder}")
    if ended.interrupted:
        raise typer.Exit(128 + ended.signal)
