"""``Recording``: what a device computed, by equation; saved, loaded, and printed."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np

from ..._check import AnyFloat, Natural, Range, checked
from ..._output import Printed, Rows, Tabular, counted, place, writable
from ...scaled import load_safetensors, save_safetensors
from .._run._equation_statistics import display_name, written_at
from ._recorder import COUNTS, NEVER, NUMBERS, Numbers, Site

ENDING = ".safetensors"
SHOWN = 12  # arrays shown up to the first non-finite number, or of the largest magnitudes
COLUMNS = (
    "line", "function", "primitive", "type", "visits", "smallest", "largest", "not finite",
    "zeros", "subnormal",
)  # fmt: skip


NOWHERE = {
    "file": None, "line": 0, "function": "", "caller": "", "scope": "", "direction": "forward",
}  # fmt: skip


def _is_dtype(name: str) -> bool:
    try:
        return "<" in name or jnp.dtype(name).name == name  # key<fry>: of random keys
    except TypeError:
        return False


DtypeName = Annotated[str, Range(_is_dtype, "the name of a dtype")]


@checked
@dataclasses.dataclass(frozen=True, eq=False)
class RecordedArray:
    """One result of one equation, or an argument or output, over all iterations of loops.

    Attributes:
        primitive: ``"argument"`` and ``"output"`` for those.
        result: its position among the equation's results.
        path: of an argument or output, as ``jax.tree_util.keystr`` prints it.
        shape, dtype: of each visit.
        file, line, function: where the user wrote it; None, 0, "" where JAX doesn't know.
        caller: ``path:line`` of the user's line that called the library's ``file``; else "".
        scope: the name stack.
        direction: "forward", "backward" or "optimizer".
        visits: how often it was computed.
        nan, infinite, zeros, subnormal: how many of its numbers are so; subnormal in its own dtype.
        created: how many of its numbers aren't finite in visits whose operands are finite.
        first: the visit at which one was created, from 0; -1 if none was.
        clock: how many arrays had been recorded before, which orders visits in time; -1 likewise.
        checksum: of the bits of all numbers in all visits (all NaNs count as one).
        minimum, maximum: of the finite numbers (inf and -inf without any).
        smallest: the smallest nonzero magnitude; inf without any.
        mean, rms: mean and root mean square of the finite numbers of each visit, averaged.
        samples: float[2, n], up to 32 numbers spread over the array, of the first and last visit.
    """

    primitive: str
    result: Natural
    path: str
    shape: tuple[Natural, ...]
    dtype: DtypeName
    file: str | None
    line: Natural
    function: str
    caller: str
    scope: str
    direction: str
    visits: Natural
    first: int
    clock: int
    checksum: int
    nan: Natural
    infinite: Natural
    zeros: Natural
    subnormal: Natural
    created: Natural
    minimum: AnyFloat
    maximum: AnyFloat
    smallest: AnyFloat
    mean: AnyFloat
    rms: AnyFloat
    samples: np.ndarray

    @property
    def size(self) -> int:
        """How many numbers there are over all visits; a complex one counts as two."""
        parts = 2 if self.dtype.startswith("complex") else 1
        return int(np.prod(self.shape, dtype=np.int64)) * self.visits * parts

    @property
    def non_finite(self) -> int:
        return self.nan + self.infinite

    @property
    def where(self) -> str:
        """``file.py:12``, or ``argument [0]['w']``."""
        if self.path or self.primitive in ("argument", "output"):
            return f"{self.primitive} {self.path}".strip()
        return place(self.file, self.line)

    @property
    def name(self) -> str:
        """The function's name, qualified where the bare one is ambiguous."""
        return display_name(self.function)


