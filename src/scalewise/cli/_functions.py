"""`scalewise tune`, `plan` and `record`: run and measure a function of a user's file."""

import json
from pathlib import Path

import typer

from ._command import check, computed, refusal


def tune(
    target: str,
    *,
    tol: float = 0.001,
    fmt: list[str] | None = None,
    args: str | None = None,
    seed: int = 0,
    out: list[Path] | None = None,
) -> None:
    """Find the narrowest formats of a function's parts that keep its outputs within a tolerance.

    Args:
        tol: The outputs' relative error to keep, against float32.
        fmt (--format NAME): A format to try; may be given again. Default: bf16.

    Example:
        scalewise tune model.py:loss_of --args example --format bf16
    """
    check(target, out)
    # JAX takes a second to import: not for --help
    from scalewise.auditing import tune as tuned
    from scalewise.auditing import writable

    formats = tuple(fmt or ("bf16",))
    computed(lambda f: tuned(f, tol=tol, formats=formats), target, args, seed, out, writable)


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
    if export is not None:
        with refusal(ValueError):
            made = getattr(found, export.replace("-", "_"))()
            typer.echo(made if isinstance(made, str) else json.dumps(made, indent=1))


def record(
    target: str,
    *,
    args: str | None = None,
    fused: bool = False,
    seed: int = 0,
    out: Path | None = None,
    everything: bool = False,
) -> None:
    """Show the first non-finite number that a function computes on this device, and its numbers.

    Exits with 1 if an operation makes a non-finite number, with 2 if the run or writing fails.

    Args:
        fused: Read the numbers within one compiled program.
        out (FILE): A .safetensors file to write, for `scalewise diff`.

    Example:
        scalewise record model.py:train_step --out here.safetensors
    """
    files = None if out is None else [out]
    check(target, files)
    # JAX takes a second to import: not for --help
    from scalewise.auditing import record as recorded
    from scalewise.auditing import recordable

    recording = computed(
        lambda f: recorded(f, fused=fused),
        target, args, seed, files, recordable, everything=everything,
    )  # fmt: skip
    if recording.first_non_finite is not None:
        raise typer.Exit(1)
