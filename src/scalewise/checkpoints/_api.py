"""The public functions on whole checkpoints."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from .._check import Pattern, checked
from .._output import TargetError, check_target
from .._types import Json
from ..formats import RoundingMode
from ._cast import KEEP, CastJobs, Options, checked_options, rows_of, shards_of, write_configs
from ._encode import CHOICES, Choice, quantised, writer_of
from ._files import UnreadableError
from ._find import family_of, intact, refuse_unscaled
from ._layouts import writable
from ._loss import loss
from ._open import load
from ._packed import Decoded
from ._report import CastReport
from ._write import Shard, digest, publish, staging, write_shards

FOREIGN = (".gguf", ".bin", ".pt", ".pth", ".npy", ".npz", ".json", ".h5", ".msgpack")


@checked
def cast(
    path: str | os.PathLike[str],
    to: str,
    *,
    out: str | os.PathLike[str],
    layout: str | None = None,
    keep: Pattern = KEEP,
    rules: Mapping[Pattern, str] | None = None,
    writer: str | None = None,
    scales: Choice = "amax",
    strategy: Literal["tensor", "channel", "block"] = "channel",
    fuse: bool = True,
    powers_of_two: bool = False,
    requantise: bool = False,
    unscaled_fp8: bool = False,
    rounding: RoundingMode = "nearest_even",
    told: Callable[[Json, int], None] | None = None,
) -> CastReport:
    """Casts a checkpoint to a format in a layout, tensor by tensor, and reports what was lost.

    Tensors that aren't cast keep their bytes, names and order. Between layouts that hold the same
    numbers codes and block scales are kept; a global scale that one layout multiplies by and the
    other divides by is inverted in float32, and the report says so. A run that was killed continues
    when it is called again with the same arguments; the output appears when it is complete.

    Args:
        path: a file or folder of any layout that :func:`load` reads.
        to: a format (``"nvfp4"``, ``"mxfp4"``, ``"mxfp8_e4m3"``, ``"e4m3fn"``), or ``"bf16"``,
            ``"fp16"``, ``"fp32"`` to decode.
        out: a folder that doesn't exist, or a new .safetensors file.
        layout: ``"compressed-tensors"``, ``"modelopt"``, ``"torchao"``, ``"deepseek"``,
            ``"gpt-oss"``, ``"plain"``, or ``"scalewise"``, the default for narrow formats.
        keep: a regular expression; wide tensors that it matches stay wide.
        rules: regular expressions to formats, or to ``"keep"``; the first that matches decides, and
            comes before ``keep``.
        writer: the package whose bytes are written, where packages differ: ``compressed-tensors``,
            ``modelopt``, ``torchao``, ``transformers``, ``triton-kernels``, ``gguf``. Default: the
            layout's own.
        scales: how scales of blocks are chosen: ``"amax"``, ``"least_squares"`` (three of Lloyd's
            steps), ``"four_over_six"``, ``"mse"`` (a search over a grid).
        strategy: of FP8 without blocks: a scale per ``"channel"``, per ``"tensor"``, or, in
            compressed-tensors, per ``"block"`` of 128 x 128.
        fuse: whether NVFP4's global scale is one for q, k and v, and one for gate and up, as vLLM
            fuses them.
        powers_of_two: whether DeepSeek's scales are rounded up to powers of two.
        requantise: whether what is quantised already may be rounded again.
        unscaled_fp8: whether FP8 tensors without a scale hold the numbers themselves.
        rounding: of the layout scalewise.
        told: called with the record and the bytes of each tensor that is written.

    Returns:
        What was cast, and what each tensor lost: it prints, and has ``save("report.html")``.

    Raises:
        ValueError: an argument is invalid, or an input can't be read (:class:`UnreadableError`).
        TargetError: the output exists, or the disk is full.
        OSError: a file can't be read or written; nothing that existed is changed.

    Example:
        >>> import tempfile, pathlib, numpy as np, scalewise as sw
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> x = {"a.weight": np.linspace(-1, 1, 64 * 128, dtype=np.float32).reshape(64, 128)}
        >>> sw.scaled.save_safetensors(folder / "wide.safetensors", x)
        >>> out = folder / "narrow.safetensors"
        >>> report = cast(folder / "wide.safetensors", "nvfp4", out=out, layout="modelopt")
        >>> report.records[0]["what"], sw.checkpoints.load(out)["a.weight"].nbytes
        ('quantised', 4612)
    """
    options = checked_options(
        Options(to, layout, keep, tuple((rules or {}).items()), writer, scales, strategy, fuse,
                powers_of_two, requantise, unscaled_fp8, rounding)
    )  # fmt: skip
    (source, weights), target = intact(path), Path(out)
    if not options.unscaled:
        refuse_unscaled(path, weights)
    if target.suffix in FOREIGN:
        raise TargetError(f"cannot write {str(target)!r}: expected a folder or a .safetensors file")
    plan = CastJobs(options, weights, family_of(source)[0])
    shards = shards_of(source, plan)
    plan.refuse_a_copy()
    single = target.suffix == ".safetensors"
    if single and len(shards) > 1:
        raise UnreadableError(f"{path} has {len(shards)} shards; give a folder as --out")
    _check_space(shards, target)
    status = [(f.path.name, f.path.stat()) for f in source.files]
    stamps = [(name, found.st_size, found.st_mtime_ns) for name, found in status]
    identity = digest(str(Path(path).resolve()), stamps, dataclasses.asdict(options))
    records: list[Json] = []

    def record(found: Json, size: int) -> None:
        records.append(found)
        if told is not None:
            told(found, size)

    if single:
        check_target(target)
    with staging(target) as folder:
        kept = write_shards(folder, shards, identity, record)
        if not single:
            write_configs(folder, source, plan, shards)
    publish(folder, target, shards[0].name if single else None)
    return CastReport(str(path), str(target), options.to, options.layout or "", records,
                      plan.dropped, kept)  # fmt: skip


def _check_space(shards: Sequence[Shard], target: Path) -> None:
    need = sum(e.nbytes for s in shards for job in s.jobs for e in job.entries)
    parent = Path(os.path.abspath(target)).parent
    if parent.is_dir() and need > shutil.disk_usage(parent).free:
        raise TargetError(
            f"cannot write {str(target)!r}: it takes {need:,} bytes, "
            f"{shutil.disk_usage(parent).free:,} are free"
        )


def compare_scales(
    path: str | os.PathLike[str],
    to: str,
    *,
    layout: str = "compressed-tensors",
    select: str = r"\.weight$",
    choices: Sequence[Choice] = CHOICES,
) -> dict[str, dict[str, float]]:
    """Returns the SQNR in dB that each choice of scales gives each weight; nothing is written.

    Args:
        path: a checkpoint of wide weights.
        to: a format that the layout has.
        layout: as for :func:`cast`.
        select: a regular expression of names; arrays of one axis are left out.
        choices: of :func:`cast`'s ``scales``. ``"four_over_six"`` is for NVFP4; of MX formats it
            tries the scale's half and double, as ``"mse"`` does.

    Raises:
        ValueError: the layout doesn't have the format, or no weight is selected.
    """
    target = writable(layout, to)
    writer = writer_of(target.family, None)
    found: dict[str, dict[str, float]] = {}
    for name, weight in load(path, select).weights.items():
        if len(weight.shape) < 2 or (target.block and weight.shape[-1] % target.block[1]):
            continue
        x = rows_of(weight)
        found[name] = {}
        for choice in choices:
            packed = quantised(x, target, writer, choice=choice)
            found[name][choice] = loss(x, Decoded(packed), packed).sqnr
    if not found:
        raise ValueError(f"{path}: no weight of two axes matches {select!r}")
    return found
