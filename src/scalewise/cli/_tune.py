"""`scalewise tune`: finds cheap formats that keep a function's outputs within a tolerance."""

from typing import Annotated

import typer

from ._options import Args, Reports, Seed, Target
from ._searching import check, searched


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
    check(target, out)
    # JAX takes a second to import: not for --help
    from scalewise.auditing import tune as tuned

    searched(lambda f: tuned(f, tol=tol, formats=tuple(fmt or ("bf16",))), target, args, seed, out)
