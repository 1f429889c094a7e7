"""`scalewise compare`: trains a program by several methods."""

import signal
import time
from contextlib import suppress
from pathlib import Path

import typer

from .._output import sentence
from .._user_file import InputError
from ._command import FAILED, refusal, tell
from ._program import corpus, find_program, load_program


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
    folder = out or Path(f"runs/{time.strftime('%Y-%m-%dT%H-%M-%S')}")
    with refusal(InputError, ValueError):
        file, text = find_program(program), corpus(data)
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise InputError(f"{str(folder)!r} isn't empty; expected a new or an empty folder")
        # JAX takes a second to import: not for --help
        from . import _compare, _methods

        methods = [_methods.method(name) for name in method or _methods.DEMO]
        if len({each.name for each in methods}) < len(methods):
            raise InputError(f"--method: one is given twice: {', '.join(m.name for m in methods)}")
        try:
            found = _compare.compare(
                load_program(file), methods, text, steps, seed=seed, seeds=seeds, out=folder,
                tell=_say,
            )  # fmt: skip
        except KeyboardInterrupt:
            tell("interrupted before the first step")
            raise typer.Exit(128 + signal.SIGINT) from None
    failure = found.summary["failure"]
    try:
        found.write(folder)
        written = [f"report: {folder}/report.html"]
    except OSError as error:
        failure, written = failure or sentence(error), []
    found.show()
    for line in written:
        typer.echo(line)
    if failure:
        tell(failure)
        raise typer.Exit(FAILED)
    if found.summary["interrupted"]:
        raise typer.Exit(128 + signal.SIGINT)


def _say(line: str) -> None:
    with suppress(OSError):  # a closed pipe doesn't end a long run
        typer.echo(line)
