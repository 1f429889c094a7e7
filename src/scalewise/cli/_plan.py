"""`scalewise plan`: finds the formats of a function's products at a given cost."""

import json
from typing import Annotated

import typer

from ._options import Args, Reports, Seed, Target
from ._refusal import refusal
from ._searching import check, searched

EXPORTS = ("python", "compressed-tensors", "modelopt", "torchao")


def plan(
    target: Target,
    bits: Annotated[float | None, typer.Option(help="The mean bits of a weight.")] = None,
    size: Annotated[
        float | None, typer.Option("--bytes", help="The bytes of all weights, instead.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="A bound of the products' time on --device, instead.")
    ] = None,
    error: Annotated[
        float | None, typer.Option(help="The objective's limit; the fewest bits that keep it.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="A device, as scalewise formats lists them.")
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What is kept small: kl (of logits), loss, error (of all results), or auto.",
        ),
    ] = "auto",
    fmt: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="A format of weights; may be given again. Default: nvfp4, mxfp8_e4m3, bf16.",
        ),
    ] = None,
    activation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A format of activations; may be given again. weights: the weight's own. "
            "Default: unrounded.",
        ),
    ] = None,
    export: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Print it as {', '.join(EXPORTS)} as well.")
    ] = None,
    args: Args = None,
    seed: Seed = 0,
    out: Reports = None,
) -> None:
    """Find the formats of a function's products that change its results least, at a given cost."""
    check(target, out)
    with refusal(ValueError):
        if export not in (None, *EXPORTS):
            raise ValueError(f"--export is {export!r}; expected one of {', '.join(EXPORTS)}")
    # JAX takes a second to import: not for --help
    from scalewise.planning import Budget
    from scalewise.planning import plan as planned

    formats = tuple(fmt or ("nvfp4", "mxfp8_e4m3", "bf16"))
    others = "weights" if activation == ["weights"] else tuple(activation or (None,))
    with refusal(ValueError, TypeError):
        budget = Budget(bits=bits, bytes=size, seconds=seconds, error=error, device=device)
    found = searched(
        lambda f: planned(f, budget, objective=objective, formats=formats, activations=others),  # pyright: ignore[reportArgumentType]
        target, args, seed, out,
    )  # fmt: skip
    with refusal(ValueError):
        match export:
            case "python":
                typer.echo(found.python())
            case "compressed-tensors":
                typer.echo(json.dumps(found.compressed_tensors(), indent=1))
            case "modelopt":
                typer.echo(json.dumps(found.modelopt(), indent=1))
            case "torchao":
                typer.echo(found.torchao())
