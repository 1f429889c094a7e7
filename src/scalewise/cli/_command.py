"""Registers subcommands by their docstrings; their errors are a sentence and an exit code."""

from __future__ import annotations

import inspect
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TextIO, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from .._extras import MissingPackageError
from .._output import TargetError, sentence
from .._output import check_target as check_file
from .._user_file import function_file

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


def unused(options: Mapping[str, Any], whose: str) -> None:
    """Raises ValueError if options that only other inputs take are given, by their parameters'
    names."""
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if given:
        raise ValueError(f"{', '.join(given)}: for {whose} only")


def check_program(program: str, data: Path | None) -> None:
    """Raises ValueError if a program's file or its data is missing, before JAX is imported."""
    if program.endswith(".py") and not Path(program).is_file():
        raise ValueError(f"no program {program!r}; expected a Python file, or an example's name")
    if data is not None and not data.exists():
        raise ValueError(f"no data at {str(data)!r}; expected a text file or a folder")


def tell(message: str) -> None:
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
    except KeyboardInterrupt:  # while packages are imported, say
        sys.exit(128 + signal.SIGINT)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError):
            if not getattr(sys.stdout, "closed", False):  # by the user's program
                raise
            error = OSError(str(error))
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


def check(target: str, out: Sequence[Path] | None) -> None:
    """Refuses a missing file of a function, and files that can't be written, before JAX.

    JAX takes a second to import.
    """
    with refusal(ValueError):
        function_file(target)
        for path in out or ():
            check_file(path)


def computed(
    compute: Callable[[Callable], Callable[..., Any]],
    target: str,
    args: str | None,
    seed: int,
    out: Sequence[Path] | None,
    usable: Callable[[Path], Path],
    **options: Any,
) -> Any:
    """Prints what is computed of a user's function, writes it to files, and returns it."""
    from scalewise.auditing import arguments, load_function, user_errors

    with refusal(ValueError, TypeError, NotImplementedError):
        paths = [usable(path) for path in out or ()]
        function, module = load_function(target)
        run = compute(function)
        positional, keywords = arguments(function, module, args, seed)
        with user_errors(module):
            found = run(*positional, **keywords)
        shown(found, paths, **options)
        return found


def shown(report: Any, paths: Sequence[Path] | None, json: bool = False, **options: Any) -> None:
    """Writes a report to files, then prints it: the terminal may be gone."""
    saved = [_saved(report, path) for path in paths or ()]
    if json:
        typer.echo(report.json())
    else:
        report.show(**options)
        for path in filter(None, saved):
            typer.echo(f"wrote {path}")
    if None in saved:
        raise typer.Exit(UNUSABLE)


def _saved(report: Any, path: Path) -> Path | None:
    """Writes the report, or tells why that fails: it is printed in any case."""
    try:
        return report.save(path)
    except (OSError, TargetError) as error:
        tell(sentence(error) if isinstance(error, OSError) else str(error))
    except Exception as error:
        tell(f"{path} is not written: {type(error).__name__}: {error}")
    return None


ENTRY = re.compile(r"^    (\w+)(?: \(([^)]+)\))?: (.*(?:\n {8}.*)*)", re.M)
NAMED = {int: "NUMBER", float: "NUMBER", str: "NAME"}  # in place of Typer's <int range>
SHARED = """
    target (FILE:FUNCTION): A function of a Python file, model.py:train_step.
    args (FUNCTION): A function of that file that returns the arguments, as a tuple or dict.
        Default: random arrays, if the function's annotations have their shapes.
    seed: The seed of random arguments.
    program (PROGRAM): A Python file with init, train_step and batches, or an example (gpt, mlp,
        ...).
    data (PATH): A text file or folder. Default: the sources of Python's library.
    out (FILE): A file to write the report to, .html or .json, for some .csv; may be given again.
    everything (--all): Show all rows, also benign ones.
    json: Print JSON.
    fmt (--format NAME): The name of a format.
"""


class _Command(TyperCommand):
    """A command whose help shows no types of Python behind the names of arguments."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write = formatter.write_dl
        formatter.write_dl = lambda rows, *args, **options: write(
            [(name.partition(" <")[0], words) for name, words in rows], *args, **options
        )
        super().format_options(ctx, formatter)


def add(app: typer.Typer, command: Callable[..., None]) -> None:
    """Registers a function as the subcommand of its name.

    A line of ``Args`` in its docstring, or of :data:`SHARED`, is ``name (--option METAVAR >= 1):
    Sentence.`` with the names of an option if they aren't the parameter's own, and the smallest
    number that it takes. Keyword-only parameters are options, others arguments.
    """
    text, _, example = inspect.cleandoc(command.__doc__ or "").partition("\n\nExample:\n    ")
    text, _, listed = text.partition("\n\nArgs:\n")
    lines = {name: (spec, words) for name, spec, words in ENTRY.findall(SHARED + listed)}
    hints = get_type_hints(command)
    for name, parameter in inspect.signature(command).parameters.items():
        spec, words = lines[name]
        known = re.findall(r"--\S+", spec) or [f"--{name.replace('_', '-')}"]
        least = re.search(r">= (\S+)", spec)
        metavar = re.sub(r"--\S+|>= \S+", "", spec).strip() or None
        described: Any = {"metavar": metavar, "help": " ".join(words.split())}
        if parameter.kind is parameter.KEYWORD_ONLY:
            minimum = None if least is None else hints[name](least[1])
            kinds = get_args(hints[name]) or (hints[name],)
            described["metavar"] = metavar or next((NAMED[k] for k in kinds if k in NAMED), None)
            info = typer.Option(*known, min=minimum, **described)
        else:
            info = typer.Argument(**described)
        command.__annotations__[name] = Annotated[hints[name], info]
    epilog = f"\b\nExample:\n  {example}" if example else None
    name = command.__name__.replace("_", "-")
    app.command(name, cls=_Command, help=text, epilog=epilog)(command)
