"""Arguments and options that several subcommands have."""

from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[
    str,
    typer.Argument(
        metavar="FILE:FUNCTION", help="A function of a Python file, model.py:train_step."
    ),
]
Args = Annotated[
    str | None,
    typer.Option(
        metavar="FUNCTION",
        help="A function of that file that returns the arguments, as a tuple or dict. "
        "Default: random arrays, if the function's annotations have their shapes.",
    ),
]
Seed = Annotated[int, typer.Option(help="The seed of random arguments.")]
Program = Annotated[
    str,
    typer.Argument(
        metavar="PROGRAM",
        help="A Python file with init, train_step and batches, or an example (gpt, mlp, ...).",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="A text file or folder. Default: the sources of Python's library."
    ),
]
Reports = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="A file to write the report to, .html or .json, for some .csv; may be given again.",
    ),
]
Everything = Annotated[bool, typer.Option("--all", help="Show all rows, also benign ones.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
