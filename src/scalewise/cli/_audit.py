"""`scalewise audit`: what a narrow format does to a function of a user's file."""

from pathlib import Path
from typing import Annotated

import typer

from ._refusal import refusal


def audit(
    target: Annotated[str, typer.Argument(help="path/to/file.py:function")],
    fmt: Annotated[str, typer.Option("--format", help="A format, or an autocast policy.")] = "fp16",
    recipe: Annotated[
        str | None,
        typer.Option(help="A recipe of autoscale instead: fp16, fp8, fp16_every_op, ..."),
    ] = None,
    args: Annotated[
        str | None,
        typer.Option(help="A function of that file that makes the arguments, as a tuple or dict."),
    ] = None,
    shadow: Annotated[str | None, typer.Option(help="float32 or float64.")] = None,
    trials: Annotated[int, typer.Option(help="Runs that may be spent on trying fixes.")] = 24,
    steps: Annotated[int, typer.Option(help="Calls, the first result as first argument.")] = 1,
    batches: Annotated[
        str | None,
        typer.Option(help="A function of that file: step number to the second argument."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random arguments.")] = 0,
    out: Annotated[
        list[Path] | None,
        typer.Option(help="A file to write, .html, .json or .csv; may be given again."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show what is benign too.")] = False,
) -> None:
    """Say which operation of which line a narrow format breaks, and what mends it.

    Exits with 1 if outputs aren't finite, with 2 if it can't be audited.
    """
    from scalewise import audit as room  # JAX takes a second to import: not for --help
    from scalewise.audit import arguments, blamed, load_function, writable
    from scalewise.autoscale.recipes import recipe as named

    def fed(module):
        if batches is not None and not callable(getattr(module, batches, None)):
            raise ValueError(f"{target.rpartition(':')[0]} defines no function {batches!r}")
        return batches and getattr(module, batches)

    with refusal(ValueError, TypeError):
        paths = [writable(path) for path in out or ()]
        function, module = load_function(target)
        positional, keywords = arguments(function, module, args, seed)
        low = fmt if recipe is None else named(recipe)
        options = {"shadow": shadow, "trials": trials, "steps": steps, "batches": fed(module)}
        with blamed(module):
            report = room(function, low, **options)(*positional, **keywords)
        report.show(everything=everything)
        for path in paths:
            typer.echo(f"wrote {report.save(path)}")
    if report.error.broken:
        raise typer.Exit(1)
