"""The jobs of a cast of a checkpoint, by its options: which tensors become what, and how."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from .._output import replacing
from .._resolve import as_format
from .._types import Json
from ..formats import BLOCK_FORMATS
from . import _lay as lay
from ._encode import Choice, amax, quantised, shaped, writer_of
from ._files import DTYPES, UnreadableError
from ._layouts import (
    FP8,
    Layout,
    Strategy,
    fused_key,
    hf_quant_config,
    quantization_config,
    strategy_of,
    writable,
)
from ._match import is_side
from ._open import Source, without_quantization
from ._packed import Decoded, loss, values
from ._weights import Weight
from ._write import FileEntry, Job, Shard, entry_of

PLAIN = ("F32", "F16", "BF16")
EXACT = {"F32": ("F16", "BF16"), "F16": (), "BF16": ()}  # dtypes whose numbers it has
WIDE = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
# The choices of strategy of each layout, for FP8 without blocks.
STRATEGIES = {
    "compressed-tensors": ("tensor", "channel", "block"), "modelopt": ("tensor", "channel"),
    "scalewise": ("tensor",),
}  # fmt: skip
KEEP = "lm_head|norm|embed|router|gate\\.weight|shared_expert_gate"


@dataclasses.dataclass(frozen=True)
class Options:
    to: str
    layout: str | None = None
    keep: str = KEEP
    rules: tuple[tuple[str, str], ...] = ()
    scales: Choice = "amax"
    strategy: str | None = None  # None: a scale for each channel
    fuse: bool = True
    requantise: bool = False
    unscaled: bool = False

    def format_of(self, name: str) -> str | None:
        for pattern, fmt in self.rules:
            if re.search(pattern, name):
                return None if fmt == "keep" else fmt
        return None if self.keep and re.search(self.keep, name) else self.to


def checked_options(options: Options) -> Options:
    names = [(p, f if f == "keep" else as_format(f, "rules (--tensors)", blocks=True).name)
             for p, f in options.rules]  # fmt: skip
    to = as_format(options.to, "to (--to)", blocks=True).name
    layout = options.layout
    if layout is None:
        layout = "plain" if to in WIDE else "scalewise"
    for fmt in (to, *(f for _, f in names if f != "keep")):
        if layout not in ("plain", "scalewise") and fmt not in WIDE:
            writable(layout, fmt)
        elif layout == "plain" and fmt not in WIDE:
            raise ValueError(f"the layout plain has no {fmt}: it holds no scales")
    options = dataclasses.replace(options, to=to, rules=tuple(names), layout=layout)
    _check_effects(options, layout)
    return options


def _check_effects(options: Options, layout: str) -> None:
    """Raises if an option is given that has no effect on a layout."""
    strategies = STRATEGIES.get(layout, ())
    if options.strategy is not None and options.strategy not in strategies:
        has = f"has {' and '.join(strategies)}" if strategies else "has no choice"
        raise ValueError(f"strategy is {options.strategy!r}; the layout {layout} {has}")
    formats = [options.to, *(f for _, f in options.rules if f != "keep")]
    if not any(_has_choice(layout, f, options.scales) for f in formats):
        raise ValueError(
            f"scales is {options.scales!r}; for {options.to} the layout {layout} has amax"
        )


def _has_choice(layout: str, fmt: str, choice: Choice) -> bool:
    if choice == "amax":
        return True
    if layout == "plain" or fmt in WIDE:
        return False
    if layout == "scalewise":
        return fmt in BLOCK_FORMATS and choice == "four_over_six"
    found = writable(layout, fmt)
    return found.block is not None and found.format != "deepseek"


@dataclasses.dataclass
class CastJobs:
    """The jobs of a cast, and what the header and the config will say."""

    options: Options
    weights: Mapping[str, Weight]
    family: str | None
    written: dict[str, tuple[Layout, Strategy]] = dataclasses.field(default_factory=dict)
    with_channels: set[str] = dataclasses.field(default_factory=set)  # AWQ's, which are kept
    kept: list[str] = dataclasses.field(default_factory=list)
    copied: list[Weight] = dataclasses.field(default_factory=list)
    dropped: list[str] = dataclasses.field(default_factory=list)
    own: dict[str, Json] = dataclasses.field(default_factory=dict)
    largest: dict[str, float] = dataclasses.field(default_factory=dict)

    def job(self, weight: Weight) -> Job | None:
        options, fmt = self.options, self.options.format_of(weight.name)
        quantised_already = weight.layout is not None or weight.record
        if not quantised_already:
            x = weight.parts["codes"]
            if is_side(weight.name) and self.family not in (None, options.layout):
                self.dropped.append(weight.name)
                return None
            if fmt is None or not self._castable(weight, fmt):
                self.kept.append(weight.name)
                self.copied.append(weight)
                record = weight.record_of("copied", x.dtype, math.prod(x.shape))
                return Job((FileEntry(x.name, x.dtype, x.shape),), lambda: ([x.bytes], record))
        if fmt is None:
            fmt = options.to  # a pattern of names to keep doesn't protect what is narrow already
        if fmt in WIDE:
            self.kept.append(weight.name)
            entry = FileEntry(weight.name, WIDE[fmt], weight.shape)
            return Job((entry,), partial(_decoded, weight, entry))
        if options.layout == "scalewise":
            if quantised_already and not options.requantise:
                raise UnreadableError(_again(weight))
            job, self.own[weight.name] = lay.own_job(weight, fmt, options.scales)
            return job
        return self._quantised(weight, fmt)

    def refuse_a_copy(self) -> None:
        options = self.options
        if options.to in WIDE or len(self.copied) < max(1, len(self.weights) - len(self.dropped)):
            return
        unfit = [w for w in self.copied if options.format_of(w.name) is not None]
        kept = len(self.copied) - len(unfit)
        why = f"keep and rules (--keep, --tensors) keep {kept} of {len(self.copied)}"
        if unfit:
            largest = max(unfit, key=lambda w: math.prod(w.shape))
            why += (f", and the layout {options.layout} can't hold the others, "
                    f"such as {largest.name!r} of shape {list(largest.shape)}")  # fmt: skip
        raise UnreadableError(f"no tensor would become {options.to}: {why}")

    def _castable(self, weight: Weight, fmt: str) -> bool:
        x, options = weight.parts["codes"], self.options
        if x.dtype not in (*PLAIN, *(FP8 if options.unscaled else ())) or not all(x.shape):
            return False
        if fmt in WIDE or options.layout in ("plain", "scalewise"):
            return len(x.shape) > 0
        layout = writable(options.layout or "", fmt)
        if _unfit(weight, layout, lay.base_of(layout, x.name)):
            return False
        if layout.family == "gpt-oss":
            return len(x.shape) == 3 and x.name.endswith("_proj")
        return x.name.endswith((".weight", "_proj"))

    def _quantised(self, weight: Weight, fmt: str) -> Job:
        layout = writable(self.options.layout or "", fmt)
        base = lay.base_of(layout, weight.name)
        if (why := _unfit(weight, layout, base)) or base is None:
            raise UnreadableError(
                f"{weight.name!r} can't be cast to {layout.name}: it has {why}; decode it by "
                "rules={PATTERN: 'bf16'} (--tensors PATTERN=bf16)"
            )
        note = None
        if weight.layout is not None:
            fits = "pre" not in weight.parts or layout.pre is not None
            note = lay.repacked_exactly(weight.packed, layout) if fits else None
        elif weight.record:
            note = ""
        if self.options.requantise and not self._shares_whole(weight):
            note = ""
        if note == "" or (note is None and weight.layout is not None):
            if not self.options.requantise:
                raise UnreadableError(_again(weight))
            note = None
        make = partial(self._make, weight, layout, base, note)
        # the shapes of what is written; its bytes are arbitrary and take no memory
        if note is not None:
            template = lay.repacked(weight.packed, layout)
        else:
            *lead, rows, columns = weight.shape
            shape = (*lead, columns, rows) if layout.transposed else weight.shape
            template = shaped(shape, layout, self.options.strategy or "channel")
        self.written[weight.name] = layout, strategy_of(template)
        arrays = lay.laid_out(template, layout, base)
        if note is not None and "pre" in weight.parts:
            arrays[layout.names(base)["pre"]] = weight.parts["pre"].array()
            self.with_channels.add(weight.name)
        entries = tuple(entry_of(n, x) for n, x in arrays.items())
        return Job(entries, make)

    def _make(
        self, weight: Weight, layout: Layout, base: str, note: str | None
    ) -> tuple[Sequence[np.ndarray], Json]:
        if note is not None:
            packed = lay.repacked(weight.packed, layout)
            record = weight.record_of(note, layout.format, packed.size)
            pre = [weight.parts["pre"].array()] if "pre" in weight.parts else []
            return [*lay.laid_out(packed, layout, base).values(), *pre], record
        x = rows_of(weight)
        packed = quantised(
            x, layout, writer_of(layout.family), largest=self._largest(weight, layout, x),
            choice=self.options.scales, strategy=self.options.strategy or "channel",
        )  # fmt: skip
        if layout.transposed and isinstance(x, np.ndarray):
            x = np.swapaxes(x, -1, -2)
        lost = loss(x, Decoded(packed), packed)
        what = "requantised" if weight.layout else "quantised"
        record = weight.record_of(what, layout.format, packed.size, lost)
        return list(lay.laid_out(packed, layout, base).values()), record

    @cached_property
    def _fused(self) -> dict[tuple, list[str]]:
        groups: dict[tuple, list[str]] = {}
        for name in self.weights:
            if (key := fused_key(name)) is not None:
                groups.setdefault(key, []).append(name)
        return groups

    def _shares_whole(self, weight: Weight) -> bool:
        """Returns False if tensors that an engine reads as one have global scales of their own."""
        key = fused_key(weight.name) if self.options.fuse else None
        parts = [self.weights[n] for n in self._fused[key]] if key is not None else []
        scales = [w.packed.whole for w in parts if w.layout is not None]
        found = [np.unique(s) for s in scales if s is not None]
        return not found or all(np.array_equal(s, found[0]) for s in found)

    def _largest(self, weight: Weight, layout: Layout, x: np.ndarray | Decoded) -> float:
        """Returns the largest magnitude behind the tensor's scale, over tensors that share it."""
        key = fused_key(weight.name) if self.options.fuse and layout.whole else None
        names = [weight.name] if key is None else self._fused[key]
        for name in names:
            if name not in self.largest:
                rows = x if name == weight.name else rows_of(self.weights[name])
                self.largest[name] = amax(rows)
            if not np.isfinite(self.largest[name]):
                raise UnreadableError(f"{name!r} holds NaN or infinities; name it in keep (--keep)")
        return max(self.largest[name] for name in names)


