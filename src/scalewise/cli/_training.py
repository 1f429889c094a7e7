"""`scalewise compare` and `train`: train one program by several methods, or by one."""

import signal
from pathlib import Path

import typer

from ._command import FAILED, check_program, refusal, tell


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
                program, method or training.DEMO, data=data, steps=steps, seed=seed, seeds=seeds,
                out=out or training.Folder.timestamped("runs"),
            )  # fmt: skip
        except KeyboardInterrupt as error:
            tell("interrupted before the first step")
            raise typer.Exit(128 + getattr(error, "signal", signal.SIGINT)) from None
    if comparison.failure:
        tell(comparison.failure)
        raise typer.Exit(FAILED)
    if comparison.interrupted:
        raise typer.Exit(128 + comparison.signal)


STATE = {"weights": r"^\.params", "optimizer": r"^\.optimizer.*\.(mu|nu|trace|m|v)\b"}


def train(
    program: str,
    *,
    method: str = "float32",
    data: Path | None = None,
    steps: int = 300,
    seed: int = 0,
    out: Path | None = None,
    resume: bool = False,
    every: int = 100,
    clip: float | None = None,
    accumulate: int | None = None,
    weights: str | None = None,
    allow_changes: bool = False,
    monitor: str | None = None,
) -> None:
    """Train a program by a method or policy; a killed run resumes to the same bits.

    Args:
        method (NAME): A recipe, another method, or a policy such as p=f32,c=bf16,o=f32.
        steps (>= 1): The number of steps in all.
        seed: The seed of parameters and batches.
        out (FOLDER): A folder for metrics and checkpoints. Default: runs/<time>.
        resume: Continue the run in --out, or begin it.
        every (>= 1): The number of steps between two checkpoints.
        clip: Clip gradients to this global norm.
        accumulate: The number of microbatches in a step.
        weights (NAME): How narrow weights are updated: master, stochastic, compensated or
            plain.
        allow_changes: Resume with an edited program or other settings.
        monitor (FORMAT): Measure weights and moments in this format every 10 steps.

    Example:
        scalewise train gpt --method fp8 --steps 300 --out runs/fp8 --resume
    """
    with refusal(ValueError):
        check_program(program, data)
    from scalewise import training  # JAX takes a second to import: not for --help
    from scalewise.auditing import Monitor

    with refusal(training.InputError, ValueError):
        watch = Monitor(monitor, groups=STATE).numbers if monitor else None
        try:
            ended = training.train(
                program, method, data=data, steps=steps, seed=seed,
                out=out if out or resume else training.Folder.timestamped("runs"), resume=resume,
                every=every, clip=clip, accumulate=accumulate, weights=weights, watch=watch,
                allow_changes=allow_changes,
            )  # fmt: skip
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
