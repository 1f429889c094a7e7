"""`scalewise cast`: casts arrays and checkpoints to a format and reports the error."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .._output import TargetError, check_source, replacing
from ._checkpoints import progress, shown
from ._options import AsJson, Everything
from ._refusal import refusal


def cast(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A checkpoint (file or folder), or a .npy file of real numbers."
        ),
    ],
    fmt: Annotated[
        str, typer.Option("--to", "--format", metavar="NAME", help="The format to cast to.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="A new file or folder. Default: the input's name and the format's."
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The package's layout to write: compressed-tensors, modelopt, torchao, deepseek, "
            "gpt-oss, plain or scalewise. Default: scalewise.",
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN", help="A regular expression of wide tensors that stay wide."
        ),
    ] = None,
    tensors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="PATTERN=FORMAT or PATTERN=keep, tried before --keep; may be given again.",
        ),
    ] = None,
    writer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The package whose bytes are written, where packages differ."
        ),
    ] = None,
    scales: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The choice of scales: amax, least_squares, four_over_six or mse.",
        ),
    ] = "amax",
    strategy: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="What shares an FP8 scale: channel, tensor or block (128 x 128)."
        ),
    ] = "channel",
    no_fuse: Annotated[
        bool,
        typer.Option("--no-fuse", help="Give each of q, k and v its own NVFP4 tensor scale."),
    ] = False,
    powers_of_two: Annotated[
        bool, typer.Option("--powers-of-two", help="Round DeepSeek's scales up to powers of two.")
    ] = False,
    requantise: Annotated[
        bool, typer.Option("--requantise", help="Round again what is quantised already.")
    ] = False,
    unscaled: Annotated[
        bool, typer.Option("--unscaled", help="Take FP8 without scales as the numbers themselves.")
    ] = False,
    reports: Annotated[
        list[Path] | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="A file to write the report to, .html or .json; may be given again.",
        ),
    ] = None,
    json: AsJson = False,
    everything: Everything = False,
    rounding: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="The rounding mode: nearest_even, toward_zero, to_odd, ..."
        ),
    ] = "nearest_even",
    saturate: Annotated[
        bool, typer.Option("--saturate", help="Round a .npy file's overflow to the largest number.")
    ] = False,
    rule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A published rule of saturation for a .npy file: onnx, onnx-19."
        ),
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
        return _cast_array(data, fmt, out, rounding, saturate, rule)
    with refusal(ValueError):
        if saturate or rule:
            name = "--saturate" if saturate else "--rule"
            raise ValueError(f"{name} is for .npy: with scales no number overflows")
        if not data.is_dir():
            check_source(data)
        rules = dict(_rule(text) for text in tensors or ())
        from .. import checkpoints  # numpy and JAX take time to import: not for --help
        from ..formats import BLOCK_FORMATS, CATALOGUE

        name = fmt.lower().replace("-", "_")
        suffix = name if name in BLOCK_FORMATS or name in CATALOGUE else fmt
        beside = f"{data.name}.{suffix}" if data.is_dir() else f"{data.stem}.{suffix}.safetensors"
        target = out or data.with_name(beside)
        if target.exists() and target.resolve() == data.resolve():
            raise TargetError(f"{target} is the input itself; give another --out")
        options: dict[str, Any] = {} if keep is None else {"keep": keep}
        with progress(data) as told:
            found = checkpoints.cast(
                data, fmt, out=target, layout=layout, rules=rules, writer=writer,
                scales=scales, strategy=strategy, fuse=not no_fuse,  # pyright: ignore
                powers_of_two=powers_of_two, requantise=requantise, unscaled_fp8=unscaled,
                rounding=rounding, told=told, **options,
            )  # fmt: skip
        shown(found, reports, json, everything)


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
