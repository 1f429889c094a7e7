"""`scalewise cast`: an array on disk, cast to a format, with what the cast did to it."""

import os
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from ._refusal import refusal


def cast(
    data: Annotated[Path, typer.Argument(help="A .npy file of real floating-point numbers.")],
    to: Annotated[str, typer.Option(help="A format's name.")],
    out: Annotated[
        Path | None, typer.Option(help="Codes go here. Default: the name with the format's.")
    ] = None,
    saturate: Annotated[bool, typer.Option(help="Overflow goes to the largest number.")] = False,
) -> None:
    """Cast a .npy file to a format's codes, rounded once; report what that did to the numbers."""
    from ..formats import format as format_

    with refusal(ValueError, OSError):
        fmt = format_(to)
        x = _read(data)
        target = out or data.with_name(f"{data.stem}.{fmt.name}.npy")
        if target.resolve() == data.resolve():
            raise ValueError(f"{target} is the input itself; give another --out")
        codes = fmt.encode(x, saturate=saturate)
        typer.echo(f"{data.name} -> {target.name}: {_report(x, fmt.decode(codes), float(fmt.max))}")
        part = target.with_name(f"{target.name}.part")
        try:
            with part.open("wb") as file:
                np.save(file, codes)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)


def _read(path: Path) -> np.ndarray:
    try:
        x = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no complete .npy file ({error})") from None
    if not isinstance(x, np.ndarray) or x.dtype.kind != "f":
        kind = x.dtype if isinstance(x, np.ndarray) else "several arrays"
        raise ValueError(f"{path} holds {kind}; accepted: float16, float32 or float64")
    return x


def _report(x: np.ndarray, y: np.ndarray, largest: float) -> str:
    """What the cast did: SQNR and relative error over what stays finite, and what did not."""
    wide = x.astype(np.float64)
    finite = np.isfinite(wide)
    kept = finite & np.isfinite(y)
    unit = np.abs(wide[kept]).max(initial=0.0) or 1.0  # so that no square leaves float64's range
    signal, noise = wide[kept] / unit, (y[kept] - wide[kept]) / unit
    power, error = float(np.sum(signal**2)), float(np.sum(noise**2))
    sqnr = f"{10 * np.log10(power / error):.1f} dB" if power and error else "exact"
    if error and not power:
        sqnr = "none"
    nonzero = signal != 0
    relative = np.abs(noise[nonzero] / signal[nonzero]).max(initial=0.0)
    over = int(np.sum(finite & (np.abs(wide) > largest)))
    flushed = int(np.sum((wide != 0) & (y == 0)))
    return (
        f"{x.size} numbers, SQNR {sqnr}, largest relative error {relative:.3g}, "
        f"{over} beyond the largest number, {flushed} flushed to zero"
    )