def _unfit(weight: Weight, layout: Layout, base: str | None) -> str | None:
    width = layout.block[1] if layout.block and layout.format != "deepseek" else 1
    if base is None:
        return "no name there"
    if len(weight.shape) < 2:
        return "one axis"
    columns = weight.shape[-2 if layout.transposed else -1]
    return f"{columns} columns, no multiple of {width}" if columns % width else None


def _again(weight: Weight) -> str:
    has = "other blocks or another format"
    if weight.channels is not None:
        has += ", or factors of the input's channels that the other layout has no place for"
    return (
        f"{weight.name!r} is quantized already; cast the original, or round its numbers again with "
        f"requantise=True (--requantise): as {weight.kind} it has {has}"
    )


def rows_of(weight: Weight) -> np.ndarray | Decoded:
    """Returns the numbers of a weight, decoded when rows are sliced if it is quantised, times the
    factors of the input's channels."""
    if weight.layout is None:
        return weight.value() if weight.record else weight.parts["codes"].array()
    if weight.channels is not None:
        return weight.effective()
    packed = weight.packed
    return values(packed) if packed.transposed else Decoded(packed)


def _decoded(weight: Weight, entry: FileEntry) -> tuple[Sequence[np.ndarray | Decoded], Json]:
    dtype = DTYPES[entry.dtype]
    rows = weight.layout is not None and not weight.packed.transposed and weight.channels is None
    y = Decoded(weight.packed, dtype) if rows else weight.effective(dtype)
    narrow = weight.layout is not None or weight.record
    what = "decoded" if narrow else "copied" if weight.parts["codes"].dtype == entry.dtype else (
        "cast")  # fmt: skip
    lost = None
    if what == "cast" and weight.parts["codes"].dtype not in (*EXACT[entry.dtype], *FP8):
        lost = loss(weight.parts["codes"].array(), y)
    return [y], weight.record_of(what, entry.dtype, math.prod(entry.shape), lost)


