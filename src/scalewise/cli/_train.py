"""`scalewise train`: one program under one recipe, resumable at any moment."""

from pathlib import Path
from typing import Annotated

import typer

from ._refusal import FAILED, refusal, tell

STATE = {"weights": r"^\.params", "optimizer": r"^\.optimizer.*\.(mu|nu|trace|m|v)\b"}


def train(
    program: Annotated[
        str, typer.Argument(help="An example (gpt, cnn, lstm, mlp, ...), or a file of your own.")
    ],
    recipe: Annotated[
        str, typer.Option(help="A recipe, or a policy such as p=f32,c=bf16,o=f32.")
    ] = "float32",
    data: Annotated[
        Path | None,
        typer.Option(help="A text file or folder. Default: the sources of Python's library."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps in all.")] = 300,
    seed: Annotated[int, typer.Option(help="Of parameters and batches.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: runs/<time>.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out, or begin it.")
    ] = False,
    every: Annotated[int, typer.Option(help="Steps between two checkpoints.")] = 100,
    clip: Annotated[float | None, typer.Option(help="Largest global norm of gradients.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Microbatches to a step.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="master, stochastic, compensated or plain.")
    ] = None,
    monitor: Annotated[
        str | None,
        typer.Option(help="A format: note every 10 steps how weights and moments lie in it."),
    ] = None,
) -> None:
    """Train a program under a recipe or policy; a run that was killed resumes to the same bits."""
    from scalewise import training  # JAX takes a second to import: not for --help
    from scalewise.audit import Monitor

    with refusal(training.InputError, ValueError):
        watch = Monitor(monitor, groups=STATE).numbers if monitor else None
        try:
            ended = training.train(
                program,
                recipe,
                data=data,
                steps=steps,
                seed=seed,
                out=out,
                resume=resume,
                every=every,
                clip=clip,
                accumulate=accumulate,
                weights=weights,
                watch=watch,
            )
        except (training.CheckpointError, training.TrainingError) as error:
            tell(str(error))
            raise typer.Exit(FAILED) from None
    typer.echo(
        f"{ended.program}, {ended.recipe}: {ended.steps} steps, loss {ended.loss:.4f}, "
        f"scale {ended.scale:g}, {ended.skipped} skipped; state {ended.digest[:16]}"
    )
    typer.echo(f"run: {ended.folder}")
    if ended.interrupted:
        raise typer.Exit(128 + ended.signal)
