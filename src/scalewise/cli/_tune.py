"""`scalewise tune`: finds cheap formats that keep a function's outputs within a tolerance."""

from typing import Annotated

import typer

from .._output import check_target as check_file
from ._options import Args, Reports, Seed, Target
from ._refusal import check_target, refusal


def tune(
    target: Target,
    tol: Annotated[
        float, typer.Option(help="The outputs' relative error to keep, against float32.")
    ] = 1e-3,
    fmt: Annotated[
        list[str] | None,
        typer.Option(
            "--format", metavar="NAME", help="A format to try; may be given again. Default: bf16."
        ),
    ] = None,
    args: Args = None,
    seed: Seed = 0,
    out: Reports = None,
) -> None:
    """Find the narrowest formats of a function's parts that keep its outputs within a tolerance."""
    with refusal(ValueError):
        check_target(target)
        for path in out or ():
            check_file(path)
    # JAX takes a second to import: not for --help
    from scalewise.auditing import arguments, load_function, user_errors, writable
    from scalewise.auditing import tune as tuned

    with refusal(ValueError, TypeError, NotImplementedError):
        paths = [writable(path) for path in out or ()]
        function, module = load_function(target)
        search = tuned(function, tol=tol, formats=tuple(fmt or ("bf16",)))
        positional, keywords = arguments(function, module, args, seed)
        with user_errors(module):
            found = search(*positional, **keywords)
        saved = [found.save(path) for path in paths]
        found.show()
        for path in saved:
            typer.echo(f"wrote {path}")