def shards_of(source: Source, plan: CastJobs) -> list[Shard]:
    jobs: dict[str, list[Job]] = {f.path.name: [] for f in source.files}
    for weight in plan.weights.values():
        job = plan.job(weight)
        if job is not None:
            jobs[weight.parts["codes"].file.path.name].append(job)
    shards = []
    ours = {"scalewise", "tensor_names", "_quantization_metadata"}
    for file in source.files:
        left_out = ours | plan.weights.keys()
        metadata = {k: v for k, v in file.metadata.items() if k not in left_out}
        if plan.own:
            metadata["scalewise"] = json.dumps(plan.own)
        name = file.path.with_suffix(".safetensors").name
        shards.append(Shard(name, metadata, jobs[file.path.name]))
    return shards


def write_configs(folder: Path, source: Source, plan: CastJobs, shards: Sequence[Shard]) -> None:
    base = source.path if source.path.is_dir() else source.path.parent
    written = {s.name for s in shards} | {f.path.name for f in source.files}
    if source.path.is_dir():
        for path in sorted(base.iterdir()):
            skip = path.suffix == ".safetensors" or path.name in written
            skip = skip or path.name.startswith(".") or path.name.endswith(".index.json")
            if path.is_file() and not skip and path.name != "hf_quant_config.json":
                shutil.copyfile(path, folder / path.name)
    wide = [n for n in plan.kept if len(plan.weights[n].shape) > 1]
    found = quantization_config(plan.written, wide, plan.with_channels)
    config = without_quantization(source.config)
    config |= {"quantization_config": found} if found else {}
    if source.config or found:
        _write_json(folder / "config.json", config)
    other = hf_quant_config(found)
    if other is not None:
        _write_json(folder / "hf_quant_config.json", other)
    if len(shards) > 1 or any(base.glob("*.index.json")):
        entries = [(e.name, s.name, e.nbytes) for s in shards for j in s.jobs for e in j.entries]
        index = {"metadata": {"total_size": sum(n for _, _, n in entries)},
                 "weight_map": {name: shard for name, shard, _ in entries}}  # fmt: skip
        own = next(iter(sorted(base.glob("*.index.json"))), Path("model.safetensors.index.json"))
        _write_json(folder / own.name, index)


def _write_json(path: Path, content: Json) -> None:
    with replacing(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())
