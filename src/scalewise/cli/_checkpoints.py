"""`scalewise inspect`, `diff` and `check`: checkpoints, beside numbers, reports and recordings."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from .._output import check_source, writable
from ._command import refusal, shown
from ._formats import show_numbers

FILES = (".safetensors", ".gguf")
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
        if f.suffix in FILES
    )
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(paths[0].name, total=total or None)

        def told(what: Any, size: int) -> None:
            bar.update(task, advance=size)

        yield told


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() or path.name.endswith((*FILES, ".index.json"))


def inspect(
    what: list[str],
    *,
    fmt: str = "fp32",
    out: list[Path] | None = None,
    json: bool = False,
    everything: bool = False,
) -> None:
    """Describe a checkpoint: layout, formats, bytes, scales; or show numbers in a format.

    Args:
        what (WHAT): A checkpoint; or numbers, or codes such as 0x3c00 or 0b1010.
        fmt (--format NAME): The format to show numbers in.

    Example:
        scalewise inspect 0.1 0x3c00 --format fp16
    """
    with refusal(ValueError):
        for text in what:
            if text.startswith("--"):  # Typer lets unknown ones through, for negative numbers
                raise ValueError(f"there is no option {text.partition('=')[0]}")
    path = Path(what[0])
    of_file = os.sep in what[0] or _is_checkpoint(path) or path.exists()
    if len(what) > 1 or not of_file:
        return show_numbers(what, fmt)
    with refusal(ValueError):
        if not _is_checkpoint(_there(path)):
            raise ValueError(f"{path} is no checkpoint; expected a folder, .safetensors or .gguf")
        check_reports(out)
        from .. import checkpoints  # JAX takes a second to import: not for --help

        with progress(path) as told:
            report = checkpoints.inspect(path, told)
        shown(report, out, json, everything=everything)


def diff(
    before: Path,
    after: Path,
    *,
    out: list[Path] | None = None,
    tolerance: float = 0.0,
    json: bool = False,
    everything: bool = False,
) -> None:
    """Compare two checkpoints in value, two recordings line by line, or two audits' reports.

    Of checkpoints, exits with 1 if an array differs by more than the tolerance, or isn't in both.

    Args:
        before (BEFORE): A checkpoint; a recording (.safetensors); a report of an audit (.json).
        after (AFTER): Another one of the same kind.
        tolerance (ERROR >= 0.0): The relative error of an array that counts as equal.

    Example:
        scalewise diff before.json after.json
    """
    with refusal(ValueError):
        for path in (before, after):
            _there(path)
        kinds = {_kind(path) for path in (before, after)}
        if kinds != {"checkpoint"}:
            return _diff_results(before, after, out, everything, kinds == {"recording"})
        check_reports(out)
        from .. import checkpoints

        with progress(before, after) as told:
            report = checkpoints.diff(before, after, tolerance=tolerance, told=told)
        shown(report, out, json, everything=everything)
    if not report:
        raise typer.Exit(1)


def _kind(path: Path) -> str:
    if not _is_checkpoint(path):
        return "report"
    if path.suffix != ".safetensors" or path.is_dir():
        return "checkpoint"
    with path.open("rb") as file:
        length = min(int.from_bytes(file.read(8), "little"), 1 << 16)
        return "recording" if b'"recording"' in file.read(length) else "checkpoint"


def _diff_results(
    before: Path, after: Path, out: list[Path] | None, everything: bool, recordings: bool
) -> None:
    # JAX takes a second to import
    from scalewise.auditing import compare, writable
    from scalewise.auditing import diff as diff_reports

    if not recordings:
        if out:
            raise ValueError("--out: expected two checkpoints or recordings (.safetensors)")
        diff_reports(before, after).show()
        return
    paths = [writable(path) for path in out or ()]
    comparison = compare(before, after)
    shown(comparison, paths, everything=everything)


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
        paths = [_there(p) for p in (path, against) if p is not None]
        check_reports(out)
        from .. import checkpoints

        with progress(path) as told:
            report = checkpoints.check(*paths, told=told)
        shown(report, out, json, everything=everything)
    if not report:
        raise typer.Exit(1)


def _there(path: Path) -> Path:
    """Returns a path that is a folder, or a file that can be read."""
    if not path.is_dir():
        check_source(path)
    return path


def check_reports(reports: list[Path] | None) -> None:
    """Refuses files that a report can't be written to before the checkpoint is read."""
    for path in reports or ():
        writable(path, PAGES)
