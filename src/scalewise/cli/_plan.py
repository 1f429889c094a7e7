"""`scalewise plan`: finds the formats of a function's products at a given cost."""

import json
from pathlib import Path

import typer

from ._refusal import refusal
from ._results import check, computed

EXPORTS = ("python", "compressed-tensors", "modelopt", "torchao")


def plan(
    target: str,
    *,
    bits: float | None = None,
    size: float | None = None,
    seconds: float | None = None,
    error: float | None = None,
    device: str | None = None,
    objective: str = "auto",
    fmt: list[str] | None = None,
    activation: list[str] | None = None,
    export: str | None = None,
    args: str | None = None,
    seed: int = 0,
    out: list[Path] | None = None,
) -> None:
    """Find the formats of a function's products that change its results least, at a given cost.

    Args:
        bits: The mean bits of a weight.
        size (--bytes): The bytes of all weights, instead.
        seconds: A bound of the products' time on --device, instead.
        error: The objective's limit; the fewest bits that keep it.
        device: A device, as scalewise formats lists them.
        objective (NAME): What is kept small: kl (of logits), loss, error (of all results), or
            auto.
        fmt (--format NAME): A format of weights; may be given again. Default: nvfp4,
            mxfp8_e4m3, bf16.
        activation (NAME): A format of activations; may be given again. weights: the weight's
            own. Default: unrounded.
        export (NAME): Print it as python, compressed-tensors, modelopt, torchao as well.

    Example:
        scalewise plan model.py:logits --bits 6 --objective kl --args example
    """
    check(target, out)
    with refusal(ValueError):
        if export not in (None, *EXPORTS):
            raise ValueError(f"--export is {export!r}; expected one of {', '.join(EXPORTS)}")
    # JAX takes a second to import: not for --help
    from scalewise.auditing import writable
    from scalewise.planning import Budget
    from scalewise.planning import plan as planned

    formats = tuple(fmt or ("nvfp4", "mxfp8_e4m3", "bf16"))
    others = "weights" if activation == ["weights"] else tuple(activation or (None,))
    with refusal(ValueError, TypeError):
        budget = Budget(bits=bits, bytes=size, seconds=seconds, error=error, device=device)
    found = computed(
        lambda f: planned(f, budget, objective=objective, formats=formats, activations=others),  # pyright: ignore[reportArgumentType]
        target, args, seed, out, writable,
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
