"""``compare``: where two recordings of a program differ, line by line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from difflib import SequenceMatcher
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._output import Rows, Tabular, as_csv, counted, plain
from ..._types import Json
from ._recording import RecordedArray, Recording


def relative_difference(a: Any, b: Any) -> float:
    """Returns ``||a - b|| / max(||a||, ||b||)``, between 0 and 2.

    Over all numbers; inf if one is finite where the other is not, or both are infinite with
    opposite signs.

    Example:
        >>> relative_difference([3.0, 4.0], [3.0, 4.5]), relative_difference([1.0], [math.inf])
        (0.0924..., inf)
    """
    parts = [np.asarray(x) for x in (a, b)]
    if any(np.iscomplexobj(x) for x in parts):
        parts = [np.stack([np.real(x), np.imag(x)]) for x in parts]
    x, y = (np.ravel(part).astype(np.float64) for part in parts)
    finite = np.isfinite(x) & np.isfinite(y)
    rest = np.stack([x[~finite], y[~finite]])
    if not np.array_equal(rest[0], rest[1], equal_nan=True):
        return math.inf
    x, y = x[finite], y[finite]
    unit = max(np.abs(x).max(initial=0), np.abs(y).max(initial=0))
    if unit == 0:
        return 0.0
    x, y = x / unit, y / unit
    return float(np.linalg.norm(x - y) / max(np.linalg.norm(x), np.linalg.norm(y)))


Arrays = Sequence[RecordedArray]
ENDS = ("argument", "output")


def matched(a: Arrays, b: Arrays) -> list[tuple[int, int]]:
    """Arguments and outputs belong together by their paths. Results of equations are aligned as the
    lines of two texts are (``difflib``): first by file, line, shape, function, primitive and pass;
    what is left between two matches by the last three, since other versions of a program have other
    lines, files and shapes."""
    ends = {(x.primitive, x.path): j for j, x in enumerate(b) if x.primitive in ENDS}
    found = [
        (i, ends[x.primitive, x.path])
        for i, x in enumerate(a)
        if x.primitive in ENDS and (x.primitive, x.path) in ends
    ]
    own = [i for i, x in enumerate(a) if x.primitive not in ENDS]
    other = [j for j, x in enumerate(b) if x.primitive not in ENDS]
    for same, before, after in _aligned(a, b, own, other, _by_line):
        found += same
        found += [pair for pairs, _, _ in _aligned(a, b, before, after, _by_name) for pair in pairs]
    return sorted(found)


def _by_line(x: RecordedArray) -> Hashable:
    file = Path(x.file).name if x.file else None
    return file, x.line, x.shape, *_by_name(x)


def _by_name(x: RecordedArray) -> tuple[Hashable, ...]:
    # a program in another dtype has other conversions beside those that it shares
    shape = x.shape if x.primitive == "convert_element_type" else None
    kind = x.dtype.rstrip("0123456789") if x.dtype.startswith("complex") else ""
    return x.function, x.primitive, x.result, x.direction, kind, shape


def _aligned(
    a: Arrays, b: Arrays, own: Sequence[int], other: Sequence[int], key: Callable
) -> Iterator[tuple[list[tuple[int, int]], Sequence[int], Sequence[int]]]:
    keys = [key(a[i]) for i in own], [key(b[j]) for j in other]
    i = j = 0
    for block in SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks():
        same = zip(
            own[block.a : block.a + block.size], other[block.b : block.b + block.size], strict=True
        )
        yield list(same), own[i : block.a], other[j : block.b]
        i, j = block.a + block.size, block.b + block.size


# Means and root mean squares are sums in float32, on each device in another order: differences up
# to this don't count.
SUMS = 1e-5
COLUMNS = (
    "where", "function", "direction", "primitive", "dtype", "arrays", "differ", "difference",
    "bits", "non_finite_a", "non_finite_b", "visits_a", "visits_b",
)  # fmt: skip
HEADINGS = (
    "line", "function", "pass", "primitive", "dtype", "results", "differ", "difference", "bits",
    "not finite", "visits",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayDifference:
    """Two recorded arrays that belong together.

    Attributes:
        a, b: the arrays.
    """

    a: RecordedArray
    b: RecordedArray

    @cached_property
    def identical(self) -> bool:
        """Whether all numbers of all visits have the same bits, by their checksums."""
        a, b = self.a, self.b
        types = (a.dtype, a.shape, a.visits) == (b.dtype, b.shape, b.visits)
        return types and a.checksum == b.checksum

    @cached_property
    def difference(self) -> float:
        """The relative difference ``||a - b|| / max(||a||, ||b||)``, estimated.

        Of the samples, in the first or the last visit, whichever is larger; at least that of the
        root mean squares, and of the means relative to them, over all numbers and visits. 0.0 for
        identical arrays; inf if a sample is finite in one and not in the other.
        """
        if self.identical:
            return 0.0
        a, b = self.a, self.b
        found = [0.0]
        if a.samples.shape == b.samples.shape and a.shape == b.shape:
            found += [relative_difference(x, y) for x, y in zip(a.samples, b.samples, strict=True)]
        size = max(a.rms, b.rms)
        if a.visits == b.visits and not a.non_finite and not b.non_finite and size > 0:
            found += [abs(x - y) / size for x, y in ((a.rms, b.rms), (a.mean, b.mean))]
            found[-2:] = [x if x > SUMS else 0.0 for x in found[-2:]]
        return max(found)

    @cached_property
    def bits(self) -> int:
        """How many of the last bits differ in a sampled number, at most: two numbers less than 2^n
        steps of their dtype apart differ in n. 0 between dtypes, and where none is finite."""
        a, b = self.a, self.b
        dtype = jnp.dtype(a.dtype)
        if a.dtype != b.dtype or a.shape != b.shape or not jnp.issubdtype(dtype, jnp.floating):
            return 0
        x, y = (_steps(s, dtype) for s in (a.samples, b.samples))
        both = np.isfinite(a.samples) & np.isfinite(b.samples)
        return int(np.abs(x - y)[both].max(initial=0)).bit_length()

    @property
    def differs(self) -> bool:
        """Whether bits, the number of visits, or (between dtypes) numbers differ."""
        if self.a.dtype == self.b.dtype:
            return not self.identical
        return self.difference > 0 or self.a.visits != self.b.visits

    @property
    def in_one(self) -> bool:
        """Whether one of the arrays has non-finite numbers and the other has none."""
        return (self.a.non_finite > 0) != (self.b.non_finite > 0)


def _steps(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns numbers of a dtype as integers, of which neighbours differ by one."""
    narrow = x.astype(dtype)
    codes = narrow.view(f"u{dtype.itemsize}").astype(np.int64)
    top = 1 << 8 * dtype.itemsize - 1
    return np.where(codes >= top, top - codes, codes)