@checked
@dataclasses.dataclass(frozen=True, eq=False)
class Recording(Tabular):
    """Statistics of what a device computed in a run of a function, by equation, in program order.

    Attributes:
        function: its name.
        device: kind and platform.
        versions: of JAX and jaxlib.
        fused: whether the numbers were read within one compiled program.
        arrays: the arguments, the results of equations, the outputs.
        jit_difference: the largest difference between an output of the recorded run and of
            ``jax.jit(f)``, relative to its norm (see :func:`compare`): 0.0 if all have the same
            bits, inf if others are non-finite; None if that wasn't run.
    """

    function: str
    device: str
    versions: tuple[tuple[str, str], ...]
    fused: bool
    arrays: tuple[RecordedArray, ...]
    jit_difference: AnyFloat | None = None

    @cached_property
    def first_non_finite(self) -> RecordedArray | None:
        """The first array, in time, with a non-finite number though its operands have none."""
        created = [x for x in self.arrays if x.created]
        return min(created, key=lambda x: x.clock, default=None)

    @property
    def verdict(self) -> str:
        """Where the first non-finite number was made, in one sentence."""
        first = self.first_non_finite
        if first is None:
            held = sum(x.non_finite > 0 for x in self.arrays)
            if not held:
                return f"All numbers that {self.function} computed are finite."
            text = "Non-finite numbers come from non-finite operands alone"
            return f"{text}; {counted(held, 'array')} hold some."
        kind = "NaN" if first.nan and not first.infinite else "infinite or NaN"
        kind = "infinite" if first.infinite and not first.nan else kind
        if first.primitive == "argument":
            return f"The first numbers that aren't finite are those of {first.where}."
        visit = f" in visit {first.first}" if first.visits > 1 else ""
        return (
            f"The first number that isn't finite comes from {first.primitive} at {first.where} "
            f"({first.name or 'unknown function'}){visit}: {first.created:,} of {first.size:,} "
            f"numbers are {kind}, though those of its operands are finite."
        )

    @property
    def title(self) -> str:
        return f"Recording of {self.function}"

    @property
    def heading(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions)
        how = "one compiled program" if self.fused else "each equation compiled alone"
        arrays = counted(len(self.arrays), "array")
        return f"record  {self.function} on {self.device}   {versions}; {how}; {arrays}"

    def sentences(self) -> list[str]:
        return list(filter(None, [self.verdict, _jit_note(self.jit_difference)]))

    def tables(self, *, everything: bool = True) -> list[Rows]:
        shown, title = _shown(self, everything)
        styles = ["red" if x.created else None for x in shown]
        return [Rows(title, COLUMNS, list(map(_cells, shown)), styles)]

    _repr_html_ = Printed._repr_html_

    def __repr__(self) -> str:
        return f"<Recording of {self.function} on {self.device}: {len(self.arrays)} arrays>"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes a ``.safetensors`` file; on failure, a file that was there stays unchanged.

        Raises:
            ValueError: another ending, no such folder, or not a regular file.
            OSError: the file can't be written.
        """
        path = recordable(path)
        names = [f.name for f in dataclasses.fields(RecordedArray) if f.name != "samples"]
        header = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        header["arrays"] = [{name: getattr(x, name) for name in names} for x in self.arrays]
        tensors = {
            "recording": np.frombuffer(json.dumps(header).encode(), np.uint8),
            "lengths": np.array([x.samples.shape[1] for x in self.arrays], np.int64),
            "samples": np.concatenate([x.samples for x in self.arrays], axis=1),
        }
        save_safetensors(path, tensors)
        return path


def recordable(path: str | os.PathLike[str]) -> Path:
    """Checks that a recording can be written to a path, and returns the path.

    Raises:
        ValueError: another ending than .safetensors, no such folder, or not a regular file.
        OSError: the file can't be written, or none can be created in its folder.
    """
    return writable(path, (ENDING,))


@checked
def load_recording(path: str | os.PathLike[str]) -> Recording:
    """Reads a recording that :meth:`Recording.save` wrote.

    Raises:
        ValueError: it is no file of a recording.
        OSError: it can't be read.
    """
    tensors: dict[str, Any] = load_safetensors(path)
    try:
        header = json.loads(bytes(tensors["recording"]))
        lengths, table = tensors["lengths"], np.asarray(tensors["samples"], np.float64)
        if (lengths < 0).any() or table.shape != (2, lengths.sum()):
            raise ValueError(f"lengths {lengths} for samples of shape {table.shape}")
        samples = np.split(table, np.cumsum(lengths)[:-1], axis=1)
        arrays = [
            RecordedArray(**(row | {"shape": tuple(row["shape"])}), samples=some)
            for row, some in zip(header["arrays"], samples, strict=True)
        ]
        versions = tuple((str(name), str(version)) for name, version in header["versions"])
        return Recording(**(header | {"arrays": tuple(arrays), "versions": versions}))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{str(path)!r} is no recording: expected a file that Recording.save wrote "
            f"({type(error).__name__}: {error})"
        ) from None


def recorded_arrays(sites: Sequence[Site], state: Numbers) -> tuple[RecordedArray, ...]:
    words, counts, numbers, samples = (
        np.asarray(x) for x in (state.words, state.counts, state.numbers, state.samples)
    )
    trained = any(s.equation is not None and s.equation.direction == "backward" for s in sites)
    whole = counts[..., 0].astype(np.int64) + (counts[..., 1].astype(np.int64) << 32)
    found = []
    for i, site in enumerate(sites):
        visits, first, clock, checksum = map(int, words[i])
        if not visits:
            continue
        parts = 2 if jnp.issubdtype(site.aval.dtype, np.complexfloating) else 1
        few = min(site.aval.size * parts, samples.shape[2])
        averaged = np.r_[numbers[i, :3], numbers[i, 3:] / visits].astype(float)
        found.append(
            RecordedArray(
                primitive=site.name,
                result=site.position,
                path=site.path,
                shape=tuple(site.aval.shape),
                dtype=str(site.aval.dtype),
                **(written_at(site.equation, trained) if site.equation else NOWHERE),
                visits=visits,
                first=first if first != NEVER else -1,
                clock=clock if first != NEVER else -1,
                checksum=checksum,
                **dict(zip(COUNTS, map(int, whole[i]), strict=True)),
                **dict(zip(NUMBERS, map(float, averaged), strict=True)),
                samples=samples[i, :, :few].astype(np.float64),
            )
        )
    return tuple(found)


def _jit_note(difference: float | None) -> str:
    if difference is None:
        return ""
    if difference == 0:
        return "The outputs have the same bits as those of jax.jit of the function."
    if math.isinf(difference):
        return "jax.jit of the function gives other non-finite outputs: it fuses operations."
    return (
        f"The outputs of jax.jit of the function differ by {difference:.2g}: it fuses operations."
    )


def _shown(recording: Recording, everything: bool) -> tuple[list[RecordedArray], str]:
    arrays, first = list(recording.arrays), recording.first_non_finite
    if everything:
        return arrays, "All arrays in program order"
    if first is not None:
        end = next(i for i, x in enumerate(arrays) if x is first) + 1
        return arrays[max(end - SHOWN, 0) : end], "The last arrays up to it, in program order"
    largest = sorted(arrays, key=_amax, reverse=True)[:SHOWN]
    return [x for x in arrays if x in largest], "The arrays with the largest numbers"


def _amax(x: RecordedArray) -> float:
    return max(abs(x.minimum), abs(x.maximum)) if x.minimum <= x.maximum else 0.0


def _cells(x: RecordedArray) -> tuple[str, ...]:
    shape = f"{x.dtype}[{','.join(map(str, x.shape))}]"
    smallest = f"{x.smallest:.2e}" if math.isfinite(x.smallest) else ""
    counts = (f"{n:,}" if n else "" for n in (x.non_finite, x.zeros, x.subnormal))
    named = "" if x.path else x.primitive
    return x.where, x.name, named, shape, f"{x.visits:,}", smallest, f"{_amax(x):.2e}", *counts
