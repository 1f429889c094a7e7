"""`scalewise cast`: casts arrays in a file to a format and reports the error."""

from pathlib import Path
from typing import Annotated

import typer

from .._output import check_source, replacing
from ._refusal import refusal


def cast(
    data: Annotated[Path, typer.Argument(help="A .npy file of real numbers, or a .safetensors.")],
    to: Annotated[str, typer.Option(help="A format's name.")],
    out: Annotated[
        Path | None, typer.Option(help="File for the codes. Default: the name with the format's.")
    ] = None,
    rounding: Annotated[
        str, typer.Option(help="nearest_even, nearest_away, toward_zero, to_odd, ...")
    ] = "nearest_even",
    saturate: Annotated[bool, typer.Option(help="Round overflow to the largest number.")] = False,
    rule: Annotated[
        str | None, typer.Option(help="A published rule of saturation: onnx, onnx-19.")
    ] = None,
) -> None:
    """Cast the arrays in a file to a format's codes, rounded once, and report the error.

    A .npy file is cast without scales; in a block format it becomes a .safetensors file, which
    holds the scales. In a .safetensors file each tensor gets one scale, or one for each block.
    """
    with refusal():
        check_source(data)
    import numpy as np  # numpy and JAX take time to import: not for --help

    from .._resolve import as_format
    from ..formats import BlockFormat
    from ..scaled import saturation
    from ._checkpoint import cast_checkpoint, read, report, target_of

    with refusal(ValueError):
        fmt = as_format(to, "--to", blocks=True)
        if data.suffix == ".safetensors" or isinstance(fmt, BlockFormat):
            if saturate or rule:
                name = "--saturate" if saturate else "--rule"
                raise ValueError(f"{name} is for .npy: with scales no number overflows")
            return cast_checkpoint(data, fmt, out, rounding)
        target = target_of(data, out, f"{data.stem}.{fmt.name}.npy")
        x = read(data)
        if saturate and rule:
            raise ValueError("--saturate and --rule are given; expected one of them")
        mode = saturation(rule, fmt) if rule else saturate  # pyright: ignore[reportArgumentType]
        codes = np.array(fmt.encode(x, rounding=rounding, saturate=mode), order="C")
        typer.echo(f"{data.name} -> {target.name}: {report(x, fmt.decode(codes), float(fmt.max))}")
        with replacing(target) as file:
            np.lib.format.write_array_header_1_0(
                file, np.lib.format.header_data_from_array_1_0(codes)
            )
            file.write(np.array(codes, order="C").tobytes())
