"""Registers subcommands, whose arguments and options are described by their docstrings."""

import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_type_hints

import typer

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
    to (--csv FILE): A file to write the table to, too.
    names (FUNCTION): Functions, exp for example. Default: all.
    fmt (--format NAME): The name of a format.
"""


def add(app: typer.Typer, command: Callable[..., None], **settings: Any) -> None:
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
    app.command(command.__name__, help=text, epilog=epilog, **settings)(command)