@dataclasses.dataclass(frozen=True)
class LineDifference:
    """The matched results of one line's equations in one pass.

    Attributes:
        where: ``file.py:12``, or ``argument [0]['w']``.
        line: the line's number in the first recording; 0 for arguments and outputs.
        function, direction: of the line.
        primitive: with the largest difference.
        arrays, differ: how many results there are, and how many of them differ.
        dtype: ``"float32"``, or ``"float32 -> bfloat16"``.
        difference: the largest relative difference of one of them (see
            :attr:`ArrayDifference.difference`).
        bits: the most last bits that differ in one of them (see :attr:`ArrayDifference.bits`).
        non_finite: how many numbers aren't finite in each recording.
        visits: of the result with the largest difference, in each recording.
    """

    where: str
    line: int
    function: str
    direction: str
    primitive: str
    arrays: int
    differ: int
    dtype: str
    difference: float
    bits: int
    non_finite: tuple[int, int]
    visits: tuple[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class RecordingComparison(Tabular):
    """Where two recordings differ.

    Attributes:
        a, b: the recordings.
        pairs: the arrays that belong together, in the first recording's program order.
        unmatched: how many arrays of each recording have no counterpart.
    """

    a: Recording
    b: Recording
    pairs: tuple[ArrayDifference, ...]
    unmatched: tuple[int, int]

    most = 40

    @cached_property
    def lines(self) -> tuple[LineDifference, ...]:
        """The lines on which something differs, in program order."""
        found: dict[Any, list[ArrayDifference]] = {}
        for pair in self.pairs:
            a = pair.a
            key = (a.primitive, a.path) if a.primitive in ENDS else (a.file, a.line, a.direction)
            found.setdefault(key, []).append(pair)
        return tuple(_line(x) for x in found.values() if any(pair.differs for pair in x))

    @property
    def differ(self) -> int:
        """How many of the pairs differ."""
        return sum(pair.differs for pair in self.pairs)

    @property
    def largest(self) -> ArrayDifference | None:
        """The results of an equation with the largest relative difference; None if none differs."""
        found = [x for x in self.pairs if x.differs and x.a.primitive not in ENDS]
        return max(found, key=lambda x: x.difference, default=None)

    @property
    def output_difference(self) -> float:
        """The largest relative difference of an output."""
        return max((x.difference for x in self.pairs if x.a.primitive == "output"), default=0.0)

    @property
    def first_in_one(self) -> ArrayDifference | None:
        """The first results, in time, that aren't finite in one of the recordings alone."""
        found = [x for x in self.pairs if x.in_one]
        clocks = [x.a.clock if x.a.non_finite else x.b.clock for x in found]
        order = [c if c >= 0 else math.inf for c in clocks]
        return found[order.index(min(order))] if found else None

    @property
    def verdict(self) -> str:
        """Where the recordings differ first, and most, in one sentence."""
        pairs = counted(len(self.pairs), "matched array")
        parts = []
        largest = self.largest
        if not self.differ:
            parts.append(f"None of the {pairs} differs")
        else:
            first = next(x for x in self.pairs if x.differs)
            parts.append(f"{self.differ:,} of the {pairs} differ, first {_place(first.a)}")
            if largest is not None and largest is not first:
                size = difference(largest.difference)
                parts.append(f"the largest relative difference is {size}, of {_place(largest.a)}")
            parts.append(f"the outputs differ by {difference(self.output_difference)}")
        alone = self.first_in_one
        if alone is not None:
            which = "first" if alone.a.non_finite else "second"
            place = _place(alone.a)
            parts.append(f"numbers that aren't finite are first in the {which} alone: {place}")
        if any(self.unmatched):
            a, b = self.unmatched
            parts.append(f"{a:,} and {counted(b, 'array')} have no counterpart")
        return "; ".join(parts) + "."

    @property
    def title(self) -> str:
        return f"Two recordings of {self.a.function}"

    @property
    def heading(self) -> str:
        return f"compare  {_side(self.a)} -> {_side(self.b)}"

    def sentences(self) -> list[str]:
        firsts = [("first", self.a.first_non_finite), ("second", self.b.first_non_finite)]
        made = [f"The {which}'s first non-finite number: {_place(x)}." for which, x in firsts if x]
        return [self.verdict, *made]

    def tables(self, *, everything: bool = True) -> list[Rows]:
        title = "Lines that differ, in program order; differences relative to the larger norm"
        in_one = [bool(x.non_finite[0]) != bool(x.non_finite[1]) for x in self.lines]
        styles = ["red" if x else None for x in in_one]
        return [Rows(title, HEADINGS, [cells(line) for line in self.lines], styles)]

    def __repr__(self) -> str:
        found = f"{self.differ} of {len(self.pairs)} pairs of arrays differ"
        return f"<RecordingComparison: {found}; show()>"

    def _csv(self) -> str:
        rows = (
            [*(getattr(x, name) for name in COLUMNS[:9]), *x.non_finite, *x.visits]
            for x in self.lines
        )
        return as_csv(COLUMNS, rows)

    def as_dict(self) -> dict[str, Json]:
        def sides(of: Recording) -> dict[str, Json]:
            names = ("function", "device", "versions", "fused", "jit_difference")
            return {name: getattr(of, name) for name in names}

        return plain(
            {
                "verdict": self.verdict,
                "a": sides(self.a),
                "b": sides(self.b),
                "matched": len(self.pairs),
                "differ": self.differ,
                "unmatched": self.unmatched,
                "output_difference": self.output_difference,
                "lines": [dataclasses.asdict(line) for line in self.lines],
            }
        )


def compare_recordings(a: Recording, b: Recording) -> RecordingComparison:
    """Compares two recordings, line by line; results are matched by :func:`matched`."""
    indices = matched(a.arrays, b.arrays)
    pairs = tuple(ArrayDifference(a.arrays[i], b.arrays[j]) for i, j in indices)
    unmatched = len(a.arrays) - len(pairs), len(b.arrays) - len(pairs)
    return RecordingComparison(a, b, pairs, unmatched)


def _line(pairs: Sequence[ArrayDifference]) -> LineDifference:
    worst = max(pairs, key=lambda x: (x.difference, x.differs))
    a, b = worst.a, worst.b
    return LineDifference(
        where=a.where,
        line=a.line,
        function=a.name,
        direction=a.direction,
        primitive=a.primitive,
        arrays=len(pairs),
        differ=sum(x.differs for x in pairs),
        dtype=a.dtype if a.dtype == b.dtype else f"{a.dtype} -> {b.dtype}",
        difference=worst.difference,
        bits=max(x.bits for x in pairs),
        non_finite=(
            int(np.sum([x.a.non_finite for x in pairs])),
            int(np.sum([x.b.non_finite for x in pairs])),
        ),
        visits=(a.visits, b.visits),
    )


def difference(x: float) -> str:
    """``0.0012``, ``0 in the sample`` for other bits elsewhere, or ``not finite in one``."""
    if math.isinf(x):
        return "not finite in one"
    return f"{x:.2g}" if x else "0 in the sample"


def _place(x: RecordedArray) -> str:
    return x.where if x.path else f"{x.primitive} at {x.where}"


def _side(x: Recording) -> str:
    """``step on cpu (cpu), jax 0.10.2``."""
    how = ", one compiled program" if x.fused else ""
    return f"{x.function} on {x.device}, jax {dict(x.versions).get('jax', '?')}{how}"


def cells(line: LineDifference) -> tuple[str, ...]:
    visits = line.visits
    return (
        line.where, line.function, line.direction, line.primitive, line.dtype, f"{line.arrays:,}",
        f"{line.differ:,}", difference(line.difference), str(line.bits or ""),
        _change(line.non_finite, ""), _change(visits, "1"),
    )  # fmt: skip


def _change(pair: tuple[int, int], usual: str) -> str:
    """``3 -> 4``, or ``3`` for equal ones; "" where both are the usual."""
    if pair[0] != pair[1]:
        return f"{pair[0]:,} -> {pair[1]:,}"
    return "" if str(pair[0]) in (usual, "0") else f"{pair[0]:,}"
