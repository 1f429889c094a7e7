"""Errors that a user can mend: one sentence on stderr, no traceback, and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import typer

from .._output import TargetError, sentence

UNUSABLE, FAILED = 2, 1  # exit codes: bad input; input was good but the result can't be written


@contextmanager
def refusal(*kinds: type[Exception]) -> Iterator[None]:
    """Turns exceptions of these kinds into their message on stderr and exit code 2.

    Errors of the operating system and targets that can't be written are of them always.
    """
    try:
        yield
    except BrokenPipeError:  # whoever read the output has left: nobody is to be told
        raise
    except OSError as error:
        tell(sentence(error))
        raise typer.Exit(UNUSABLE) from None
    except (TargetError, *kinds) as error:
        tell(str(error))
        raise typer.Exit(UNUSABLE) from None


def tell(message: str) -> None:
    """Prints one sentence to stderr, if there still is one."""
    with suppress(OSError, ValueError):
        typer.echo(f"scalewise: {' '.join(message.split())}", err=True)


def run(app: Callable[[], Any]) -> None:
    """Runs the application so that no state of its output streams shows a traceback.

    Characters that the terminal's encoding doesn't have become ASCII. Where the output can't be
    written, the command ends with one sentence; a closed pipe (``| head``) ends it without.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.reconfigure(errors="scalewise.ascii")  # pyright: ignore
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            tell(f"the output can't be written: {sentence(error)}")
        for stream in (sys.stdout, sys.stderr):
            _discard(stream)
        sys.exit(FAILED)


def _discard(stream: TextIO | None) -> None:
    """Sends what a stream still holds nowhere, or Python complains about it at exit."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
