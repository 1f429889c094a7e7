"""Reports errors in a user's input: one sentence on stderr and an exit code, no traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import typer

from .._extras import MissingPackageError
from .._output import TargetError, sentence

UNUSABLE, FAILED = 2, 1  # exit codes: bad input; good input, but the command failed


@contextmanager
def refusal(*kinds: type[Exception]) -> Iterator[None]:
    """Turns exceptions of these kinds into a message on stderr and exit code 2.

    So are, always, errors of the operating system and targets that can't be written.
    """
    try:
        yield
    except BrokenPipeError:  # the reader of the output has ended
        raise
    except OSError as error:
        tell(sentence(error))
        raise typer.Exit(UNUSABLE) from None
    except (TargetError, *kinds) as error:
        tell(str(error))
        raise typer.Exit(UNUSABLE) from None


def check_program(program: str, data: Path | None) -> None:
    """Raises ValueError if a program's file or its data is missing, before JAX is imported."""
    if program.endswith(".py") and not Path(program).is_file():
        raise ValueError(f"no program {program!r}; expected a Python file, or an example's name")
    if data is not None and not data.exists():
        raise ValueError(f"no data at {str(data)!r}; expected a text file or a folder")


def tell(message: str) -> None:
    """Prints one sentence to stderr, unless stderr is closed."""
    with suppress(OSError, ValueError):
        typer.echo(f"scalewise: {' '.join(message.split())}", err=True)


def run(app: Callable[[], object]) -> None:
    """Runs the application; errors of its output streams never show a traceback.

    Characters that the terminal's encoding doesn't have become ASCII. If the output can't be
    written, the command ends with one sentence; if a pipe is closed (``| head``), with none.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.reconfigure(errors="scalewise.ascii")  # pyright: ignore
    try:
        try:
            app()
        finally:
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
    except MissingPackageError as error:
        tell(str(error))
        sys.exit(UNUSABLE)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            tell(f"the output can't be written: {sentence(error)}")
        for stream in (sys.stdout, sys.stderr):
            _discard(stream)
        sys.exit(FAILED)


def _discard(stream: TextIO | None) -> None:
    """Discards what a stream still holds, which Python would try to write at exit."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
