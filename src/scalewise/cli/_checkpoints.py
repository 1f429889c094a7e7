"""`scalewise inspect`, `check` and `cast`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from .._output import TargetError, check_source, writable
from ._command import refusal, shown

PAGES = (".html", ".json")  # of reports of checkpoints


@contextmanager
def progress(*paths: Path) -> Iterator[Callable[[Any, int], None]]:
    """Yields a function that moves a bar on stderr by bytes; no bar where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    total = sum(
        f.stat().st_size
        for path in paths
        for f in (path.iterdir() if path.is_dir() else [path])
        if f.suffix == ".safetensors"
    )
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(paths[0].name, total=total or None)

        def told(what: Any, size: int) -> None:
            bar.update(task, advance=size)

        yield told


def inspect(
    path: Path, *, out: list[Path] | None = None, json: bool = False, everything: bool = False
) -> None:
    """Describe a checkpoint: layout, formats, bytes, scales.

    Args:
        path (PATH): A checkpoint.

    Example:
        scalewise inspect model-nvfp4
    """
    with refusal(ValueError):
        _checkpoint(path)
        check_reports(out)
        from .. import checkpoints  # JAX takes a second to import: not for --help

        with progress(path) as told:
            report = checkpoints.inspect(path, told)
        shown(report, out, json, everything=everything)


def check(
    path: Path,
    *,
    against: Path | None = None,
    out: list[Path] | None = None,
    json: bool = False,
    everything: bool = False,
) -> None:
    """Look for faults in a checkpoint that loaders don't notice, and try a repair of each.

    Exits with 1 if it finds one.

    Args:
        path (PATH): A checkpoint.
        against (PATH): The checkpoint that it was made from.

    Example:
        scalewise check model-nvfp4 --against model
    """
    with refusal(ValueError):
        paths = [_checkpoint(p) for p in (path, against) if p is not None]
        check_reports(out)
        from .. import checkpoints

        with progress(path) as told:
            report = checkpoints.check(*paths, told=told)
        shown(report, out, json, everything=everything)
    if not report:
        raise typer.Exit(1)


def _checkpoint(path: Path) -> Path:
    if not path.is_dir():
        check_source(path)
    if not (path.is_dir() or path.name.endswith((".safetensors", ".index.json"))):
        raise ValueError(f"{path} is no checkpoint; expected a folder or .safetensors")
    return path


def check_reports(reports: list[Path] | None) -> None:
    """Refuses files that a report can't be written to before the checkpoint is read."""
    for path in reports or ():
        writable(path, PAGES)


def cast(
    data: Path,
    *,
    fmt: str,
    out: Path | None = None,
    layout: str | None = None,
    keep: str | None = None,
    tensors: list[str] | None = None,
    scales: str = "amax",
    strategy: str | None = None,
    no_fuse: bool = False,
    requantise: bool = False,
    unscaled: bool = False,
    reports: list[Path] | None = None,
    json: bool = False,
    everything: bool = False,
) -> None:
    """Cast a checkpoint to a format, tensor by tensor, and report the error.

    Args:
        data (PATH): A checkpoint, a file or a folder.
        fmt (--to --format NAME): The format to cast to.
        out (PATH): A new file or folder. Default: the input's name and the format's.
        layout (NAME): The package's layout to write: compressed-tensors, modelopt, deepseek,
            gpt-oss, plain or scalewise. Default: scalewise.
        keep (PATTERN): A regular expression of wide tensors that stay wide.
        tensors (RULE): PATTERN=FORMAT or PATTERN=keep, tried before --keep; may be given again.
        scales (NAME): The choice of scales: amax, four_over_six or mse.
        strategy (NAME): What shares an FP8 scale: channel, tensor or block (128 x 128). Default:
            channel.
        no_fuse: Give each of q, k and v its own NVFP4 tensor scale.
        requantise: Round again what is quantised already.
        unscaled: Take FP8 without scales as the numbers themselves.
        reports (--report FILE): A file to write the report to, .html or .json; may be given again.

    Example:
        scalewise cast model --to nvfp4 --layout modelopt --out model-nvfp4
    """
    with refusal(ValueError):
        if not data.is_dir():
            check_source(data)
        check_reports(reports)
        rules = {}
        for text in tensors or ():
            pattern, equals, own = text.rpartition("=")
            if not equals or not pattern:
                raise ValueError(f"--tensors {text!r}: expected PATTERN=FORMAT")
            rules[pattern] = own
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
                data, fmt, out=target, layout=layout, rules=rules,
                scales=scales, strategy=strategy, fuse=not no_fuse,  # pyright: ignore
                requantise=requantise, unscaled_fp8=unscaled, told=told, **options,
            )  # fmt: skip
        shown(found, reports, json, everything=everything)
