"""Compares two checkpoints of any layouts in value, tensor by tensor."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable

import numpy as np

from .._output import Rows, counted
from ._find import intact, is_side
from ._packed import Decoded, Loss, loss
from ._report import CheckpointReport, _db, first_of
from ._weights import Weight


@dataclasses.dataclass(frozen=True)
class Difference:
    """Two arrays of the same name."""

    name: str
    before: str  # layouts, or dtypes of plain ones
    after: str
    error: float  # of the norm, relative; infinite where numbers aren't finite in one alone
    loss: Loss | None  # None where the shapes differ
    shapes: tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(eq=False)
class DiffReport(CheckpointReport):
    """What :func:`scalewise.checkpoints.diff` found."""

    before: str
    after: str
    tolerance: float  # the largest relative error that counts as equal
    differences: list[Difference]  # of all arrays that both have, the largest error first
    missing: list[str]  # names in the first and in the second alone
    extra: list[str]
    derived = ("equal",)

    @property
    def equal(self) -> bool:
        return bool(self)

    @property
    def beyond(self) -> list[Difference]:
        """The arrays whose error is above the tolerance."""
        return [d for d in self.differences if not d.error <= self.tolerance]

    def __bool__(self) -> bool:
        """True if all arrays are there and none is beyond the tolerance."""
        return not (self.beyond or self.missing or self.extra)

    def sentences(self) -> list[str]:
        equal = sum(d.error == 0 for d in self.differences)
        found = [f"{counted(len(self.differences), 'array')} in both: {equal} equal in value, "
                 f"{len(self.differences) - equal} unequal, {len(self.beyond)} beyond a relative "
                 f"error of {self.tolerance:g}"]  # fmt: skip
        for names, where in ((self.missing, self.before), (self.extra, self.after)):
            if names:
                found.append(f"only in {where}: {first_of(names)}")
        return found

    def tables(self, *, everything: bool = True) -> list[Rows]:
        rows = []
        for d in self.differences:
            if d.error == 0:
                continue
            if d.loss is None:
                rows.append((d.name, d.before, d.after, "inf", "", f"shapes {d.shapes}", ""))
                continue
            at, sqnr = d.loss.worst or ("", math.nan)
            rows.append((d.name, d.before, d.after, f"{d.error:.3g}", _db(d.loss.sqnr),
                         f"{d.loss.different} of {d.loss.numbers}",
                         f"{at} {_db(sqnr)}" if at else ""))  # fmt: skip
        heads = ("array", "before", "after", "error", "SQNR", "different", "worst block")
        return [Rows("largest error first", heads, rows)]


def diff(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
    *,
    tolerance: float = 0.0,
    told: Callable[[str, int], None] | None = None,
) -> DiffReport:
    """Compares two checkpoints, of the same or of different layouts, in value.

    Args:
        before, after: files or folders that :func:`load` reads.
        tolerance: the largest relative error of an array that counts as equal.
        told: called with the name and the bytes of each array.

    Raises:
        UnreadableError: a checkpoint can't be read.
        OSError: a file can't be read.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance!r}; expected 0 or more")
    sides = []
    for path in (before, after):
        _, found = intact(path)
        sides.append({n: w for n, w in found.items() if not is_side(n)})
    a, b = sides
    differences = []
    for name in a:
        if name in b:
            differences.append(_compared(a[name], b[name]))
            if told is not None:
                told(name, a[name].nbytes + b[name].nbytes)
    differences.sort(key=lambda d: -d.error)
    return DiffReport(str(before), str(after), tolerance, differences,
                      [n for n in a if n not in b], [n for n in b if n not in a])  # fmt: skip


def _compared(a: Weight, b: Weight) -> Difference:
    kinds = (_kind(a), _kind(b))
    shapes = a.shape, b.shape
    if shapes[0] != shapes[1]:
        return Difference(a.name, *kinds, math.inf, None, shapes)
    plain = a.kind == b.kind == "plain" and a.format == b.format
    if plain and np.array_equal(a.parts["codes"].bytes, b.parts["codes"].bytes):
        return Difference(a.name, *kinds, 0.0, Loss(numbers=math.prod(a.shape)), shapes)
    same = a.layout is not None and b.layout is not None and (
        a.packed.transposed == b.packed.transposed)  # fmt: skip
    x, y = _rows(a, same), _rows(b, same)
    packed = b.packed if b.layout is not None and not (b.packed.transposed and not same) else None
    found = loss(x, y, packed)
    error = math.inf if found.non_finite else math.sqrt(found.noise / found.signal) if (
        found.signal) else (math.inf if found.noise else 0.0)  # fmt: skip
    return Difference(a.name, *kinds, error, found, shapes)


def _kind(weight: Weight) -> str:
    return weight.format if weight.layout is None else weight.kind


def _rows(weight: Weight, stored: bool) -> np.ndarray | Decoded:
    """Returns the numbers, times the factors of the input's channels if any."""
    channels = weight.parts.get("pre")
    if weight.layout is not None and channels is None and (stored or not weight.packed.transposed):
        return Decoded(weight.packed)
    x = weight.value(np.float64 if weight.format == "f64" else np.float32)
    return x if channels is None else x * channels.array().astype(np.float32)
