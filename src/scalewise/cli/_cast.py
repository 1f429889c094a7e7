"""`scalewise cast`: casts arrays and checkpoints to a format and reports the error."""

from pathlib import Path
from typing import Any

import typer

from .._output import TargetError, check_source, replacing
from ._checkpoints import check_reports, progress
from ._command import refusal, shown


def cast(
    data: Path,
    *,
    fmt: str,
    out: Path | None = None,
    layout: str | None = None,
    keep: str | None = None,
    tensors: list[str] | None = None,
    writer: str | None = None,
    scales: str = "amax",
    strategy: str = "channel",
    no_fuse: bool = False,
    powers_of_two: bool = False,
    requantise: bool = False,
    unscaled: bool = False,
    reports: list[Path] | None = None,
    json: bool = False,
    everything: bool = False,
    rounding: str = "nearest_even",
    saturate: bool = False,
    rule: str | None = None,
) -> None:
    """Cast a checkpoint or an array to a format, and report the error.

    A checkpoint is cast tensor by tensor to a layout; a run that was killed continues when it is
    called again. A .npy file is cast to codes without scales; in a block format it becomes a
    .safetensors file, which holds the scales.

    Args:
        data (PATH): A checkpoint (file or folder), or a .npy file of real numbers.
        fmt (--to --format NAME): The format to cast to.
        out (PATH): A new file or folder. Default: the input's name and the format's.
        layout (NAME): The package's layout to write: compressed-tensors, modelopt, torchao,
            deepseek, gpt-oss, plain or scalewise. Default: scalewise.
        keep (PATTERN): A regular expression of wide tensors that stay wide.
        tensors (RULE): PATTERN=FORMAT or PATTERN=keep, tried before --keep; may be given again.
        writer (NAME): The package whose bytes are written, where packages differ.
        scales (NAME): The choice of scales: amax, least_squares, four_over_six or mse.
        strategy (NAME): What shares an FP8 scale: channel, tensor or block (128 x 128).
        no_fuse: Give each of q, k and v its own NVFP4 tensor scale.
        powers_of_two: Round DeepSeek's scales up to powers of two.
        requantise: Round again what is quantised already.
        unscaled: Take FP8 without scales as the numbers themselves.
        reports (--report FILE): A file to write the report to, .html or .json; may be given again.
        rounding (NAME): The rounding mode: nearest_even, toward_zero, to_odd, ...
        saturate: Round a .npy file's overflow to the largest number.
        rule (NAME): A published rule of saturation for a .npy file: onnx, onnx-19.

    Example:
        scalewise cast model --to nvfp4 --layout modelopt --out model-nvfp4
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
        check_reports(reports)
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
                rounding=rounding, told=told, **options,  # pyright: ignore
            )  # fmt: skip
        shown(found, reports, json, everything=everything)


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
