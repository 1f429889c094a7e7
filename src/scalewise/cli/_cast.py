"""`scalewise cast`: casts arrays and checkpoints to a format and reports the error."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .._output import TargetError, check_source, replacing
from ._checkpoints import AsJson, progress, shown
from ._refusal import refusal


def cast(
    data: Annotated[
        Path, typer.Argument(help="A checkpoint (file or folder), or a .npy file of real numbers.")
    ],
    to: Annotated[str, typer.Option(help="A format's name.")],
    out: Annotated[
        Path | None,
        typer.Option(help="A new file or folder. Default: the name with the format's."),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            help="compressed-tensors, modelopt, torchao, deepseek, gpt-oss, plain, scalewise."
        ),
    ] = None,
    keep: Annotated[
        str | None, typer.Option(help="A regular expression: wide tensors that stay wide.")
    ] = None,
    tensors: Annotated[
        list[str] | None,
        typer.Option(help="PATTERN=FORMAT, or PATTERN=keep, before --keep; may be given again."),
    ] = None,
    writer: Annotated[
        str | None, typer.Option(help="The package whose bytes are written, where they differ.")
    ] = None,
    scales: Annotated[str, typer.Option(help="amax, least_squares, four_over_six, mse.")] = "amax",
    strategy: Annotated[str, typer.Option(help="Of FP8's scales: channel, tensor.")] = "channel",
    no_fuse: Annotated[
        bool, typer.Option("--no-fuse", help="NVFP4: a global scale for each of q, k, v.")
    ] = False,
    powers_of_two: Annotated[
        bool, typer.Option("--powers-of-two", help="deepseek: scales as ue8m0.")
    ] = False,
    requantise: Annotated[
        bool, typer.Option("--requantise", help="Round again what is quantised already.")
    ] = False,
    unscaled: Annotated[
        bool, typer.Option("--unscaled", help="FP8 without scales holds the numbers themselves.")
    ] = False,
    report: Annotated[
        list[Path] | None, typer.Option(help="A file for the report, .html or .json.")
    ] = None,
    json: AsJson = False,
    rounding: Annotated[
        str, typer.Option(help="nearest_even, nearest_away, toward_zero, to_odd, ...")
    ] = "nearest_even",
    saturate: Annotated[
        bool, typer.Option(help="For .npy: round overflow to the largest number.")
    ] = False,
    rule: Annotated[
        str | None, typer.Option(help="For .npy: a published rule of saturation: onnx, onnx-19.")
    ] = None,
) -> None:
    """Cast a checkpoint or an array to a format, and report the error.

    A checkpoint is cast tensor by tensor to a layout; a run that was killed continues when it is
    called again. A .npy file is cast to codes without scales; in a block format it becomes a
    .safetensors file, which holds the scales.
    """
    if data.suffix == ".npy":
        with refusal():
            check_source(data)
        return _cast_array(data, to, out, rounding, saturate, rule)
    with refusal(ValueError):
        if saturate or rule:
            name = "--saturate" if saturate else "--rule"
            raise ValueError(f"{name} is for .npy: with scales no number overflows")
        if not data.is_dir():
            check_source(data)
        rules = dict(_rule(text) for text in tensors or ())
        from .. import checkpoints  # numpy and JAX take time to import: not for --help
        from ..formats import BLOCK_FORMATS, CATALOGUE

        name = to.lower().replace("-", "_")
        known = name in BLOCK_FORMATS or name in CATALOGUE
        target = out or data.with_name(f"{data.stem}.{name if known else to}" + (
            ".safetensors" if data.is_file() else ""))  # fmt: skip
        if target.exists() and target.resolve() == data.resolve():
            raise TargetError(f"{target} is the input itself; give another --out")
        options: dict[str, Any] = {} if keep is None else {"keep": keep}
        with progress(data) as told:
            found = checkpoints.cast(
                data, to, out=target, layout=layout, rules=rules, writer=writer,
                scales=scales, strategy=strategy, fuse=not no_fuse,  # pyright: ignore
                powers_of_two=powers_of_two, requantise=requantise, unscaled_fp8=unscaled,
                rounding=rounding, told=told, **options,
            )  # fmt: skip
        shown(found, report, json)


def _rule(text: str) -> tuple[str, str]:
    pattern, equals, fmt = text.rpartition("=")
    if not equals or not pattern:
        raise ValueError(f"--tensors {text!r}: expected PATTERN=FORMAT")
    return pattern, fmt


def _cast_array(
    data: Path, to: str, out: Path | None, rounding: Any, saturate: bool, rule: Any
) -> None:
    import numpy as np

    from .._resolve import as_format
    from ..formats import BlockFormat
    from ..scaled import quantize, saturation, save_safetensors
    from ._npy import read, report, target_of

    with refusal(ValueError):
        fmt = as_format(to, "--to", blocks=True)
        blocks = isinstance(fmt, BlockFormat)
        target = target_of(data, out, f"{data.stem}.{fmt.name}" + (
            ".safetensors" if blocks else ".npy"))  # fmt: skip
        x = read(data)
        if saturate and rule:
            raise ValueError("--saturate and --rule are given; expected one of them")
        if blocks:
            if saturate or rule:
                name = "--saturate" if saturate else "--rule"
                raise ValueError(f"{name}: with scales no number overflows")
            stored = quantize(x, fmt, rounding=rounding)
            lost = report(x, np.asarray(stored.value()).astype(np.float64), np.inf)
            save_safetensors(target, {"data": stored})
            typer.echo(f"{data.name} -> {target.name}: {lost}")
            return
        mode = saturation(rule, fmt) if rule else saturate
        codes = np.array(fmt.encode(x, rounding=rounding, saturate=mode), order="C")
        typer.echo(f"{data.name} -> {target.name}: {report(x, fmt.decode(codes), float(fmt.max))}")
        with replacing(target) as file:
            np.lib.format.write_array_header_1_0(
                file, np.lib.format.header_data_from_array_1_0(codes)
            )
            file.write(np.array(codes, order="C").tobytes())
