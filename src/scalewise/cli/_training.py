"""`scalewise compare`: trains a program by several methods."""

import signal
import time
from itertools import count
from pathlib import Path

import typer

from .._output import sentence
from .._user_file import InputError
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
    with refusal(InputError, ValueError):
        check_program(program, data)
        folder = _new_folder(out)
        # JAX takes a second to import: not for --help
        from . import _compare, _methods, _program

        methods = [_methods.method(name) for name in method or _methods.DEMO]
        if len({each.name for each in methods}) < len(methods):
            raise InputError(f"--method: one is given twice: {', '.join(m.name for m in methods)}")
        try:
            found = _compare.compare(
                _program.load_program(program), methods, _program.corpus(data), steps,
                seed=seed, seeds=seeds, out=folder,
            )  # fmt: skip
        except KeyboardInterrupt:
            tell("interrupted before the first step")
            raise typer.Exit(128 + signal.SIGINT) from None
    failure = found.summary["failure"]
    try:
        found.write(folder)
        typer.echo(f"report: {folder}/report.html")
    except OSError as error:
        failure = failure or sentence(error)
    if failure:
        tell(failure)
        raise typer.Exit(FAILED)
    if found.summary["interrupted"]:
        raise typer.Exit(128 + signal.SIGINT)


def _new_folder(out: Path | None) -> Path:
    """Returns the folder, which is new or empty; by default a new one named after the time."""
    if out is not None:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise InputError(f"{str(out)!r} isn't empty; expected a new or an empty folder")
        return out
    base = f"runs/{time.strftime('%Y-%m-%dT%H-%M-%S')}"
    names = (Path(base + (f"-{n}" if n > 1 else "")) for n in count(1))
    return next(name for name in names if not name.exists())
