"""The public functions on whole checkpoints: `load` and `cast`."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeAlias

import jax
import numpy as np

from .._check import Pattern, checked
from .._output import TargetError, check_target
from .._types import Json
from ..rounding import EncodedArray
from ..scaled import ScaledArray
from ._cast import KEEP, CastJobs, Options, checked_options, shards_of, write_configs
from ._encode import Choice
from ._files import UnreadableError
from ._match import intact, refuse_undecodable, refuse_unscaled
from ._open import Source, family_of
from ._report import CastReport
from ._weights import Weight, original_dtype
from ._write import publish, staging, write_shards

Array: TypeAlias = jax.Array | np.ndarray | ScaledArray | EncodedArray


class Tree(Mapping[str, Array]):
    """The arrays of a checkpoint by name, read from the mapped files when they are used.

    ``tree[name]`` is a NumPy array that maps the file, or a :class:`scalewise.ScaledArray` with the
    stored bytes, which stands for an array of the dtype that the file or its config.json states
    (none if they don't); ``tree.value(name)`` has the numbers as the layout's own package decodes
    them.

    Attributes:
        layout: family of the layouts, None for plain tensors.
        evidence: what the layout was recognised by.
        source: the files.
    """

    def __init__(self, source: Source, weights: Mapping[str, Weight]):
        self.source = source
        self.layout, self.evidence = family_of(source)
        self.weights = dict(weights)

    def __getitem__(self, name: str) -> Array:
        weight = self.weights[name]
        x = weight.scaled()
        if isinstance(x, ScaledArray) and x.value_dtype is None:
            x = dataclasses.replace(x, value_dtype=original_dtype(weight, self.source.config))
        return x

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    def value(self, name: str, dtype: np.dtype | type = np.float32) -> np.ndarray:
        """Returns the numbers of an array, rounded once to a dtype."""
        return self.weights[name].value(dtype)

    @checked
    def select(self, pattern: Pattern) -> Tree:
        """Returns the arrays whose names a regular expression matches anywhere."""
        found = {n: w for n, w in self.weights.items() if re.search(pattern, n)}
        return Tree(self.source, found)

    def __repr__(self) -> str:
        return f"Tree({str(self.source.path)!r}, {len(self)} arrays, layout={self.layout!r})"


@checked
def load(
    path: str | os.PathLike[str],
    select: Pattern | None = None,
    *,
    unscaled_fp8: bool = False,
) -> Tree:
    """Returns the arrays of a checkpoint of any known layout as a lazy tree.

    Args:
        path: a .safetensors file, an index, or a folder with shards.
        select: a regular expression; arrays whose names it doesn't match anywhere are left out.
        unscaled_fp8: whether FP8 tensors without a scale hold the numbers themselves.

    Raises:
        UnreadableError: the files are damaged or incomplete, or hold FP8 tensors without a scale
            that ``unscaled_fp8`` doesn't allow.
    """
    source, weights = intact(path)
    tree = Tree(source, weights)
    tree = tree.select(select) if select else tree
    if not unscaled_fp8:
        refuse_unscaled(path, tree.weights)
    return tree


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
    scales: Choice = "amax",
    strategy: Literal["tensor", "channel", "block"] | None = None,
    fuse: bool = True,
    requantise: bool = False,
    unscaled_fp8: bool = False,
    told: Callable[[Json, int], None] | None = None,
) -> CastReport:
    """Casts a checkpoint to a format in a layout, tensor by tensor, and reports what was lost.

    Tensors that aren't cast keep their bytes, names and order. Between layouts that hold the same
    numbers codes and block scales are kept; a global scale that one layout multiplies by and the
    other divides by is inverted in float32, and the report says so. The output appears when it is
    complete.

    Args:
        path: a file or folder of any layout that :func:`load` reads.
        to: a format (``"nvfp4"``, ``"mxfp4"``, ``"mxfp8_e4m3"``, ``"e4m3fn"``), or ``"bf16"``,
            ``"fp16"``, ``"fp32"`` to decode.
        out: a folder that doesn't exist, or a new .safetensors file.
        layout: ``"compressed-tensors"``, ``"modelopt"``, ``"deepseek"``, ``"gpt-oss"``,
            ``"plain"``, or ``"scalewise"``, the default for narrow formats.
        keep: a regular expression; wide tensors that it matches stay wide.
        rules: regular expressions to formats, or to ``"keep"``; the first that matches decides, and
            comes before ``keep``.
        scales: how scales of blocks are chosen: ``"amax"``, ``"four_over_six"``, ``"mse"`` (a
            search over a grid).
        strategy: of FP8 without blocks in compressed-tensors and modelopt: a scale per
            ``"channel"``, the default, per ``"tensor"``, or, in compressed-tensors, per ``"block"``
            of 128 x 128.
        fuse: whether NVFP4's global scale is one for q, k and v, and one for gate and up, as vLLM
            fuses them.
        requantise: whether what is quantised already may be rounded again.
        unscaled_fp8: whether FP8 tensors without a scale hold the numbers themselves.
        told: called with the record and the bytes of each tensor that is written.

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
        Options(to, layout, keep, tuple((rules or {}).items()), scales, strategy, fuse,
                requantise, unscaled_fp8)
    )  # fmt: skip
    (source, weights), target = intact(path), Path(out)
    refuse_undecodable(source, weights)
    if not options.unscaled:
        refuse_unscaled(path, weights)
    if target.suffix in FOREIGN:
        raise TargetError(f"cannot write {str(target)!r}: expected a folder or a .safetensors file")
    plan = CastJobs(options, weights, family_of(source)[0])
    shards = shards_of(source, plan)
    plan.refuse_a_copy()
    single = target.suffix == ".safetensors"
    if single and len(shards) > 1:
        raise UnreadableError(f"{path} has {len(shards)} shards; give a folder as out (--out)")
    need = sum(e.nbytes for s in shards for job in s.jobs for e in job.entries)
    parent = Path(os.path.abspath(target)).parent
    if parent.is_dir() and need > (free := shutil.disk_usage(parent).free):
        what = f"it takes {need:,} bytes, {free:,} are free"
        raise TargetError(f"cannot write {str(target)!r}: {what}")
    records: list[Json] = []

    def record(found: Json, size: int) -> None:
        records.append(found)
        if told is not None:
            told(found, size)

    if single:
        check_target(target)
    with staging(target) as folder:
        write_shards(folder, shards, record)
        if not single:
            write_configs(folder, source, plan, shards)
        publish(folder, target, shards[0].name if single else None)
    return CastReport(str(path), str(target), options.to, options.layout or "", records,
                      plan.dropped)  # fmt: skip
